"""Operators of the model that have several implementations: one file a backend, and the registry that chooses among them."""

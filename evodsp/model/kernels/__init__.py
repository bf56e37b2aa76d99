"""Operators of the model that have several implementations: one file a backend, and `operators`, which chooses among them."""

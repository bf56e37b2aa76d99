"""Builders of test data, shared by tests: one module for each kind of thing. Tests import from here, not from each other."""

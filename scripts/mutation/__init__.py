"""Breaks of the package that tests must find: a table of them, and a draw from the syntax trees."""

"""The version of evodsp, in a module that every other one may import."""

__version__ = "0.2.0"

"""`evodsp selftest`: checks of a machine, on its GPUs or on CPU ranks."""

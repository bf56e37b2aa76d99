"""Live comparison with other implementations of AlphaFold2: `make parity`."""

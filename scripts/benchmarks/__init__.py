"""Measurements: `python -m scripts.benchmarks.<name>`, results under `results/`."""

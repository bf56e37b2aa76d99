"""Modules that the paper's section 3.4 says DSP adapts to, written for one device.

Each takes `[B, T, S, C]` and mixes positions along one dimension. None of them knows of ranks.
`scripts/paper/tests/test_adaptability.py` spreads them over ranks with `evodsp.parallel.parallelize`.
"""

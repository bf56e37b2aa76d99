"""Own kernels in Triton: one file an operator here, its device code in the file of the same name in `device/`.

A file here says what is allocated and which grids are launched; it works without Triton, on fake tensors too. Only `device/`
imports Triton, when a kernel is first launched.
"""

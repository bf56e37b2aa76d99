"""evodsp's Triton kernels: one file per kind of operator here, and its device code in the file of the same name in `device/`.

A file here allocates results and launches grids; it works without Triton, also on fake tensors. Only `device/` imports
Triton, when a kernel is first launched.
"""

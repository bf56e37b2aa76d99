"""Device code. These modules import Triton; they are imported when one of their kernels is launched or compiled.

Kernels carry `no_type_check`, so that a type checker that decorates functions (the tests' import hook) leaves them alone:
Triton compiles their source.
"""

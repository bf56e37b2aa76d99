"""The extra-MSA stack under FastFold's Dynamic Axial Parallelism (DAP), the schedule that DSP is compared with.

DAP switches m from S to R and back in every block, and gathers one whole operand of each triangle multiplication. It runs here
with evodsp's modules, collectives and ledger. In FastFold the backward pass of an all-gather is a slice, which loses gradients;
here every collective has its exact transpose, so DAP equals one device too (`tests/test_benchmark_scripts.py`) and the
comparison is between two correct schedules.

For Evoformer blocks DAP is a plan: `evodsp.model.schedule.DAP`. Under DSP the extra-MSA stack keeps m on S; this module changes
it to DAP's schedule.
"""

from __future__ import annotations

from evodsp.model.evoformer import EvoformerStack
from evodsp.model.msa_ops import MSAColumnGlobalAttention, OuterProductMean
from evodsp.model.schedule import MSA_HALF


def switch_in_every_block(stack: EvoformerStack) -> EvoformerStack:
    """Change an extra-MSA stack, in place, to read m on S and then on R in every block and to switch it back to S.

    Run it with `plan=DAP`. It returns m on R, not on S.
    """
    stack.extra = False  # `extra` keeps m on S between blocks
    for block in stack.blocks:
        block.steps = MSA_HALF
        for module in block.modules():
            if isinstance(module, MSAColumnGlobalAttention | OuterProductMean):
                module.layout = "res"
    return stack

"""FastFold's Dynamic Axial Parallelism (DAP), what DSP is compared with: same modules, same collectives, same ledger.

Under DAP m is switched S -> R -> S in every block, and triangle multiplication gathers one operand whole. FastFold's own
all-gather has a slice as its backward and so loses gradients; here every collective has its exact transpose, so that DAP too
equals one device (`tests/test_benchmark_scripts.py`) and what is compared is schedules, not mistakes.

For Evoformer blocks DAP is a plan (`evodsp.model.schedule.DAP`). The extra-MSA stack stays on S under DSP; here is DAP's.
"""

from __future__ import annotations

from evodsp.model.evoformer import EvoformerStack
from evodsp.model.msa_ops import MSAColumnGlobalAttention, OuterProductMean
from evodsp.model.schedule import MSA_HALF


def switch_in_every_block(stack: EvoformerStack) -> EvoformerStack:
    """Have an extra-MSA stack go DAP's way, in place: every block reads m on S, then on R, and sends it back to S.

    To be run with `plan=DAP`. m comes out on R, not on S.
    """
    stack.extra = False  # what keeps m on S between blocks
    for block in stack.blocks:
        block.steps = MSA_HALF
        for module in block.modules():
            if isinstance(module, MSAColumnGlobalAttention | OuterProductMean):
                module.layout = "res"
    return stack

"""The parts of the measurement on a GPU (`gpu.py`), in the order in which they run: what answers most comes first.

A case measures one thing by itself. If it fails, or there is no time for it, the others go on.
"""

from __future__ import annotations

from . import gpu_anchors, gpu_peers
from .gpu_blocks import blocks, machine, operators, profile
from .gpu_checks import checks
from .gpu_model import longest, whole_model
from .gpu_rows import Part

PARTS = (
    Part("machine", "The machine, and the speeds that it reaches", 15, machine),
    Part("checks", "Operators against their formulas", 90, checks, processes=14),
    Part("blocks", "One block, forward and backward", 60, blocks),
    Part("profile", "Where a block's time goes", 20, profile),
    Part("model", "The whole model", 120, whole_model),
    Part("peers", "Blocks beside other programs'", 60, gpu_peers.cases),
    Part("anchors", "Operators at published sizes", 60, gpu_anchors.cases),
    Part("operators", "Operators against the roofline", 60, operators),
    Part("longest", "The longest protein", 80, longest),
    Part("compiled", "Blocks of formulas, compiled by torch", 120, gpu_peers.compiled_cases),
)

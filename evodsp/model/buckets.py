"""Sizes of recorded passes. Samples whose sizes are rounded up to the same ones share a recording; padding is masked.

Padding changes positions only by rounding: in fp32 on a CPU by less than 1e-6 of the largest coordinate.
"""

from __future__ import annotations

_LONGEST = 500
"""A sample with fewer residues is padded and its passes are recorded. A longer one keeps the GPU busier than the host."""
_FEWEST_PASSES = 3
"""Passes that are worth a recording, which costs the host about as much time as two passes."""
_STEPS = 8


def worth_recording(residues: int, passes: int, ranks: int) -> bool:
    """Whether the passes of a prediction are recorded on a GPU."""
    return ranks == 1 and residues < _LONGEST and passes >= _FEWEST_PASSES


def rounded_up(number: int) -> int:
    """The next multiple of an eighth of the next power of two, by which a number grows by less than a quarter."""
    step = max(1, (1 << (number - 1).bit_length()) // _STEPS)
    return -(-number // step) * step

"""Sizes of recorded passes. Samples whose sizes are rounded up to the same ones share a recording; padding is masked.

Padding changes positions only by rounding: in fp32 on a CPU by less than 1e-6 of the largest coordinate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from evodsp.data.samples.feature_axes import CHAIN_AXES, FEATURE_AXES, TEMPLATE_AXES

_LONGEST = 500
"""A sample with fewer residues is padded and its passes are recorded. A longer one keeps the GPU busier than the host."""
_FEWEST_PASSES = 3
"""Passes that are worth a recording, which costs the host about as much time as two passes."""
_STEPS = 8
_PADDED = ("residues", "msa", "extra")


def worth_recording(residues: int, passes: int, ranks: int) -> bool:
    """Whether the passes of a prediction are recorded on a GPU."""
    return ranks == 1 and residues < _LONGEST and passes >= _FEWEST_PASSES


def rounded_up(number: int) -> int:
    """The next multiple of an eighth of the next power of two, by which a number grows by less than a quarter."""
    step = max(1, (1 << (number - 1).bit_length()) // _STEPS)
    return -(-number // step) * step


def padded(batch: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """The features `names` of a batch, padded with zeros. Those that are the same in all feature sets stay so."""
    return {name: _padded(name, batch[name]) for name in names if name in batch}


def _padded(name: str, x: Tensor) -> Tensor:
    axes = {**FEATURE_AXES, **CHAIN_AXES, **TEMPLATE_AXES}[name]
    sizes = [rounded_up(size) if axis in _PADDED else size for axis, size in zip(axes, x.shape[2:], strict=True)]
    own = x if x.stride(1) else x[:, :1]
    room = own.new_zeros(*own.shape[:2], *sizes)
    room[(slice(None), slice(None), *(slice(size) for size in own.shape[2:]))] = own
    return room.expand(-1, x.shape[1], *sizes)

"""Compares two computations of the same results and gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Largest difference of results and gradients, as a fraction of their own root mean square. fp32 allows for TF32."""

_LEAST = 0.1
"""Some gradients of parameters are nothing but rounding errors, such as that of a constant added to all logits. A difference is
a fraction of at least this share of the largest of all parameters' gradients."""

OF_PARAMETER = "the gradient of the parameter "
"""What the name of a parameter's gradient begins with."""


def upstream(x: Tensor) -> Tensor:
    """Numbers from -1 to 2 in the shape of `x`: gradients with which every entry of a result counts."""
    return torch.linspace(-1, 2, x.numel(), device=x.device).to(x.dtype).view(x.shape)


def same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether all tensors are equal. NaN is equal to NaN."""
    return found.keys() == expected.keys() and all(
        x.shape == found[name].shape and bool(((x == found[name]) | (x.isnan() & found[name].isnan())).all())
        for name, x in expected.items()
    )


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """The first tensor that differs by more than rounding, in words; '' if none does. The keys say what each tensor is."""
    if missing := sorted(expected.keys() ^ found.keys()):
        return f"{missing[0]} was computed once only"
    sizes = {name: _size(x) for name, x in expected.items()}
    least = _LEAST * max((size for name, size in sizes.items() if name.startswith(OF_PARAMETER)), default=0.0)
    tolerance = max(_TOLERANCE[x.dtype] for x in expected.values())
    for name, x in expected.items():
        if found[name].shape != x.shape:
            return f"{name} has shape {list(found[name].shape)} instead of {list(x.shape)}"
        whole = max(sizes[name], least if name.startswith(OF_PARAMETER) else 0.0)
        off = _size(found[name].to(x.dtype) - x)
        if not off <= tolerance * whole:  # NaN is no good either
            share = f"{off / whole:.1e} of its size" if whole else f"{off:.1e} from zero"
            return f"{name} differs by {share}, more than {tolerance:.0e}"
    return ""


def _size(x: Tensor) -> float:
    """The root mean square."""
    if not x.numel():
        return 0.0
    return float(x.to(torch.promote_types(x.dtype, torch.float32)).square().mean().sqrt())

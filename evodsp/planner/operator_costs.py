"""The costs of one operator on tensors without numbers: FLOPs, logits and bytes; and the shapes of its results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "mv": 0,
    "addmm": 1,
    "addmm_": 1,
    "baddbmm": 1,
    "_addmm_activation": 1,
    "evodsp::hidden_backward": 0,
}
"""Matrix products, and which argument is the left factor."""
_ATTENTION = {"evodsp::attention": 4, "evodsp::attention_backward": 10}
"""FLOPs of attention in products of R x R x width: two products forward; in the backward pass the logits again and four
gradients. Each multiplication counts twice."""
_BACKWARD = 3.4
"""Time of the backward pass of attention's kernels over the forward pass, measured on an H200
(scripts/benchmarks/results/gpu_h200.csv): 3.2 to 4.0 in blocks of training."""
_PROJECTIONS = {"evodsp::outer_projection": (0, 2), "evodsp::outer_projection_backward": (1, 4)}
"""Of outer products: where they stand, with the weight after them, and FLOPs for each of them and each result."""
_TRIANGLES = {
    "evodsp::triangle_operands": (0, 4),
    "evodsp::triangle_output": (0, 2),
    "evodsp::triangle_output_backward": (1, 4),
    "evodsp::triangle_operands_backward": (1, 17),
    "evodsp::triangle_gate_weight_backward": (0, 1),
    "evodsp::triangle_gate_backward": (1, 1),
}
"""Of triangle multiplication: where the pair stands, and products of a position's channels with a weight of as many. The
backward pass forms the operands' projections twice again."""
_FUSED = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 10),
}
"""PyTorch's attention, which the meta device has under its CPU name: where the queries stand, and FLOPs as above."""


class Shapes:
    """Runs operators on tensors without numbers, and remembers the results' shapes: equal blocks ask for the same again.

    PyTorch derives shapes in Python, which takes longer than all else that a plan does.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[Any, ...]] | None] = {}
        """By operator and arguments: shapes, strides and types of the results; None if the first argument is the result."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `func`, which is no view."""
        writes = func._schema.is_mutable
        if writes and not _writes_its_first(func._schema):
            return func(*args, **kwargs)
        try:
            key = (func, _described(args), _described(kwargs))
            if key in self._known:
                return self._again(key, args)
        except TypeError:  # an argument without a hash
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if writes:
            if out is args[0] and _described(args) == key[1]:
                self._known[key] = None
            return out
        found = out if isinstance(out, tuple) else (out,)
        if all(isinstance(x, Tensor) for x in found):
            self._known[key] = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in found]
        return out

    def _again(self, key: Any, args: tuple[Any, ...]) -> Any:
        known = self._known[key]
        if known is None:
            return args[0]
        new = [torch.empty_strided(shape, stride, dtype=dtype, device=on) for shape, stride, dtype, on in known]
        return new[0] if len(key[0]._schema.returns) == 1 else tuple(new)


def _writes_its_first(schema: Any) -> bool:
    """Whether an operator changes its first argument, which is its result, and nothing else."""
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    return written[:1] == [True] and not any(written[1:]) and len(schema.returns) == 1


def _described(x: Any) -> Any:
    """Arguments with shape, stride, type and device in place of tensors."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device
    if isinstance(x, (list, tuple)):
        return tuple(map(_described, x))
    if isinstance(x, dict):
        return tuple((key, _described(value)) for key, value in x.items())
    return type(x), x  # 1 and 1.0 are equal, but make other types


def flops_of(name: str, args: Any, written: list[Tensor]) -> int:
    if name in _PRODUCTS:
        return 2 * written[0].numel() * int(args[_PRODUCTS[name]].shape[-1])
    if name in _ATTENTION:
        projected = args[0 if name == "evodsp::attention" else 1]  # [B, N, L, 4, H, D]
        batch, rows, length, _, heads, width = projected.shape
        return _ATTENTION[name] * batch * rows * length * length * heads * width
    if name in _PROJECTIONS:
        first, factor = _PROJECTIONS[name]
        return factor * int(args[first].numel()) * len(args[first + 1])
    if name in _TRIANGLES:
        first, factor = _TRIANGLES[name]
        return 2 * factor * int(args[first].numel()) * int(args[first].shape[-1])
    if name in _FUSED:
        first, factor = _FUSED[name]
        queries, keys = args[first], args[first + 1]  # [B, h, L, d], [B, h, K, d]
        return factor * queries.numel() * int(keys.shape[-2])
    return 0


def logits_of(name: str, args: Any) -> float:
    if name not in _ATTENTION:
        return 0.0
    projected = args[0 if name == "evodsp::attention" else 1]  # [B, N, L, 4, H, D]
    batch, rows, length, _, heads, _ = projected.shape
    return (1.0 if name == "evodsp::attention" else _BACKWARD) * batch * rows * heads * length**2


def in_half(name: str, args: Any) -> bool:
    """Whether the factors of a product are in half precision. Its result may be in float32 all the same."""
    if name in _PRODUCTS:
        return bool(args[_PRODUCTS[name]].element_size() == 2)
    own = (_ATTENTION, _PROJECTIONS, _TRIANGLES, _FUSED)
    return any(name in names for names in own) and bool(args[0].element_size() == 2)


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors in nested arguments or results."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [y for item in x for y in tensors_in(item)]
    if isinstance(x, dict):
        return [y for item in x.values() for y in tensors_in(item)]
    return []


def bytes_of(x: Tensor) -> int:
    """Bytes of memory behind a tensor; an expanded axis counts once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0 or size == 0)
    return math.prod(sizes) * x.element_size()

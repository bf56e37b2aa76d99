"""The fused triangle multiplication, computed by Triton's interpreter, against the formula in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from evodsp.model.kernels import reference
from evodsp.model.kernels.chunked import draw_masks
from evodsp.model.kernels.triton import gated_output, gated_projection, triangle_multiplication
from evodsp.model.kernels.triton_kernels import triangle
from evodsp.model.kernels.triton_kernels.dropout import draw_mask
from tests.model.kernels.interpreter import check, random

BEFORE = ["norm_weight", "norm_bias", "weight", "bias", "gate_weight", "gate_bias"]
AFTER = [
    *("output_gate_weight", "output_gate_bias", "product_norm_weight", "product_norm_bias"),
    *("output_weight", "output_bias"),
]
KEYS = torch.tensor([0x0123456789ABCDEF, -0x0123456789ABCDEF])


def fused(x: Tensor, mask: Tensor, outgoing: bool, dropout: dict[str, Any], **parameters: Tensor) -> Tensor:
    """The kernels themselves, also in a precision that a GPU computes otherwise."""
    shared, rate, kept = dropout.get("shared_dim", 1), dropout.get("rate", 0.0), None
    if dropout:
        kept = draw_mask(dropout["drawn"], x.shape[3 - shared] * x.shape[3], rate)
    norm, both = of_operands(parameters)
    after = [parameters[name] for name in AFTER]
    return triangle.FusedTriangles.apply(outgoing, shared, 1 / (1 - rate), x, mask, kept, *norm, *both, *after)


def fused_operands(x: Tensor, mask: Tensor, **parameters: Tensor) -> Tensor:
    norm, both = of_operands(parameters)
    return triangle.FusedOperands.apply(x, mask, *norm, *both)


def output_agrees(shape: tuple[int, int, int, int], dtype: torch.dtype, shared_dim: int | None, last: bool) -> None:
    """A shard that begins inside of the whole, whose mask of dropout is cut from the whole one, and all gradients. `last`:
    whether the product's channels are last in memory."""
    triangle._PROCESSORS = 8
    tensors, _ = inputs(shape, dtype, [*BEFORE[:2], *AFTER])
    renamed = {"output_gate_weight": "gate_weight", "output_gate_bias": "gate_bias"}
    renamed |= {"output_weight": "weight", "output_bias": "bias"}
    tensors = {renamed.get(name, name): x for name, x in tensors.items()}
    drawn = random(3, dtype)(*shape)
    tensors["product"] = drawn if last else drawn.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    dropout: dict[str, Any] = {}
    if shared_dim:
        dropout = {"drawn": KEYS[: shape[0]], "rate": 0.25, "shared_dim": shared_dim}
        dropout |= {"offsets": (2, 3), "whole": (shape[1] + 4, shape[2] + 5)}
    with mock.patch.object(triangle, "output_fits", return_value=True):
        check(partial(gated_output, **dropout), partial(reference.gated_output, **dropout), tensors, {})


def of_operands(parameters: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    norm_weight, norm_bias, weight, bias, gate_weight, gate_bias = (parameters[name] for name in BEFORE)
    return [norm_weight, norm_bias], [torch.cat([weight, gate_weight]), torch.cat([bias, gate_bias])]


def inputs(shape: tuple[int, int, int, int], dtype: torch.dtype, names: list[str]) -> tuple[dict[str, Tensor], Tensor]:
    """x and parameters by name, and the mask, for (batch, rows, columns, channels)."""
    *pairs, c = shape
    draw = random(0, dtype)
    sizes = {"weight": 2 * c, "gate_weight": 2 * c, "bias": 2 * c, "gate_bias": 2 * c}
    tensors = {"x": draw(*shape)}
    for name in names:
        out = sizes.get(name, c)
        matrix = name.endswith("weight") and "norm" not in name
        tensors[name] = draw(out, c) / c**0.5 if matrix else draw(out) / 4
        if name.endswith("norm_weight"):
            tensors[name] += 1
    return tensors, (random(1, torch.float32)(*pairs) > -1).to(dtype)


def agrees(shape: tuple[int, int, int], dtype: torch.dtype, outgoing: bool, shared_dim: int | None) -> None:
    """The sum with the update, and all gradients. Few programs sum gradients of weights, so that each takes several tiles."""
    triangle._PROCESSORS = 8
    batch, residues, channels = shape
    tensors, mask = inputs((batch, residues, residues, channels), dtype, BEFORE + AFTER)
    dropout = {"drawn": KEYS[:batch], "rate": 0.25, "shared_dim": shared_dim} if shared_dim else {}
    formula = partial(reference.triangle_multiplication, outgoing=outgoing, **dropout)  # type: ignore[arg-type]
    own = partial(fused, outgoing=outgoing, dropout=dropout)
    check(own, lambda mask, **x: formula(mask=mask.double(), **x), tensors, {"mask": mask})


def operands_agree(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """The operands of a shard, whose axes differ, and all gradients."""
    tensors, mask = inputs(shape, dtype, BEFORE)
    formula = reference.gated_projection
    check(fused_operands, lambda mask, **x: formula(mask=mask.double(), **x), tensors, {"mask": mask})


def draws_the_same_mask() -> None:
    """Catches numbers that differ from other operators', so that a recomputation or another backend drops other entries: every
    bit, beyond one tile and beyond one sample."""
    for elements in (7, 512, 1300):
        for rate in (0.0, 0.15, 0.25):
            assert torch.equal(draw_mask(KEYS, elements, rate), draw_masks(KEYS[None], elements, rate)[0])


def chosen_where_it_fits() -> None:
    """Catches kernels for widths, precisions or empty pairs that they were not made for, by the operators' autograd node."""
    for shape, dtype, expected in (
        ((1, 5, 5, 64), torch.float16, True),
        ((1, 5, 5, 128), torch.float16, True),
        ((1, 5, 5, 64), torch.float32, False),
        ((1, 5, 5, 32), torch.float16, False),
        ((0, 5, 5, 64), torch.float16, False),
    ):
        tensors, mask = inputs(shape, dtype, BEFORE + AFTER)
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}
        out = triangle_multiplication(mask=mask, outgoing=True, **leaves)
        assert (type(out.grad_fn).__name__ == "FusedTrianglesBackward") == expected, (shape, dtype)
        operands = gated_projection(mask=mask, **{name: leaves[name] for name in ("x", *BEFORE)})
        assert (type(operands.grad_fn).__name__ == "FusedOperandsBackward") == expected, (shape, dtype)


def falls_back_by_the_card() -> None:
    """Catches kernels on a card that cannot launch them (shared memory of H100, A100, RTX 4090 and of one that does not tell),
    whose self-check would refuse the operator at all widths, and a look at the card that torch.compile cannot follow."""
    x, weight = torch.empty(1, 5, 5, 64, dtype=torch.float16), torch.empty(128, 64)
    for number, (found, expected) in enumerate(((227, True), (163, True), (99, False), (None, False))):
        properties = SimpleNamespace(**({} if found is None else {"shared_memory_per_block_optin": found << 10}))
        on_card = mock.Mock(spec=Tensor, shape=x.shape, dtype=x.dtype, device=torch.device("cuda", number))
        on_card.numel = x.numel
        with mock.patch("torch.cuda.get_device_properties", lambda device, properties=properties: properties):
            assert triangle.fits(on_card, weight) == expected, found
            device = on_card.device
            of_card = torch.compile(lambda y, d=device: y + triangle._shared_memory(d), fullgraph=True, backend="eager")
            assert of_card(torch.zeros(1)) == (found or 0) << 10


Interpreter = Callable[..., Any]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


@pytest.mark.verify_but("(2, 5, 64)-True-1-torch.float16", "(2, 5, 64)-False-2-torch.float32")
@pytest.mark.parametrize(
    ("shape", "outgoing", "shared_dim", "dtype"),
    [
        (*case, dtype)
        for case in [
            ((2, 5, 64), True, 1),
            ((2, 5, 64), False, 2),
            ((1, 17, 128), False, 1),
            ((1, 17, 128), True, None),
        ]
        for dtype in (torch.float32, torch.float16)
    ],
    ids=str,
)
def test_agrees_with_the_formula(
    interpreter: Interpreter, shape: tuple[int, int, int], outgoing: bool, shared_dim: int | None, dtype: torch.dtype
) -> None:
    """Catches samples, operands, directions or masks of dropout in each other's place, tails of tiles, parts of sums that are
    left out, a residual that is lost, and a gradient of any parameter that is wrong."""
    interpreter(agrees, shape, dtype, outgoing, shared_dim)


@pytest.mark.verify_but("(2, 3, 7, 64)*")
@DTYPES
@pytest.mark.parametrize("shape", [(2, 3, 7, 64), (1, 2, 130, 128)], ids=str)
def test_the_operands_of_a_shard(
    interpreter: Interpreter, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Catches rows in place of columns, and gradients of a gate or a residual that are not there."""
    interpreter(operands_agree, shape, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "shared_dim", "last"),
    [
        ((2, 3, 7, 64), torch.float32, 1, True),
        ((2, 7, 3, 64), torch.float16, 2, True),
        ((1, 2, 34, 128), torch.float32, 1, True),
        ((1, 3, 5, 64), torch.float16, None, False),
    ],
    ids=str,
)
def test_the_output_of_a_shard(
    interpreter: Interpreter, shape: tuple[int, int, int, int], dtype: torch.dtype, shared_dim: int | None, last: bool
) -> None:
    """Catches channels in place of positions, another shard's mask of dropout, and a gradient without the gate or residual."""
    interpreter(output_agrees, shape, dtype, shared_dim, last)


@pytest.mark.parametrize("function", [draws_the_same_mask, chosen_where_it_fits, falls_back_by_the_card])
def test_the_choice_and_the_mask(interpreter: Interpreter, function: Callable[[], None]) -> None:
    """Catches what each of these functions says."""
    interpreter(function)

"""Dropout: its random numbers, its arithmetic, and how keys reach the layers. The rules themselves: test_dropout_rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.model.dropout import NO_DROPOUT, NO_MASKS, Dropout, DropoutKeys
from evodsp.model.kernels import by_chunks, reference
from evodsp.model.kernels import chunked as kernels
from evodsp.model.kernels.chunked import draw_masks, dropout_add
from evodsp.model.kernels.operators import Kernels
from evodsp.model.primitives import use_kernels
from evodsp.model.sharded import Added, Budget, Made, Sharded
from evodsp.parallel.exchange import LocalExchange
from evodsp.rng import Draws
from tests.builders.small_model import small_stack, streams

SIZES, CHANNELS = (3, 50), 40


def keys_of(streams: list[Draws]) -> Tensor:
    return torch.tensor([stream.signed_key() for stream in streams])


@pytest.mark.parametrize("rate", [0.1, 0.15, 0.3, 0.7])
def test_masks_are_the_draws_of_the_streams(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrong threshold, pieces that overlap, a shift that keeps the sign of a key, and keys in the wrong order.

    7340032.4 / 2^24 is rounded down in fp32, so the draw that equals it is kept although it is less than the rate in fp64.
    """
    streams = [Draws.root(0).at(n) for n in range(6)]
    assert {stream.signed_key() < 0 for stream in streams} == {False, True}
    for elements, piece in ((1000, 64), (1000, 2500), (7, 1 << 15), (0, 64)):
        monkeypatch.setattr(by_chunks, "CPU_NUMBERS", piece)
        masks = draw_masks(keys_of(streams).view(2, 3), elements, rate)
        positions = torch.arange(elements)
        expected = [stream.uniform_at(positions) >= rate for stream in streams]
        assert torch.equal(masks, torch.stack(expected).view(2, 3, elements))


def test_the_threshold_is_that_of_a_comparison_in_fp32() -> None:
    """Catches rounding up: the draw that equals a rate rounded to fp32 is kept, as where uniform numbers are compared."""
    for rate in (0.1, 0.6, 0.7, 7340032.4 / 2**24, 0.25):
        near = torch.arange(-3, 4) + round(rate * 2**24)
        words = near << 8 | torch.tensor([[0], [255]])
        assert torch.equal(kernels.at_least(words, rate), (words >> 8) * (1.0 / (1 << 24)) >= rate), rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_shares_its_mask_and_keeps_the_mean(dtype: torch.dtype) -> None:
    """Catches a mask that differs along the shared axis, a scale that is wrong or rounded to bf16, and one mask for all."""
    rate = 0.15
    dropout = Dropout(CHANNELS, rate, "row_attention", shared_axis="seq")
    x, update = (torch.randn(2, *SIZES, CHANNELS).to(dtype) for _ in range(2))
    masks = {"row_attention": draw_masks(keys_of([Draws.root(0).at(n) for n in range(2)])[None], 50 * 40, rate)[0]}
    representation = Sharded.whole(x, "seq", torch.ones(2, *SIZES))
    representation += dropout(Made(update), masks)
    y = representation.x
    kept = masks["row_attention"].view(2, 1, 50, 40)
    assert y.dtype == dtype
    exact = torch.where(kept, x.double() + update.double() / (1 - rate), x.double())
    torch.testing.assert_close(y, exact.to(dtype))
    if dtype == torch.bfloat16:
        assert (y != exact.to(dtype)).float().mean() < 1e-3
    assert kept.float().mean().item() == pytest.approx(1 - rate, abs=0.02)
    assert not torch.equal(kept[0], kept[1])
    assert dropout(made := Made(update), NO_MASKS) is made


def test_pieces_have_their_parts_of_the_whole_mask() -> None:
    """Catches a piece whose mask begins where the shard begins: it is another one if the mask differs along the pieces."""
    dropout = Dropout(CHANNELS, 0.4, "ending", shared_axis="j")
    x, update, mask = torch.randn(1, 7, 7, CHANNELS), torch.randn(1, 7, 7, CHANNELS), torch.ones(1, 7, 7)
    masks = {"ending": draw_masks(keys_of([Draws.root(0)])[None], 7 * CHANNELS, 0.4)[0]}
    whole = Sharded.whole(x, "j", mask)
    whole += dropout(whole.update(torch.clone, update, width=1), masks)
    pieces = Sharded(x.clone(), "j", mask, LocalExchange(), Budget(1, 1))
    pieces += dropout(pieces.update(torch.clone, update, width=1), masks)
    assert torch.equal(pieces.x, whole.x)
    added = Sharded(x.clone(), "j", mask, LocalExchange(), Budget(1, 1))
    added += dropout(Added(dropout_add, [update], width=1), masks)
    assert torch.equal(added.x, whole.x)


@pytest.mark.parametrize("shared_dim", [1, 2])
def test_a_shard_has_its_part_of_the_whole_mask(shared_dim: int) -> None:
    """Catches an offset along the wrong axis, a mask drawn by local position, a gradient without scale, and other numbers from
    keys than from their mask."""
    x, update, weight = (torch.randn(2, 5, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    keys = keys_of([Draws.root(1).at(n) for n in range(2)])
    whole = dropout_add(x, update, keys, 0.25, (0, 0), (5, 7), shared_dim)
    gradient = torch.autograd.grad(whole, update, weight)[0]
    kept = gradient != 0
    torch.testing.assert_close(gradient, torch.where(kept, weight / 0.75, 0.0))
    assert 0.6 < kept.double().mean() < 0.9
    masks = draw_masks(keys[None], (5 if shared_dim == 2 else 7) * 3, 0.25)[0]
    for first, second in ((slice(2, 4), slice(0, 7)), (slice(0, 5), slice(3, 7)), (slice(5, 5), slice(0, 7))):
        part = (slice(None), first, second)
        offsets = (first.start, second.start)
        for drawn in (keys, masks):
            found = dropout_add(x[part], update[part], drawn, 0.25, offsets, (5, 7), shared_dim)
            assert torch.equal(found, whole[part])
        formula = reference.dropout_add(x[part], update[part], keys, 0.25, offsets, (5, 7), shared_dim)
        torch.testing.assert_close(formula, whole[part])


def test_a_backend_that_draws_where_it_adds() -> None:
    """Catches keys or masks that reach a backend in another order, and a backend that is not asked."""
    stack, inputs = small_stack(2)
    keys = DropoutKeys.of(stack.dropout_streams(streams(0)))
    expected = stack(*inputs, keys)
    asked = [0]

    def counted(*arguments: Any) -> Tensor:
        asked[0] += 1
        return reference.dropout_add(*arguments)

    use_kernels(stack, Kernels(dropout_add=counted))
    torch.testing.assert_close(stack(*inputs, keys), expected)
    assert asked == [2 * 3]  # triangle multiplication adds its update itself


def test_a_layer_without_a_key_is_an_error() -> None:
    """Catches a stack that silently runs without dropout because its keys are looked up under another name."""
    stack, inputs = small_stack(1)
    keys = DropoutKeys.of(stack.dropout_streams(streams(0)))
    with pytest.raises(KeyError):
        stack(*inputs, keys.at("evoformer"))
    torch.testing.assert_close(stack(*inputs, NO_DROPOUT.at("evoformer")), stack(*inputs), rtol=0, atol=0)


class Count(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += not func.is_view
        return func(*args, **(kwargs or {}))


def operators(blocks: int, rate: float) -> int:
    stack, inputs = small_stack(blocks, rate)
    keys = DropoutKeys.of(stack.dropout_streams(streams(0)))
    with torch.no_grad(), Count() as count:
        stack(*inputs, keys)
    return count.operators


def test_dropout_takes_few_operators() -> None:
    """Catches masks that are drawn one by one. A layer needs one operator, for its mask in the dtype of x."""
    drawing = operators(1, 0.25) - operators(1, 0.0)
    assert operators(6, 0.25) - operators(6, 0.0) == drawing + 5 * 5
    assert drawing <= 300

"""The chunked outer product against its formula."""

from __future__ import annotations

import pytest
import torch

from evodsp.model.kernels import chunked, reference


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("residues", [(5, 7), (7, 5), (1, 4), (0, 3), (3, 0)])
def test_equals_the_formula_in_values_and_gradients(
    residues: tuple[int, int], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches wrong rows in a chunk, transposed channels, gradients of the last chunk only, and errors on empty shards."""
    i, j = residues
    monkeypatch.setattr(chunked, "_CPU_PRODUCTS", 2 * max(1, j) * 9)  # two rows at a time
    if not kept:
        monkeypatch.setattr(chunked, "_KEEP", 0)
        monkeypatch.setattr(chunked, "_KEEP_OPERANDS", 0)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    inputs = [x.requires_grad_() for x in (random(2, 4, i, 3), random(2, 4, j, 3), random(6, 9))]
    left, right, weight = inputs
    expected = reference.outer_product(left, right, weight)
    upstream = random(*expected.shape)
    gradients = torch.autograd.grad(expected, inputs, upstream)
    found = chunked.outer_product(left, right, weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for own, theirs in zip(torch.autograd.grad(found, inputs, upstream), gradients, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("sequences", "formed_again"), [(3, 3), (30, 0)])
def test_products_are_formed_once_where_sequences_are_many(
    sequences: int, formed_again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a backward pass that forms the products of a deep alignment again: half of its forward pass's time. With few
    sequences they are the larger memory, and are formed again."""
    monkeypatch.setattr(chunked, "_CPU_PRODUCTS", 2 * 5 * 9)  # two rows at a time
    monkeypatch.setattr(chunked, "_KEEP", 0)
    calls: list[None] = []
    monkeypatch.setattr(chunked, "_products", lambda *xs, form=chunked._products: (calls.append(None), form(*xs))[1])
    left, right, weight = (
        torch.randn(*shape, requires_grad=True) for shape in ((1, sequences, 5, 3), (1, sequences, 5, 3), (6, 9))
    )
    out = chunked.outer_product(left, right, weight)
    calls.clear()
    out.sum().backward()
    assert len(calls) == formed_again

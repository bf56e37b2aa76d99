"""The chunked outer product against its formula."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from evodsp.model.kernels import by_chunks, chunked, products, reference


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("residues", [(5, 7), (7, 5), (1, 4), (0, 3), (3, 0)])
def test_equals_the_formula_in_values_and_gradients(
    residues: tuple[int, int], mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches wrong rows in a chunk, transposed channels, gradients of the last chunk only, and errors on empty shards."""
    i, j = residues
    monkeypatch.setattr(by_chunks, "CPU_NUMBERS", 2 * max(1, j) * 9)  # two rows at a time
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    inputs = [x.requires_grad_() for x in (random(2, 4, i, 3), random(2, 4, j, 3), random(6, 9))]
    counts = []
    if mean:
        inputs.append(random(6).requires_grad_())
        counts.append(random(2, i, j, 1).abs() + 1)
    expected = reference.outer_product(*inputs, *counts)
    upstream = random(*expected.shape)
    gradients = torch.autograd.grad(expected, inputs, upstream)
    found = chunked.outer_product(*inputs, *counts)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for own, theirs in zip(torch.autograd.grad(found, inputs, upstream), gradients, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


def test_a_recomputation_that_ends_with_it_forms_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an operator that computes before it saves what its backward pass needs: each recomputed block would form the
    result of its outer product mean, a sixth of its arithmetic, for nothing."""
    results: list[None] = []
    form = products._result
    monkeypatch.setattr(products, "_result", lambda *xs: (results.append(None), form(*xs))[1])
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((1, 4, 5, 3), (1, 4, 7, 3), (6, 9), (6,))]
    counts = torch.full((1, 5, 7, 1), 4.0)

    def segment(*xs: torch.Tensor) -> torch.Tensor:
        left, *others = xs
        return torch.ones(()) + chunked.outer_product(left.tanh(), *others, counts)

    expected = torch.autograd.grad(segment(*inputs).square().sum(), inputs)
    results.clear()
    out = checkpoint(segment, *inputs, use_reentrant=False)
    found = torch.autograd.grad(out.square().sum(), inputs)
    assert len(results) == 1
    torch.testing.assert_close(found, expected)

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

"""Clusters as AlphaFold-Multimer makes them, against its formula, written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evodsp.features.clusters import shared_deletions, shared_profiles, shares_of
from evodsp.geometry.residues import GAP, MASK
from tests.builders.numpy_features import by_formula


def drawn(kinds: int, extra: int) -> tuple[np.ndarray, ...]:
    """Centres with masked letters, extra sequences with gaps, and deletions. Few `kinds` of letters make many ties."""
    rng = np.random.default_rng(kinds)
    centres = rng.integers(0, kinds, (6, 9))
    rows = rng.integers(0, kinds, (extra, 9))
    centres[rng.random(centres.shape) < 0.2] = MASK
    rows[rng.random(rows.shape) < 0.3] = GAP
    rows[: extra // 4] = GAP  # they agree with no centre
    numbers = [rng.integers(0, 5, x.shape) * (rng.random(x.shape) < 0.3) for x in (centres, rows)]
    return centres, rows, *numbers


@pytest.mark.parametrize(("kinds", "extra"), [(2, 40), (5, 40), (21, 40), (3, 0), (2, 3000)])
def test_clusters_are_deepminds(kinds: int, extra: int) -> None:
    """Catches ties that go to one cluster, sequences without agreement that belong to none, the centre's weight for all, and
    letters that count where they are gaps or masked."""
    centres, rows, of_centres, numbers = drawn(kinds, extra)
    profile, mean = by_formula(centres, rows, of_centres, numbers)
    ours, others = torch.from_numpy(centres).to(torch.int8), torch.from_numpy(rows).to(torch.int8)
    shares = shares_of(ours, others)
    found = shared_profiles(ours, others, shares, residues=9)
    np.testing.assert_allclose(found.numpy(), profile, rtol=2e-6, atol=1e-7)
    row, column = np.nonzero(numbers)
    cells = (torch.from_numpy(x) for x in (row, column, numbers[row, column].astype(np.int32)))
    means = shared_deletions(torch.from_numpy(of_centres).float(), *cells, shares, len(rows), residues=9)
    np.testing.assert_allclose(means.numpy(), mean, rtol=2e-6, atol=1e-7)


def test_sums_do_not_depend_on_their_order() -> None:
    """Catches sums that are rounded: ranks whose GPUs add in different orders would have different features."""
    centres, rows, _, _ = drawn(2, 3000)
    ours = torch.from_numpy(centres).to(torch.int8)
    order = np.random.default_rng(1).permutation(len(rows))
    both = [torch.from_numpy(x).to(torch.int8) for x in (rows, rows[order])]
    shares = [shares_of(ours, some) for some in both]
    assert torch.equal(shares[0].sizes, shares[1].sizes)
    profiles = [shared_profiles(ours, some, own, residues=9) for some, own in zip(both, shares, strict=True)]
    assert torch.equal(*profiles)

"""Clusters of an MSA as AlphaFold-Multimer makes them: an extra sequence belongs to all clusters that it agrees with best, in
equal shares.

Its code multiplies each share by the number of residues, so an extra sequence weighs R times as much as the centre of its
cluster. (The published models have learnt features of this kind.) Shares are rounded to multiples of 2^-32 and added in double
precision: every sum is exact, so it is the same in any order and on every rank.

Shapes: N sequences, S clusters, E extra sequences, R residues, P pairs of an extra sequence and one of its clusters, K cells
with deletions. Residue codes: `evodsp.geometry.residues`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Float64, Int8, Int32, Int64
from torch import Tensor

from evodsp.geometry.residues import LETTERS_WITH_MASK, LETTERS_WITH_X

_STEP = 2.0**-32
_ROWS = 1 << 10
"""Number of sequences that are compared at once: their one-hot letters take 33 MB at 384 residues."""
_CELLS = 1 << 22
"""Number of cells of an alignment that are added at once."""


@dataclass(frozen=True)
class Shares:
    """The clusters of the extra sequences: those that agree with no centre belong to all clusters and are listed apart."""

    row: Int64[Tensor, " P"]
    """Number of an extra sequence."""
    cluster: Int64[Tensor, " P"]
    share: Float64[Tensor, " P"]
    """Part of this sequence that belongs to this cluster."""
    of_all: Int64[Tensor, " A"]
    """Extra sequences that agree with no centre anywhere."""
    sizes: Float64[Tensor, " S"]
    """Sum of the shares of each cluster."""


def shares_of(centres: Int8[Tensor, "S R"], extra: Int8[Tensor, "E R"]) -> Shares:
    """The clusters of every extra sequence: those whose centres have the same letter in most columns.

    Gaps and masked letters agree with nothing. The sums are exact in float32, in TF32 too.
    """
    clusters, device = len(centres), extra.device
    letters = torch.arange(LETTERS_WITH_X, device=device, dtype=torch.int8)
    expected = (centres[..., None] == letters).flatten(1).float()  # [S, R 21]
    rows, found, counts, none = [], [], [], []
    for start, some in enumerate(extra.split(_ROWS)):
        agreement = (some[..., None] == letters).flatten(1).float() @ expected.T
        best = agreement.amax(1, keepdim=True)
        tied = (agreement == best) & (best > 0)
        row, cluster = tied.nonzero(as_tuple=True)
        rows.append(row + start * _ROWS)
        found.append(cluster)
        counts.append(tied.sum(1)[row])
        none.append((best[:, 0] == 0).nonzero()[:, 0] + start * _ROWS)
    if not rows:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        rows, found, counts, none = [empty], [empty], [empty], [empty]
    row, cluster, of_all = torch.cat(rows), torch.cat(found), torch.cat(none)
    share = (1.0 / torch.cat(counts).double() / _STEP).round_() * _STEP
    sizes = share.new_zeros(clusters).scatter_add_(0, cluster, share)
    return Shares(row, cluster, share, of_all, sizes + len(of_all) * _part_of_all(clusters))


def shared_profiles(
    centres: Int8[Tensor, "S R"], extra: Int8[Tensor, "E R"], shares: Shares, residues: int
) -> Float32[Tensor, "S R 23"]:
    """The letter frequencies of each cluster, its centre included. `residues`: the weight of an extra sequence."""
    clusters, columns = centres.shape
    sums = torch.zeros(clusters * columns * LETTERS_WITH_MASK, dtype=torch.float64, device=extra.device)
    places = torch.arange(columns, device=extra.device) * LETTERS_WITH_MASK
    at_once = max(1, _CELLS // columns)
    for row, cluster, share in zip(
        *(x.split(at_once) for x in (shares.row, shares.cluster, shares.share)), strict=True
    ):
        cells = cluster[:, None] * (columns * LETTERS_WITH_MASK) + places + extra[row]
        sums.scatter_add_(0, cells.flatten(), share[:, None].expand_as(cells).flatten())
    sums = sums.view(clusters, columns, LETTERS_WITH_MASK)
    if len(shares.of_all):
        everyone = torch.zeros(columns * LETTERS_WITH_MASK, dtype=torch.float64, device=extra.device)
        for rows in shares.of_all.split(at_once):
            cells = (places + extra[rows]).flatten()
            everyone.scatter_add_(0, cells, everyone.new_ones(1).expand_as(cells))
        sums += everyone.view(columns, LETTERS_WITH_MASK) * _part_of_all(clusters)
    sums *= residues
    own = (centres[..., None] == torch.arange(LETTERS_WITH_MASK, device=centres.device)).double()
    return ((sums + own) / _weights(shares, residues)[:, None, None]).float()


def shared_deletions(
    of_centres: Float32[Tensor, "S R"],
    row: Int64[Tensor, " K"],
    column: Int64[Tensor, " K"],
    number: Int32[Tensor, " K"],
    shares: Shares,
    extra: int,
    residues: int,
) -> Float32[Tensor, "S R"]:
    """The mean number of deletions of each cluster, its centre included.

    `of_centres`: the deletions of the centres. `row`, `column`, `number`: extra sequence, column and number of deletions of
    each cell of the extra sequences that has some. `extra`: number of extra sequences. `residues`: the weight of each.
    """
    clusters, columns = of_centres.shape
    sums = torch.zeros(clusters * columns, dtype=torch.float64, device=number.device)
    # The pairs of an extra sequence are neighbours, in the order of the sequences.
    counts = torch.bincount(shares.row, minlength=extra)
    first = counts.cumsum(0) - counts
    repeats = counts[row]
    cell = torch.repeat_interleave(torch.arange(len(row), device=row.device), repeats)
    within = torch.arange(len(cell), device=row.device) - torch.repeat_interleave(repeats.cumsum(0) - repeats, repeats)
    pair = first[row[cell]] + within
    sums.scatter_add_(0, shares.cluster[pair] * columns + column[cell], shares.share[pair] * number[cell].double())
    sums = sums.view(clusters, columns)
    if len(shares.of_all):
        belongs = torch.zeros(extra, dtype=torch.bool, device=row.device)
        belongs[shares.of_all] = True
        chosen = belongs[row]
        everyone = torch.zeros(columns, dtype=torch.float64, device=row.device)
        everyone.scatter_add_(0, column[chosen], number[chosen].double())
        sums += everyone * _part_of_all(clusters)
    return ((sums * residues + of_centres.double()) / _weights(shares, residues)[:, None]).float()


def _weights(shares: Shares, residues: int) -> Float64[Tensor, " S"]:
    """The weight of each cluster: its centre counts 1, extra sequences count `residues` times their share."""
    return 1.0 + residues * shares.sizes


def _part_of_all(clusters: int) -> float:
    """The share of a sequence that belongs to all clusters."""
    return round(1.0 / clusters / _STEP) * _STEP

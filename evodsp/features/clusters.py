"""Clusters of an MSA on a device: the results of `evodsp.data.clusters` (supplement 1.2.7).

Shapes: C recycling iterations, N sequences, S clusters, E extra sequences, L columns of the chain, R residues of the crop,
K cells with deletions. Residue codes: `evodsp.geometry.alphabet`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float32, Int8, Int32, Int64
from torch import Tensor

from evodsp.data import clusters as host
from evodsp.geometry.alphabet import LETTERS_WITH_MASK, LETTERS_WITH_X

# Sequences that are compared at once: their one-hot letters take 33 MB at 384 columns.
_ROWS = 1 << 10
# Cells of an alignment that are counted at once: their indices take 32 MB.
_CELLS = 1 << 22


def nearest_clusters(centres: Int8[Tensor, "C S L"], rows: Int8[Tensor, "N L"]) -> Int64[Tensor, "C N"]:
    """For each sequence, the cluster of each iteration it agrees with in most columns; the first of equals.

    Gaps and masked letters agree with nothing. On a CPU the bit planes of `evodsp.data.clusters` take an eighth of the time of
    products; a GPU has units for products, and torch has no operator that counts bits.
    """
    if rows.device.type == "cpu":
        found = [host.nearest_clusters(own.numpy(), rows.numpy()) for own in centres]
        return torch.stack([torch.from_numpy(nearest) for nearest in found]).long()
    return nearest_by_products(centres, rows)


def nearest_by_products(centres: Int8[Tensor, "C S L"], rows: Int8[Tensor, "N L"]) -> Int64[Tensor, "C N"]:
    """`nearest_clusters` by products of one-hot letters, as the supplement writes it. Exact in float32, in TF32 too."""
    cycles, size, _ = centres.shape
    letters = torch.arange(LETTERS_WITH_X, device=rows.device, dtype=torch.int8)  # all but gap and mask
    expected = (centres.flatten(0, 1)[..., None] == letters).flatten(1).float()  # [C S, L 21]
    nearest = []
    for some in rows.split(_ROWS):
        agreement = (some[..., None] == letters).flatten(1).float() @ expected.T
        nearest.append(agreement.view(len(some), cycles, size).argmax(-1))
    return torch.cat(nearest).T


def members(nearest: Int64[Tensor, " E"], size: int) -> Float32[Tensor, " {size}"]:
    """Sequences of each cluster, its centre included, with AlphaFold2's small number beside them."""
    counts = torch.zeros(size, dtype=torch.int64, device=nearest.device)
    counts.scatter_add_(0, nearest, torch.ones_like(nearest))
    return (counts.double() + (1e-6 + 1)).float()


def cluster_profiles(
    clusters: Int8[Tensor, "S R"], extra: Int8[Tensor, "E R"], nearest: Int64[Tensor, " E"]
) -> Float32[Tensor, "S R 23"]:
    """Letter frequencies of each cluster, its centre included. Counts are integers, so their order of addition is free."""
    size, residues = clusters.shape
    counts = torch.zeros(size * residues * LETTERS_WITH_MASK, dtype=torch.int32, device=extra.device)
    one = torch.ones(1, dtype=torch.int32, device=extra.device)
    column = torch.arange(residues, device=extra.device) * LETTERS_WITH_MASK
    step = max(1, _CELLS // residues)
    own = torch.arange(size, device=extra.device)
    parts = [(own, clusters), *zip(nearest.split(step), extra.split(step), strict=True)]
    for cluster, letters in parts:
        cells = (cluster[:, None] * (residues * LETTERS_WITH_MASK) + column + letters).flatten()
        counts.scatter_add_(0, cells, one.expand_as(cells))
    return counts.view(size, residues, LETTERS_WITH_MASK).float() / members(nearest, size)[:, None, None]


def mean_deletions(
    own: Int32[Tensor, "S R"],
    cluster: Int64[Tensor, " K"],
    column: Int64[Tensor, " K"],
    number: Int64[Tensor, " K"],
    sizes: Float32[Tensor, " S"],
) -> Float32[Tensor, "S R"]:
    """Mean number of deletions of each cluster. `own`: those of the centres; `sizes`: `members`.

    `cluster`, `column`, `number`: cells with deletions; those of no extra sequence have the number 0.
    """
    sums = own.long().flatten().scatter_add(0, cluster * own.shape[1] + column, number)
    return (sums.view(own.shape).double() / sizes.double()[:, None]).float()

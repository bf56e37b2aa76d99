"""Clusters of an MSA (supplement 1.2.7): the cluster of each extra sequence, the summary of each cluster, and the masking
of the clustered MSA.

In AlphaFold-Multimer an extra sequence belongs to all clusters that it agrees with best, in equal shares. Its code
multiplies each share by the number of residues, so an extra sequence weighs R times as much as the centre of its cluster.
(The published models have learnt features of this kind.) Shares are rounded to multiples of 2^-32 and added in double
precision: every sum is exact, so it is the same in any order and on every rank.

Shapes: C recycling iterations, N sequences, S clusters, E extra sequences, A rows (those of all recycling iterations), L
columns of the chain, R residues of the crop, P pairs of an extra sequence and one of its clusters, K cells with deletions.
Residue codes: `evodsp.geometry.residues`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int8, Int32, Int64, UInt64
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.geometry.residues import GAP, LETTERS_WITH_GAP, LETTERS_WITH_MASK, LETTERS_WITH_X


def mask_letters(
    msa: Int8[Tensor, "A L"],
    profile: Float32[Tensor, "L 22"],
    replace: Float64[Tensor, "A L"],
    letter: Float64[Tensor, "A L"],
    config: FeatureConfig,
) -> tuple[Int8[Tensor, "A L"], Bool[Tensor, "A L"]]:
    """Replace a fraction of the letters for the masked-MSA loss. Returns the masked MSA, and where a letter was redrawn.

    `replace` and `letter` are uniform in [0, 1). A letter is redrawn where `replace` is below the fraction; the new one is
    found by inverting the cumulative distribution at `letter`. The distribution is a mixture: a uniformly drawn amino acid
    (never X or gap), a letter from the column's profile, the letter itself, and the mask token for the rest.

    The old letter a adds its share to all cumulative probabilities from a on. So the new letter is among those before a if
    `letter` says so, and otherwise where `letter` less that share says. Products and sums of probabilities are rounded to
    float32; all that follows is in float64 and exact, as long as no probability but zero is below 2^-29.
    """
    letters = torch.arange(LETTERS_WITH_GAP, device=profile.device)
    mixed = config.masked_uniform * ((letters < 20).float() * (1 / 20)) + config.masked_profile * profile  # [L, 22]
    own_share = (mixed + config.masked_same).double() - mixed.double()
    cumulative = mixed.double().cumsum(-1)
    own, drawn = msa.T.long(), letter.T.contiguous()  # [L, A]
    before = torch.searchsorted(cumulative, drawn, right=True, out_int32=True)
    after = torch.searchsorted(cumulative, drawn - own_share.gather(1, own), right=True, out_int32=True)
    new = torch.minimum(before, own) + (after - own).clamp(min=0)
    replaced = replace < config.masked_msa_fraction
    return torch.where(replaced, new.T.to(torch.int8), msa), replaced


_BITS, _WORD = 5, 64
_NO_LETTER = (1 << _BITS) - 1
_PAIRS = 1 << 15
"""Number of pairs of sequences that a CPU compares at once: their words fill a part of a core's second-level cache."""
_ROWS = 1 << 11
"""Number of sequences that a GPU compares at once: their one-hot letters take 66 MB at 384 columns."""
_CELLS = 1 << 22
"""Number of cells of an alignment that are counted at once: their indices take 32 MB."""
_CELLS_ON_CPU = 1 << 17


def nearest_clusters(
    centres: Int8[Tensor, "C S L"],
    letters: Int8[Tensor, "N L"],
    others: Int64[Tensor, "C E"],
    numbers: Sequence[int],
) -> Int64[Tensor, "C E"]:
    """Cluster of each extra sequence of each iteration: the one it agrees with in most columns; the first of equals.

    `others`: the rows of `letters` that are the extra sequences of an iteration, of which the first `numbers` count. Gaps and
    masked letters agree with nothing. On a CPU NumPy's bit planes take an eighth of the time of products; a GPU has units for
    products, and torch has no operator that counts bits.
    """
    if not max(numbers):
        return torch.zeros_like(others)
    if letters.device.type != "cpu":
        return nearest_by_products(centres, letters).gather(1, others)
    planes, found = _bit_planes(letters.numpy()), torch.zeros_like(others)  # [words, 5, N]
    for own, rows, number, nearest in zip(centres, others, numbers, found, strict=True):
        nearest[:number] = torch.from_numpy(_nearest_by_bits(own.numpy(), planes[:, :, rows[:number].numpy()]))
    return found


def _nearest_by_bits(
    clusters: Int8[np.ndarray, "S L"], others: UInt64[np.ndarray, "words 5 E"]
) -> Int64[np.ndarray, " E"]:
    """`nearest_clusters` of one iteration, from the bit planes of its extra sequences.

    A letter is five bits, one word holds a bit of 64 columns, and columns that differ are counted.
    """
    centres = _bit_planes(np.where(clusters < GAP, clusters, _NO_LETTER))
    extra = others.shape[-1]
    step = max(1, _PAIRS // len(clusters))
    nearest = np.empty(extra, np.int64)
    for start in range(0, extra, step):
        tile = others[:, :, start : start + step, None]
        pairs = tile.shape[2], len(clusters)
        differ, bit, count = np.empty(pairs, np.uint64), np.empty(pairs, np.uint64), np.empty(pairs, np.uint8)
        differing = np.zeros(pairs, np.uint32)
        for own, centre in zip(tile, centres, strict=True):
            np.bitwise_xor(own[0], centre[0], out=differ)
            for plane in range(1, _BITS):
                np.bitwise_xor(own[plane], centre[plane], out=bit)
                np.bitwise_or(differ, bit, out=differ)
            differing += np.bitwise_count(differ, out=count)
        nearest[start : start + step] = differing.argmin(axis=1)
    return nearest


def _bit_planes(letters: Int8[np.ndarray, "N L"]) -> UInt64[np.ndarray, "words 5 N"]:
    """Bit p of 64 columns of each sequence. Columns beyond the last have zeros, and so agree in all sequences alike."""
    rows, columns = letters.shape
    padded = np.zeros((rows, -(-columns // _WORD) * _WORD), np.uint8)
    padded[:, :columns] = letters
    planes = [np.packbits((padded >> plane) & 1, axis=1).view(np.uint64) for plane in range(_BITS)]
    return np.ascontiguousarray(np.stack(planes).transpose(2, 0, 1))


def nearest_by_products(centres: Int8[Tensor, "C S L"], rows: Int8[Tensor, "N L"]) -> Int64[Tensor, "C N"]:
    """The nearest cluster of every sequence by products of one-hot letters. The sums are exact in float32, in TF32 too."""
    cycles, size, _ = centres.shape
    letters = torch.arange(LETTERS_WITH_X, device=rows.device, dtype=torch.int8)  # all but gap and mask
    expected = (centres.flatten(0, 1)[..., None] == letters).flatten(1).float()  # [C S, L 21]
    nearest = []
    for some in rows.split(_ROWS):
        agreement = (some[..., None] == letters).flatten(1).float() @ expected.T
        nearest.append(agreement.view(len(some), cycles, size).argmax(-1))
    return torch.cat(nearest).T


def members(nearest: Int64[Tensor, "C E"], counted: Bool[Tensor, "C E"], size: int) -> Float32[Tensor, "C {size}"]:
    """The number of sequences of each cluster, its centre included, with AlphaFold2's small number added. `counted`: which
    extra sequences there are."""
    counts = torch.zeros(len(nearest), size, dtype=torch.int64, device=nearest.device)
    counts.scatter_add_(1, nearest, counted.long())
    return (counts.double() + (1e-6 + 1)).float()


def cluster_profiles(
    extra: Int8[Tensor, "C E R"],
    nearest: Int64[Tensor, "C E"],
    counted: Bool[Tensor, "C E"],
    sizes: Float32[Tensor, "C S"],
    out: Float32[Tensor, "C S R 23"],
) -> None:
    """The letter frequencies of each cluster, in place of the one-hot letters of its centre. Counts are exact in any order.

    `counted`: which extra sequences there are. `sizes`: the `members` of the clusters.
    """
    step = max(1, (_CELLS_ON_CPU if out.device.type == "cpu" else _CELLS) // max(1, out[:, 0, :, 0].numel()))
    rows, columns = _rows_of(out, nearest), _steps(out, 2)
    parts = (x.split(step, 1) for x in (rows, extra, counted.float()[..., None]))
    for row, letters, number in zip(*parts, strict=True):
        cells = row + columns + letters
        _flat(out).scatter_add_(0, cells.flatten(), number.expand_as(cells).flatten())
    out.div_(sizes[..., None, None])


def write_one_hot(out: Float32[Tensor, "C S R 23"], letters: Int8[Tensor, "C S R"]) -> None:
    """Write one-hot letters into zeros."""
    rows = _rows_of(out, torch.arange(out.shape[1], device=out.device)[None])
    _flat(out).index_fill_(0, (rows + _steps(out, 2) + letters).flatten(), 1)


def _flat(out: Float32[Tensor, "C S R n"]) -> Float32[Tensor, " m"]:
    """The memory from the first to the last number of a part of a larger tensor, as one axis."""
    last = sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True))
    return out.as_strided((last + 1,), (1,))


def _rows_of(out: Float32[Tensor, "C S R n"], row: Int64[Tensor, "#C E"]) -> Int64[Tensor, "C E 1"]:
    """The place in `_flat(out)` where each row begins."""
    iterations = _steps(out, 0)
    return (row * out.stride(1) + iterations[:, None])[..., None]


def _steps(out: Float32[Tensor, "C S R n"], axis: int) -> Int64[Tensor, " _"]:
    """The place in `_flat(out)` of each entry of an axis."""
    step = out.stride(axis)
    return torch.arange(0, out.shape[axis] * step, step, device=out.device)


def mean_deletions(
    cluster: Int64[Tensor, "C K"],
    column: Int64[Tensor, " K"],
    number: Int32[Tensor, " K"],
    counted: Bool[Tensor, "C K"],
    sizes: Float32[Tensor, "C S"],
    residues: int,
) -> Float32[Tensor, "C S R"]:
    """The mean number of deletions of each cluster.

    `cluster`, `column`, `number`: the cluster, the column and the number of deletions of each cell that has some. `counted`:
    whether its sequence is in a cluster. `sizes`: the `members` of the clusters.
    """
    sums = torch.zeros(len(sizes), sizes.shape[1] * residues, dtype=torch.int64, device=number.device)
    sums.scatter_add_(1, cluster * residues + column, number.long() * counted)
    return (sums.view(*sizes.shape, residues).double() / sizes.double()[..., None]).float()


_STEP = 2.0**-32
_SHARED_ROWS = 1 << 10
"""Number of sequences that are compared at once: their one-hot letters take 33 MB at 384 residues."""


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
    for start, some in enumerate(extra.split(_SHARED_ROWS)):
        agreement = (some[..., None] == letters).flatten(1).float() @ expected.T
        best = agreement.amax(1, keepdim=True)
        tied = (agreement == best) & (best > 0)
        row, cluster = tied.nonzero(as_tuple=True)
        rows.append(row + start * _SHARED_ROWS)
        found.append(cluster)
        counts.append(tied.sum(1)[row])
        none.append((best[:, 0] == 0).nonzero()[:, 0] + start * _SHARED_ROWS)
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

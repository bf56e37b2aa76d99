"""Clusters of an MSA: the cluster of each extra sequence, and the summary of each cluster (supplement 1.2.7).

Shapes: C recycling iterations, N sequences, S clusters, E extra sequences, L columns of the chain, R residues of the crop,
K cells with deletions. Residue codes: `evodsp.geometry.residues`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int8, Int32, Int64, UInt64
from torch import Tensor

from evodsp.geometry.residues import GAP, LETTERS_WITH_X

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
    """For each extra sequence of each iteration, the cluster it agrees with in most columns; the first of equals.

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

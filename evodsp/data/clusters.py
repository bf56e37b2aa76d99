"""Clusters of an MSA: which cluster each extra sequence belongs to, and what the clusters look like (supplement 1.2.7).

Shapes: S clusters, E extra sequences, L columns of the chain, R residues of the crop, K deletions. Residue codes:
`evodsp.geometry.alphabet`.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int8, Int32, Int64, UInt64

from evodsp.geometry.alphabet import GAP, LETTERS_WITH_MASK

_BITS, _WORD = 5, 64
_NO_LETTER = (1 << _BITS) - 1
# Pairs of sequences that are compared at once: their words fill a part of a core's second-level cache.
_PAIRS = 1 << 15


def nearest_clusters(clusters: Int8[np.ndarray, "S L"], extra: Int8[np.ndarray, "E L"]) -> Int32[np.ndarray, " E"]:
    """For each extra sequence, the cluster it agrees with in most columns; the first of equals (supplement 1.2.7, step 3).

    Gaps and masked letters agree with nothing. The supplement uses a matrix product of one-hot letters. Here a letter is five
    bits, one word holds a bit of 64 columns, and columns that differ are counted: the same clusters, exactly, in an eighth of
    the time.
    """
    centres = _bit_planes(np.where(clusters < GAP, clusters, _NO_LETTER))
    others = _bit_planes(extra)
    step = max(1, _PAIRS // len(clusters))
    nearest = np.empty(len(extra), np.int32)
    for start in range(0, len(extra), step):
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


# Cells of an alignment that are counted at once. Bounds the memory of the index arrays to tens of megabytes.
_COUNTED_CELLS = 1 << 20


def cluster_profiles(
    clusters: Int8[np.ndarray, "S R"],
    extra: Int8[np.ndarray, "E R"],
    nearest: Int32[np.ndarray, " E"],
    out: Float32[np.ndarray, "S R 23"] | None = None,
) -> Float32[np.ndarray, "S R 23"]:
    """Letter frequencies of each cluster, its centre included (supplement 1.2.7, step 4). `out`: where to write them."""
    size, columns = clusters.shape
    out = np.empty((size, columns, LETTERS_WITH_MASK), np.float32) if out is None else out
    members = _members(nearest, size)[:, None, None]
    letters = np.concatenate([clusters, extra])
    base = np.concatenate([np.arange(size), nearest])[:, None]
    step = max(1, _COUNTED_CELLS // len(letters))
    for start in range(0, columns, step):
        block = letters[:, start : start + step]
        width = block.shape[1]
        cells = (base * width + np.arange(width)) * LETTERS_WITH_MASK + block
        counts = np.bincount(cells.ravel(), minlength=size * width * LETTERS_WITH_MASK)
        counts = counts.reshape(size, width, LETTERS_WITH_MASK).astype(np.float32)
        np.divide(counts, members, out=out[:, start : start + step])
    return out


def mean_deletions(
    own: Int32[np.ndarray, "S R"],
    row: Int64[np.ndarray, " K"],
    column: Int64[np.ndarray, " K"],
    number: Int32[np.ndarray, " K"],
    nearest: Int32[np.ndarray, " E"],
) -> Float32[np.ndarray, "S R"]:
    """Mean number of deletions of each cluster (supplement 1.2.7, step 4). `own`: those of the centres.

    `row`, `column`, `number`: the cells of extra sequences that have deletions, which are few.
    """
    size, columns = own.shape
    sums = np.bincount(nearest[row].astype(np.int64) * columns + column, weights=number, minlength=own.size)
    return ((sums.reshape(own.shape) + own) / _members(nearest, size)[:, None]).astype(np.float32)


def _members(nearest: Int32[np.ndarray, " E"], size: int) -> Float32[np.ndarray, " {size}"]:
    """Sequences of each cluster, with AlphaFold2's small number beside them."""
    return (1e-6 + 1 + np.bincount(nearest, minlength=size)).astype(np.float32)

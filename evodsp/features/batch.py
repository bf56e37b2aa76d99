"""From what the loader hands over to the model's batch (supplement 1.2.6 to 1.2.9), on the device that the batch is on.

Shapes: B samples, C recycling iterations, N sequences, S clusters, E extra sequences, L columns of the chain, R residues of
the crop, K cells with deletions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int8, Int32, Int64
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.data.features import FEATURE_AXES, SAMPLED, TEMPLATE_AXES, Sizes, max_clusters
from evodsp.data.raw_features import HOST, RAGGED
from evodsp.features.clusters import cluster_profiles, mean_deletions, members, nearest_clusters
from evodsp.features.draws import row_order, uniform
from evodsp.features.masking import mask_letters
from evodsp.geometry.alphabet import LETTERS_WITH_GAP, LETTERS_WITH_MASK, MASK

_DTYPES = {"float32": torch.float32, "int32": torch.int32}


@dataclass(frozen=True)
class Rows:
    """How many rows of its MSA one recycling iteration takes; the host knows it."""

    kept: int
    """Rows that block deletion leaves. In the order of the iteration they are the first ones."""
    clusters: int
    """The first of them are the centres of clusters."""
    extra: int
    """The next ones are the extra sequences that the model sees. All that follow belong to clusters, too."""


@dataclass(frozen=True)
class RawMsa:
    """The MSA of one sample, as the loader hands it over; see `evodsp.data.raw_features.raw_features`."""

    letters: Int8[Tensor, "N L"]
    profile: Float32[Tensor, "L 22"]
    kept: Bool[Tensor, "C N"]
    keys: Int64[Tensor, "C 3"]
    cells: Int64[Tensor, " K"]
    numbers: Int32[Tensor, " K"]
    start: int
    """First residue of the crop."""
    length: int
    """Residues of the crop, R."""
    rows: list[Rows]
    """Of each iteration."""


def with_features(batch: Mapping[str, Tensor], config: FeatureConfig) -> dict[str, Tensor]:
    """The batch with the features of all recycling iterations in place of what they are made from.

    `batch`: what `evodsp.data.dataset.collate` makes of training samples. Its tensors are on any device except those of
    `raw_features.HOST`, which are on the host. Features are those that `evodsp.data.features.make_features` makes, [B, C, …].
    """
    msas = list(_raw_msas(batch, config))
    cycles = batch["msa_keys"].shape[1]
    sizes = _sizes(msas, config)
    device = batch["msa_letters"].device
    made = {
        name: torch.zeros(
            (len(msas), cycles, *(getattr(sizes, axis) if axis else size for axis, size in _axes(name))),
            dtype=_DTYPES[dtype.__name__],
            device=device,
        )
        for name, (dtype, _) in SAMPLED.items()
    }
    for sample, msa in enumerate(msas):
        _write({name: values[sample] for name, values in made.items()}, msa, config)
    left = {name: values for name, values in batch.items() if name not in {*RAGGED, *HOST, "msa_keys"}}
    for name in left.keys() & {*FEATURE_AXES, *TEMPLATE_AXES}:
        left[name] = left[name].expand(-1, cycles, *left[name].shape[2:])
    return {**left, **made}


def _axes(name: str) -> Iterator[tuple[str | None, int]]:
    """The axes of a feature after the iterations: a name, or none and the size."""
    unnamed = iter(SAMPLED[name][1])
    return ((axis, 0 if axis else next(unnamed)) for axis in FEATURE_AXES[name])


def _raw_msas(batch: Mapping[str, Tensor], config: FeatureConfig) -> Iterator[RawMsa]:
    """The samples of a batch: parts of its ragged entries."""
    cycles = batch["msa_keys"].shape[1]
    sizes = batch["msa_sizes"].tolist()
    parts = {
        "msa_letters": [rows * columns for rows, columns, *_ in sizes],
        "msa_profile_bits": [columns * LETTERS_WITH_GAP for _, columns, *_ in sizes],
        "msa_kept": [cycles * rows for rows, *_ in sizes],
        "deletion_cells": [cells for *_, cells in sizes],
        "deletion_numbers": [cells for *_, cells in sizes],
    }
    ragged = zip(*(batch[name].split(parts[name]) for name in RAGGED), strict=True)
    counts = batch["msa_kept_counts"].tolist()
    for (letters, bits, kept, cells, numbers), size, kept_counts, keys in zip(
        ragged, sizes, counts, batch["msa_keys"], strict=True
    ):
        rows, columns, start, length, _ = size
        yield RawMsa(
            letters.view(rows, columns),
            bits.view(torch.float32).view(columns, LETTERS_WITH_GAP),
            kept.view(cycles, rows),
            keys,
            cells.long(),
            numbers,
            start,
            length,
            [_rows(count, config) for count in kept_counts],
        )


def _rows(kept: int, config: FeatureConfig) -> Rows:
    clusters = min(kept, max_clusters(config))
    return Rows(kept, clusters, min(kept - clusters, config.extra_msa))


def _sizes(msas: list[RawMsa], config: FeatureConfig) -> Sizes:
    """Those of the crop; without one, the largest of the data, with at least one row of extra MSA."""
    if config.crop_size is not None:
        return Sizes(config.crop_size, max_clusters(config), config.extra_msa)
    rows = [rows for msa in msas for rows in msa.rows]
    return Sizes(
        max(msa.length for msa in msas), max(taken.clusters for taken in rows), max(1, *(taken.extra for taken in rows))
    )


def _write(into: dict[str, Tensor], msa: RawMsa, config: FeatureConfig) -> None:
    """Write the features of one sample, all its iterations, into corners of zeros."""
    total, columns = msa.letters.shape
    crop, length = slice(msa.start, msa.start + msa.length), msa.length
    order = row_order(msa.keys[:, 0], msa.kept)
    drawn = min(max_clusters(config), total)  # as many as an iteration without block deletion has
    true = msa.letters[order[:, :drawn]]  # [C, S, L]
    replace, letter = (uniform(msa.keys[:, stream], drawn * columns).view(-1, columns) for stream in (1, 2))
    masked, replaced = (
        values.view(true.shape) for values in mask_letters(true.flatten(0, 1), msa.profile, replace, letter, config)
    )
    # An iteration that keeps fewer rows has fewer centres: the others must attract nothing.
    there = torch.arange(drawn, device=masked.device)[:, None] < msa.kept.sum(1)[:, None, None]
    nearest = nearest_clusters(masked.masked_fill(~there, MASK), msa.letters)
    dense = torch.zeros(total * length, dtype=torch.int32, device=masked.device).scatter_(0, msa.cells, msa.numbers)
    dense = dense.view(total, length)
    cell_row, cell_column = msa.cells // length, msa.cells % length
    for cycle, rows in enumerate(msa.rows):
        centres, others = order[cycle, : rows.clusters], order[cycle, rows.clusters : rows.kept]
        own, extra = masked[cycle, : rows.clusters, crop], msa.letters[others, crop]
        assigned = nearest[cycle][others]
        is_other = torch.zeros(total, dtype=torch.int32, device=own.device).index_fill_(0, others, 1)
        means = mean_deletions(
            dense[centres],
            nearest[cycle][cell_row],
            cell_column,
            (msa.numbers * is_other[cell_row]).long(),
            members(assigned, rows.clusters),
        )
        corner = {name: values[cycle] for name, values in into.items()}
        features = corner["msa_feat"][: rows.clusters, :length]
        letters = torch.arange(LETTERS_WITH_MASK, device=own.device, dtype=torch.int8)
        features[..., :23] = own[..., None] == letters
        features[..., 23] = dense[centres] > 0
        features[..., 24] = deletion_value(dense[centres])
        features[..., 25:48] = cluster_profiles(own, extra, assigned)
        features[..., 48] = deletion_value(means)
        corner["msa_mask"][: rows.clusters, :length] = 1
        corner["msa_row_mask"][: rows.clusters] = 1
        corner["true_msa"][: rows.clusters, :length] = true[cycle, : rows.clusters, crop]
        corner["bert_mask"][: rows.clusters, :length] = replaced[cycle, : rows.clusters, crop]

        # The rows are in random order, so the first ones are a random sample.
        deletions = dense[others[: rows.extra]]
        corner["extra_msa"][: rows.extra, :length] = extra[: rows.extra]
        corner["extra_msa_mask"][: rows.extra, :length] = 1
        corner["extra_msa_row_mask"][: rows.extra] = 1
        corner["extra_has_deletion"][: rows.extra, :length] = deletions > 0
        corner["extra_deletion_value"][: rows.extra, :length] = deletion_value(deletions)


def deletion_value(deletions: Int32[Tensor, "*s"] | Float32[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
    """Numbers of deletions d mapped to [0, 1): arctan(d / 3) * 2 / pi."""
    return torch.atan(deletions.float() / 3) * (2 / math.pi)

"""From the loader's batch to the model's (supplement 1.2.6 to 1.2.9), on the device of the batch.

Shapes: B samples, C recycling iterations, N sequences, S clusters, E extra sequences, L columns of the chain, R residues of
the crop, K cells with deletions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int8, Int32, Int64
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.data.samples.feature_axes import FEATURE_AXES, SAMPLED, TEMPLATE_AXES, FeatureSizes, max_clusters
from evodsp.data.samples.raw_features import HOST, RAGGED
from evodsp.features.clusters import cluster_profiles, mean_deletions, members, nearest_clusters, write_one_hot
from evodsp.features.draws import Drawn, draw
from evodsp.features.masking import mask_letters
from evodsp.geometry.alphabet import LETTERS_WITH_GAP

_DTYPES = {"float32": torch.float32, "int32": torch.int32}


@dataclass(frozen=True)
class TakenRows:
    """The numbers of rows of its MSA that one recycling iteration takes; the host knows them."""

    kept: int
    """Number of rows that block deletion leaves. In the order of the iteration they are the first rows."""
    clusters: int
    """Number of the first of them, which are the centres of clusters."""
    extra: int
    """Number of the next ones, the extra sequences that the model sees. All rows that follow belong to clusters, too."""


@dataclass(frozen=True)
class RawMsa:
    """The MSA of one sample, as the loader hands it over; see `evodsp.data.samples.raw_features.raw_features`."""

    letters: Int8[Tensor, "N L"]
    profile: Float32[Tensor, "L 22"]
    kept: Bool[Tensor, "C N"]
    keys: Int64[Tensor, "C 3"]
    cells: Int64[Tensor, " K"]
    numbers: Int32[Tensor, " K"]
    crop: slice | Int64[Tensor, " R"]
    """The columns of the crop; a slice, which costs no launch, where they are neighbours."""
    length: int
    """Residues of the crop, R."""
    rows: list[TakenRows]
    """The rows of each iteration."""


def with_features(batch: Mapping[str, Tensor], config: FeatureConfig) -> dict[str, Tensor]:
    """The batch with the features of all recycling iterations in place of the data from which they are made.

    `batch`: samples that `evodsp.data.samples.dataset.collate` has joined. Its tensors are on any device except those of
    `raw_features.HOST`, which are on the host. Features are [B, C, …], with the axes of `feature_axes.FEATURE_AXES`. They
    have the sizes of the settings if there is a `crop_size`, otherwise the largest of the samples.
    """
    msas = list(_raw_msas(batch, config))
    cycles = batch["msa_keys"].shape[1]
    sizes = _sizes(msas, config)
    device = batch["msa_letters"].device
    made = {
        name: _zeros(
            (len(msas), cycles, *(getattr(sizes, axis) if axis else size for axis, size in _axes(name))), dtype, device
        )
        for name, (dtype, _) in SAMPLED.items()
    }
    for sample, msa in enumerate(msas):
        clusters = min(max_clusters(config), len(msa.letters))  # as many as an iteration without block deletion has
        drawn = draw(msa.keys, msa.kept, clusters, msa.letters.shape[1])
        write_features({name: values[sample] for name, values in made.items()}, msa, drawn, config)
    left = {name: values for name, values in batch.items() if name not in {*RAGGED, *HOST, "msa_keys"}}
    for name in left.keys() & {*FEATURE_AXES, *TEMPLATE_AXES}:
        left[name] = left[name].expand(-1, cycles, *left[name].shape[2:])
    return {**left, **made}


def _zeros(shape: tuple[int, ...], dtype: type[np.generic], device: torch.device) -> Tensor:
    """Zeros on the device. On a CPU they are NumPy's, which are written at their first use: that takes half of torch's
    time."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype))
    return torch.zeros(shape, dtype=_DTYPES[dtype.__name__], device=device)


def _axes(name: str) -> Iterator[tuple[str | None, int]]:
    """The axes of a feature after the iterations: the name of each, or None and its size."""
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
        "crop_residues": [length for *_, length, _ in sizes],
        "deletion_cells": [cells for *_, cells in sizes],
        "deletion_numbers": [cells for *_, cells in sizes],
    }
    ragged = zip(*(batch[name].split(parts[name]) for name in RAGGED), strict=True)
    counts = batch["msa_kept_counts"].tolist()
    for (letters, bits, kept, residues, cells, numbers), size, kept_counts, keys in zip(
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
            residues if start < 0 else slice(start, start + length),
            length,
            [rows_of(count, config) for count in kept_counts],
        )


def rows_of(kept: int, config: FeatureConfig) -> TakenRows:
    """The rows that an iteration takes if block deletion leaves `kept`."""
    clusters = min(kept, max_clusters(config))
    return TakenRows(kept, clusters, min(kept - clusters, config.extra_msa))


def _sizes(msas: list[RawMsa], config: FeatureConfig) -> FeatureSizes:
    """The sizes of the settings if there is a crop; otherwise the largest of the data, with at least one row of extra MSA."""
    if config.crop_size is not None:
        return FeatureSizes(config.crop_size, max_clusters(config), config.extra_msa)
    rows = [rows for msa in msas for rows in msa.rows]
    return FeatureSizes(
        max(msa.length for msa in msas),
        max(taken.clusters for taken in rows),
        max(1, *(taken.extra for taken in rows)),
    )


def write_features(into: dict[str, Tensor], msa: RawMsa, drawn: Drawn, config: FeatureConfig) -> None:
    """Write the features of one sample, all its iterations, into corners of zeros.

    The order of the steps is AF2's: sampling of the clusters, masking, assignment to the nearest cluster, summary of the
    clusters, crop, padding. From the summary on, each column is independent of the others, so only the cropped columns are
    computed.
    """
    total, length, crop, drawn_size = len(msa.letters), msa.length, msa.crop, drawn.replace.shape[1]
    true = msa.letters.index_select(0, drawn.order[:, :drawn_size].flatten()).view(*drawn.replace.shape)
    masked, replaced = (
        values.view(true.shape)
        for values in mask_letters(
            true.flatten(0, 1), msa.profile, drawn.replace.flatten(0, 1), drawn.letter.flatten(0, 1), config
        )
    )
    taken = [
        order[: rows.kept].split([rows.clusters, rows.kept - rows.clusters])
        for order, rows in zip(drawn.order, msa.rows, strict=True)
    ]
    nearest = nearest_clusters(
        masked, msa.letters, [others for _, others in taken], [len(centres) for centres, _ in taken]
    )
    letters = msa.letters[:, crop]
    deletion_values = torch.zeros(total * length, device=letters.device)
    deletion_values = deletion_values.scatter_(0, msa.cells, deletion_value(msa.numbers)).view(total, length)
    cell_row, cell_column = msa.cells // length, msa.cells % length
    for cycle, ((centres, others), assigned) in enumerate(zip(taken, nearest, strict=True)):
        size = len(centres)
        cluster = torch.zeros(total, dtype=torch.int64, device=letters.device)
        cluster.index_copy_(0, centres, torch.arange(size, device=letters.device)).index_copy_(0, others, assigned)
        means = mean_deletions(
            cluster[cell_row], cell_column, msa.numbers, msa.kept[cycle][cell_row], members(assigned, size), length
        )
        corner = {name: values[cycle] for name, values in into.items()}
        features, own = corner["msa_feat"][:size, :length], masked[cycle, :size, crop]
        values = deletion_values.index_select(0, centres)
        write_one_hot(features[..., :23], own)
        features[..., 23] = values > 0
        features[..., 24] = values
        cluster_profiles(own, letters.index_select(0, others), assigned, out=features[..., 25:48])
        features[..., 48] = deletion_value(means)
        corner["msa_mask"][:size, :length] = 1
        corner["msa_row_mask"][:size] = 1
        corner["true_msa"][:size, :length] = true[cycle, :size, crop]
        corner["bert_mask"][:size, :length] = replaced[cycle, :size, crop]

        # The rows are in random order, so the first ones are a random sample.
        shown = others[: msa.rows[cycle].extra]
        values = deletion_values.index_select(0, shown)
        corner["extra_msa"][: len(shown), :length] = letters.index_select(0, shown)
        corner["extra_msa_mask"][: len(shown), :length] = 1
        corner["extra_msa_row_mask"][: len(shown)] = 1
        corner["extra_has_deletion"][: len(shown), :length] = values > 0
        corner["extra_deletion_value"][: len(shown), :length] = values


def deletion_value(deletions: Int32[Tensor, "*s"] | Float32[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
    """Numbers of deletions d mapped to [0, 1): arctan(d / 3) * 2 / pi."""
    return torch.atan(deletions.float() / 3) * (2 / math.pi)

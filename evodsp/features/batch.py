"""From the loader's batch to the model's (supplement 1.2.6 to 1.2.9), on the device of the batch.

Shapes: B samples, C recycling iterations, N sequences, S clusters, E extra sequences, L columns of the chain, R residues of
the crop, K cells with deletions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int8, Int32, Int64
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.data.samples.feature_axes import (
    CHAIN_AXES,
    FEATURE_AXES,
    SAMPLED,
    TEMPLATE_AXES,
    FeatureSizes,
    max_clusters,
)
from evodsp.data.samples.raw_features import HOST, RAGGED
from evodsp.features.clusters import cluster_profiles, mean_deletions, members, nearest_clusters, write_one_hot
from evodsp.features.draws import Drawn, draw
from evodsp.features.masking import mask_letters
from evodsp.features.shared_clusters import shared_deletions, shared_profiles, shares_of
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
class Complex:
    """The rows and columns of the MSA of a complex."""

    block: Int32[Tensor, " N"]
    """0 for rows that may have letters everywhere, else the sequence (`entity`) that the row covers."""
    entity: Int32[Tensor, " R"]
    """The number of each residue's sequence, from 1."""


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
    chains: Complex | None = None
    """The rows and columns of the chains, if there are several."""


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
    for name in left.keys() & {*FEATURE_AXES, *TEMPLATE_AXES, *CHAIN_AXES}:
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
        "msa_blocks": [rows for rows, *_ in sizes],
    }
    names = [name for name in RAGGED if name in batch]
    ragged = zip(*(batch[name].split(parts[name]) for name in names), strict=True)
    counts = batch["msa_kept_counts"].tolist()
    for sample, (own, size, kept_counts) in enumerate(zip(ragged, sizes, counts, strict=True)):
        rows, columns, start, length, _ = size
        part = dict(zip(names, own, strict=True))
        several = "msa_blocks" in part
        yield RawMsa(
            part["msa_letters"].view(rows, columns),
            part["msa_profile_bits"].view(torch.float32).view(columns, LETTERS_WITH_GAP),
            part["msa_kept"].view(cycles, rows),
            batch["msa_keys"][sample],
            part["deletion_cells"].long(),
            part["deletion_numbers"],
            part["crop_residues"] if start < 0 else slice(start, start + length),
            length,
            [rows_of(count, config) for count in kept_counts],
            Complex(part["msa_blocks"], batch["entity_id"][sample, 0, :length]) if several else None,
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
    summary = _nearest(msa, masked, taken) if msa.chains is None else _shared(msa, masked, taken)
    letters = msa.letters[:, crop]
    deletion_values = torch.zeros(total * length, device=letters.device)
    deletion_values = deletion_values.scatter_(0, msa.cells, deletion_value(msa.numbers)).view(total, length)
    for cycle, (centres, others) in enumerate(taken):
        size = len(centres)
        corner = {name: values[cycle] for name, values in into.items()}
        features, own = corner["msa_feat"][:size, :length], masked[cycle, :size, crop]
        values = deletion_values.index_select(0, centres)
        write_one_hot(features[..., :23], own)
        features[..., 23] = values > 0
        features[..., 24] = values
        means = summary(cycle, own, letters.index_select(0, others), features[..., 25:48])
        features[..., 48] = deletion_value(means)
        corner["msa_mask"][:size, :length] = 1
        corner["msa_row_mask"][:size] = 1
        corner["true_msa"][:size, :length] = true[cycle, :size, crop]
        counted = replaced[cycle, :size, crop]
        if msa.chains is not None:  # the gaps beside a block are masked, too, but there is nothing to learn from them
            block = msa.chains.block[centres][:, None]
            counted = counted & ((block == 0) | (block == msa.chains.entity))
        corner["bert_mask"][:size, :length] = counted

        # The rows are in random order, so the first ones are a random sample.
        shown = others[: msa.rows[cycle].extra]
        values = deletion_values.index_select(0, shown)
        corner["extra_msa"][: len(shown), :length] = letters.index_select(0, shown)
        corner["extra_msa_mask"][: len(shown), :length] = 1
        corner["extra_msa_row_mask"][: len(shown)] = 1
        corner["extra_has_deletion"][: len(shown), :length] = values > 0
        corner["extra_deletion_value"][: len(shown), :length] = values


Taken = Sequence[Sequence[Tensor]]
"""In each iteration, the rows of the cluster centres [S] and of the extra sequences [E]."""

Summary = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From an iteration and the letters of its centres [S, R] and of its extra sequences [E, R]: writes the profiles of the
clusters into zeros [S, R, 23] and returns their mean deletions [S, R]."""


def _nearest(msa: RawMsa, masked: Int8[Tensor, "C S L"], taken: Taken) -> Summary:
    """Clusters of the sequences nearest to each centre (supplement 1.2.7)."""
    nearest = nearest_clusters(
        masked, msa.letters, [others for _, others in taken], [len(centres) for centres, _ in taken]
    )
    cell_row, cell_column = msa.cells // msa.length, msa.cells % msa.length

    def summary(cycle: int, own: Tensor, extra: Tensor, profiles: Tensor) -> Tensor:
        (centres, others), assigned, size = taken[cycle], nearest[cycle], len(own)
        cluster = torch.zeros(len(msa.letters), dtype=torch.int64, device=own.device)
        cluster.index_copy_(0, centres, torch.arange(size, device=own.device)).index_copy_(0, others, assigned)
        means = mean_deletions(
            cluster[cell_row], cell_column, msa.numbers, msa.kept[cycle][cell_row], members(assigned, size), msa.length
        )
        cluster_profiles(own, extra, assigned, out=profiles)
        return means

    return summary


def _shared(msa: RawMsa, masked: Int8[Tensor, "C S L"], taken: Taken) -> Summary:
    """Clusters as AlphaFold-Multimer makes them (`evodsp.features.shared_clusters`), of the cropped columns."""
    cell_row, cell_column = msa.cells // msa.length, msa.cells % msa.length

    def summary(cycle: int, own: Tensor, extra: Tensor, profiles: Tensor) -> Tensor:
        centres, others = taken[cycle]
        shares = shares_of(own, extra)
        profiles.copy_(shared_profiles(own, extra, shares, msa.length))
        numbers = torch.zeros(len(msa.letters), msa.length, device=own.device)
        numbers[cell_row, cell_column] = msa.numbers.float()
        place = torch.full((len(msa.letters),), -1, dtype=torch.int64, device=own.device)
        place[others] = torch.arange(len(others), device=own.device)
        row = place[cell_row]
        row, column, number = (x[row >= 0] for x in (row, cell_column, msa.numbers))
        return shared_deletions(numbers[centres], row, column, number, shares, len(others), msa.length)

    return summary


def deletion_value(deletions: Int32[Tensor, "*s"] | Float32[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
    """Numbers of deletions d mapped to [0, 1): arctan(d / 3) * 2 / pi."""
    return torch.atan(deletions.float() / 3) * (2 / math.pi)

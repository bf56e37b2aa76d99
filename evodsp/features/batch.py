"""From the loader's batch to the model's (supplement 1.2.6 to 1.2.9), on the device of the batch.

The random numbers of MSA features are drawn for all recycling iterations of a sample at once. `prediction_sample` makes the
features of a chain, or of a complex, whose structure is to be predicted.

Shapes: B samples, C recycling iterations, N sequences, S clusters, E extra sequences, L columns of the chain, R residues of
the crop, K cells with deletions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int8, Int32, Int64, Shaped
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import MergedMsa
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.samples.dataset import Sample, collate
from evodsp.data.samples.raw_features import (
    CHAIN_AXES,
    FEATURE_AXES,
    HOST,
    RAGGED,
    SAMPLED,
    TEMPLATE_AXES,
    FeatureSizes,
    complex_features,
    max_clusters,
    piece,
    raw_features,
)
from evodsp.data.sources.msa import check_alignments, msa_of
from evodsp.data.templates.features import TemplateFeatures
from evodsp.features.clusters import (
    cluster_profiles,
    mask_letters,
    mean_deletions,
    members,
    nearest_clusters,
    shared_deletions,
    shared_profiles,
    shares_of,
    write_one_hot,
)
from evodsp.geometry.residues import LETTERS_WITH_GAP, encode_sequence
from evodsp.rng import ROUNDS, WEYL, Draws, key_words, philox_rounds

_LAST = torch.iinfo(torch.int64).max
_AT_ONCE = 1 << 14
"""On a CPU this many numbers are drawn at a time, so that the words between them stay in a core's cache."""


@dataclass(frozen=True)
class Drawn:
    """All random numbers that the features of a sample need."""

    order: Int64[Tensor, "C N"]
    """The query, the other rows of the MSA in random order, then the rows that block deletion leaves out."""
    replace: Float64[Tensor, "C S L"]
    """Uniform numbers that choose the letters to replace."""
    letter: Float64[Tensor, "C S L"]
    """Uniform numbers that choose the new letters."""


def draw(keys: Int64[Tensor, "C 3"], kept: Bool[Tensor, "C N"], clusters: int, columns: int) -> Drawn:
    """The numbers of the streams `raw_features.STREAMS`, whose keys are `keys`. `kept`: the rows that block deletion leaves."""
    others, letters = kept.shape[1] - 1, clusters * columns
    order: list[tuple[Tensor, Tensor]] = []
    uniform: tuple[list[Tensor], list[Tensor]] = [], []
    for stream, first, second in _words(keys, (others, letters, letters)):
        if stream:
            uniform[stream - 1].append((first >> 8).double() * (1.0 / (1 << 24)))  # `Draws.uniform`
        else:
            order.append((first, second))
    replace, letter = (_joined(pieces).view(len(keys), clusters, columns) for pieces in uniform)
    high, low = (_joined(pieces) for pieces in zip(*order, strict=True))
    return Drawn(row_order(high, low, kept), replace, letter)


def _words(
    keys: Int64[Tensor, "C k"], numbers: Sequence[int]
) -> Iterator[tuple[int, Int64[Tensor, "C n"], Int64[Tensor, "C n"]]]:
    """The first two random words (`Draws.words`) of each stream, in pieces: the number of the stream, and its words.

    `numbers`: how many each stream has, which rises or falls. All streams are drawn at once, because a GPU's host needs longer
    to launch a generator's hundred operators than the GPU to draw the numbers that a shorter stream does not need.
    """
    at_once = max(1, _AT_ONCE // keys.numel() if keys.device.type == "cpu" else max(numbers))
    rounds, start = torch.arange(ROUNDS, device=keys.device)[:, None, None], 0
    of_rounds = [words + rounds * step for words, step in zip(key_words(keys), WEYL, strict=True)]
    for positions in torch.arange(max(numbers), device=keys.device).split(at_once):
        streams = [stream for stream, number in enumerate(numbers) if number > start or not start]
        own = zip(*(words[:, :, streams[0] : streams[-1] + 1, None] for words in of_rounds), strict=True)
        first, second, _, _ = philox_rounds((positions, 0, 0, 0), own)
        for place, stream in enumerate(streams):
            left = numbers[stream] - start
            yield stream, first[:, place, :left], second[:, place, :left]
        start += at_once


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 1)


def row_order(high: Int64[Tensor, "C n"], low: Int64[Tensor, "C n"], kept: Bool[Tensor, "C N"]) -> Int64[Tensor, "C N"]:
    """The query, then the other kept rows in random order (`Draws.permutation`), then the rows that are not kept.

    `high`, `low`: the random words of the other rows.
    """
    # One number to sort by; high words of 2^31 and more must not become negative.
    by = (((high - (1 << 31)) << 32) | low).masked_fill(~kept[:, 1:], _LAST)
    others = by.sort(dim=1, stable=True).indices + 1
    return torch.cat([others.new_zeros(len(others), 1), others], 1)


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
    """Split the concatenated MSAs of a batch into one RawMsa a sample."""
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
    length, crop = msa.length, msa.crop
    size, shown = max(rows.clusters for rows in msa.rows), max(rows.extra for rows in msa.rows)
    # An iteration with fewer clusters has no rows but their centres. So this parts the rows of all iterations alike; where some
    # have fewer, rows follow that block deletion leaves out.
    centres, others = drawn.order[:, : max(rows.kept for rows in msa.rows)].tensor_split([size], 1)
    true = _rows(msa.letters, drawn.order[:, : drawn.replace.shape[1]])
    masked, replaced = (
        values.view(true.shape)
        for values in mask_letters(
            true.flatten(0, 1), msa.profile, drawn.replace.flatten(0, 1), drawn.letter.flatten(0, 1), config
        )
    )
    own = masked[:, :size, crop]
    letters = _rows(msa.letters[:, crop], others)
    deletion_values = torch.zeros(len(msa.letters) * length, device=letters.device)
    deletion_values = deletion_values.scatter_(0, msa.cells, deletion_value(msa.numbers)).view(-1, length)
    features, values = into["msa_feat"][:, :size, :length], _rows(deletion_values, centres)
    write_one_hot(features[..., :23], own)
    features[..., 25:48] = features[..., :23]
    features[..., 23] = values > 0
    features[..., 24] = values
    summary = _nearest if msa.chains is None else _shared
    means = summary(msa, masked, own, centres, others, letters, features[..., 25:48])
    features[..., 48] = deletion_value(means)
    into["msa_mask"][:, :size, :length] = 1
    into["msa_row_mask"][:, :size] = 1
    into["true_msa"][:, :size, :length] = true[:, :size, crop]
    counted = replaced[:, :size, crop]
    if msa.chains is not None:  # the gaps beside a block are masked, too, but there is nothing to learn from them
        block = msa.chains.block[centres][..., None]
        counted = counted & ((block == 0) | (block == msa.chains.entity))
    into["bert_mask"][:, :size, :length] = counted

    # The rows are in random order, so the first ones are a random sample.
    values = _rows(deletion_values, others[:, :shown])
    into["extra_msa"][:, :shown, :length] = letters[:, :shown]
    into["extra_msa_mask"][:, :shown, :length] = 1
    into["extra_msa_row_mask"][:, :shown] = 1
    into["extra_has_deletion"][:, :shown, :length] = values > 0
    into["extra_deletion_value"][:, :shown, :length] = values
    for cycle, rows in enumerate(msa.rows):
        for name, values in into.items():
            taken, most = (rows.extra, shown) if name.startswith("extra") else (rows.clusters, size)
            if taken < most:
                values[cycle, taken:most] = 0


def _rows(table: Shaped[Tensor, "N c"], rows: Int64[Tensor, "C n"]) -> Shaped[Tensor, "C n c"]:
    return table.index_select(0, rows.flatten()).view(*rows.shape, table.shape[1])


def _nearest(
    msa: RawMsa,
    masked: Int8[Tensor, "C S L"],
    own: Int8[Tensor, "C size R"],
    centres: Int64[Tensor, "C size"],
    others: Int64[Tensor, "C E"],
    letters: Int8[Tensor, "C E R"],
    profiles: Float32[Tensor, "C size R 23"],
) -> Float32[Tensor, "C size R"]:
    """Clusters of the sequences nearest to each centre (supplement 1.2.7): writes their profiles in place of the one-hot
    letters of the centres, and returns their mean deletions. `own`: the letters of the centres. `others`, `letters`: the rows
    that follow, and their letters.
    """
    size = own.shape[1]
    assigned = nearest_clusters(masked, msa.letters, others, [rows.kept - rows.clusters for rows in msa.rows])
    counted = msa.kept.gather(1, others)
    sizes = members(assigned, counted, size)
    cluster = torch.zeros(msa.kept.shape, dtype=torch.int64, device=own.device)
    cluster.scatter_(1, centres, torch.arange(size, device=own.device).expand_as(centres)).scatter_(1, others, assigned)
    row, column = msa.cells // msa.length, msa.cells % msa.length
    cluster_profiles(letters, assigned, counted, sizes, out=profiles)
    return mean_deletions(
        cluster.index_select(1, row), column, msa.numbers, msa.kept.index_select(1, row), sizes, msa.length
    )


def _shared(
    msa: RawMsa,
    masked: Int8[Tensor, "C S L"],
    own: Int8[Tensor, "C size R"],
    centres: Int64[Tensor, "C size"],
    others: Int64[Tensor, "C E"],
    letters: Int8[Tensor, "C E R"],
    profiles: Float32[Tensor, "C size R 23"],
) -> Float32[Tensor, "C size R"]:
    """Clusters as AlphaFold-Multimer makes them (`evodsp.features.clusters`), of the cropped columns; see `_nearest`."""
    cell_row, cell_column = msa.cells // msa.length, msa.cells % msa.length
    numbers = torch.zeros(len(msa.letters), msa.length, device=own.device)
    numbers[cell_row, cell_column] = msa.numbers.float()
    means = torch.zeros(own.shape, device=own.device)
    for cycle, rows in enumerate(msa.rows):
        size, extra = rows.clusters, rows.kept - rows.clusters
        clusters, sequences = own[cycle, :size], letters[cycle, :extra]
        shares = shares_of(clusters, sequences)
        profiles[cycle, :size] = shared_profiles(clusters, sequences, shares, msa.length)
        place = torch.full((len(msa.letters),), -1, dtype=torch.int64, device=own.device)
        place[others[cycle, :extra]] = torch.arange(extra, device=own.device)
        row = place[cell_row]
        row, column, number = (x[row >= 0] for x in (row, cell_column, msa.numbers))
        of_centres = numbers[centres[cycle, :size]]
        means[cycle, :size] = shared_deletions(of_centres, row, column, number, shares, extra, msa.length)
    return means


def deletion_value(deletions: Int32[Tensor, "*s"] | Float32[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
    """Numbers of deletions d mapped to [0, 1): arctan(d / 3) * 2 / pi."""
    return torch.atan(deletions.float() / 3) * (2 / math.pi)


def prediction_sample(
    query: ProteinSequence,
    alignments: list[Alignment],
    config: FeatureConfig,
    seed: int,
    templates: TemplateFeatures | None = None,
    ensembles: int = 1,
) -> Sample:
    """Features of the whole chain `query` for prediction; `crop_size` is ignored.

    The leading axis has `ensembles` independently drawn feature sets for each of the `recycles` + 1 iterations; the sets of
    one iteration are adjacent. `templates`: the templates, best first; the first `max_templates` are taken. There may be
    fewer, or none: the masked ones that fill up a sample of training would change nothing here, but cost as much as real
    ones. Without alignments the MSA is the query alone.
    Raises UserError if the first row of an alignment is not the query.
    """
    aatype = encode_sequence(query.letters)
    check_alignments(alignments, query)
    msa = msa_of(alignments, query)
    sets = (config.recycles + 1) * ensembles
    whole = replace(config, crop_size=None)
    raw = raw_features(aatype, msa, whole, _draws(seed), sets, piece(0, len(aatype)), templates)
    features = _features(raw, whole)
    found = 0 if templates is None else len(templates.names)
    return {name: values[0, :, :found] if name in TEMPLATE_AXES else values[0] for name, values in features.items()}


def complex_sample(
    merged: MergedMsa,
    config: FeatureConfig,
    seed: int,
    templates: TemplateFeatures | None = None,
    ensembles: int = 1,
) -> Sample:
    """Features of a whole complex for prediction, as `prediction_sample` makes those of a chain.

    There are always `max_templates` templates, the last ones absent: AlphaFold-Multimer's model takes the mean over its
    templates, and has no mask of them.
    """
    sets, whole = (config.recycles + 1) * ensembles, replace(config, crop_size=None)
    raw = complex_features(merged, whole, _draws(seed), sets, piece(0, merged.msa.shape[1]), templates)
    return {name: values[0] for name, values in _features(raw, whole).items()}


def _draws(seed: int) -> Draws:
    return Draws.root(seed).at("prediction")


def _features(raw: dict[str, np.ndarray], config: FeatureConfig) -> Sample:
    """The features of a batch with one sample."""
    return with_features(collate([{name: torch.from_numpy(values) for name, values in raw.items()}]), config)

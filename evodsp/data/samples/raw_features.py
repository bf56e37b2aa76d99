"""The samples that worker processes make: their features with names and axes (table 1 of the supplement), and the
residues that a sample keeps. The device makes the features of the MSA from them (`evodsp.features`).

Of a chain a sample keeps a piece (supplement 1.2.8), of a complex pieces of its chains, or a neighbourhood of an interface
(AlphaFold-Multimer, supplement 7.2). Residues of a complex are numbered from 0, one chain after another. Positions are in Å.
Shapes: R residues of the crop, N residues of the complex, n of them.

Letters are bytes and deletions are listed, so a sample has a thirtieth of the bytes of its features. Columns outside the
crop are needed too: sequences are assigned to clusters by all their columns (supplement 1.2.7), before the crop.

Shapes: N sequences, L columns of the chain, R residues of the crop, C recycling iterations, K cells of the crop with
deletions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, Int64

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import MergedMsa
from evodsp.data.sources.msa import MsaFeatures, letter_profile
from evodsp.data.templates.features import TemplateFeatures
from evodsp.errors import COUNT, FRACTION, SIZE, SettingError, UserError, check_numbers
from evodsp.geometry import residues
from evodsp.geometry.residues import LETTERS_WITH_MASK, LETTERS_WITH_X
from evodsp.rng import Draws

FEATURE_AXES: dict[str, tuple[str | None, ...]] = {
    "aatype": ("residues",),
    "residue_index": ("residues",),
    "seq_length": (),
    "seq_mask": ("residues",),
    "target_feat": ("residues", None),
    "atom14_atom_exists": ("residues", None),
    "atom37_atom_exists": ("residues", None),
    "residx_atom14_to_atom37": ("residues", None),
    "residx_atom37_to_atom14": ("residues", None),
    "msa_feat": ("msa", "residues", None),
    "msa_mask": ("msa", "residues"),
    "msa_row_mask": ("msa",),
    "true_msa": ("msa", "residues"),
    "bert_mask": ("msa", "residues"),
    "extra_msa": ("extra", "residues"),
    "extra_msa_mask": ("extra", "residues"),
    "extra_msa_row_mask": ("extra",),
    "extra_has_deletion": ("extra", "residues"),
    "extra_deletion_value": ("extra", "residues"),
}
"""All features except the templates', with their axes after the recycling axis. Named axes can be padded (with zeros); None
marks an axis of fixed size."""

CHAIN_AXES: dict[str, tuple[str | None, ...]] = {
    "asym_id": ("residues",),
    "entity_id": ("residues",),
    "sym_id": ("residues",),
}
"""The features that only samples of complexes have, likewise."""

TEMPLATE_AXES: dict[str, tuple[str | None, ...]] = {
    "template_aatype": ("templates", "residues"),
    "template_all_atom_positions": ("templates", "residues", None, None),
    "template_all_atom_masks": ("templates", "residues", None),
    "template_pseudo_beta": ("templates", "residues", None),
    "template_pseudo_beta_mask": ("templates", "residues"),
    "template_mask": ("templates",),
    "template_sum_probs": ("templates", None),
}
"""The template features with their axes, likewise; they are present if `max_templates` is above 0."""

SAMPLED: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "msa_feat": (np.float32, (49,)),
    "msa_mask": (np.float32, ()),
    "msa_row_mask": (np.float32, ()),
    "true_msa": (np.int32, ()),
    "bert_mask": (np.float32, ()),
    "extra_msa": (np.int32, ()),
    "extra_msa_mask": (np.float32, ()),
    "extra_msa_row_mask": (np.float32, ()),
    "extra_has_deletion": (np.float32, ()),
    "extra_deletion_value": (np.float32, ()),
}
"""The features that each recycling iteration draws anew: their type, and the sizes of their axes without a name."""

_RANGES = {
    "crop_size": SIZE,
    "msa_clusters": SIZE,
    "extra_msa": SIZE,
    "max_templates": COUNT,
    "recycles": COUNT,
    "masked_msa_fraction": FRACTION,
    "masked_uniform": FRACTION,
    "masked_profile": FRACTION,
    "masked_same": FRACTION,
    "block_delete_fraction": FRACTION,
    "block_delete_blocks": COUNT,
    "clamp_fape_fraction": FRACTION,
    "spatial_crop_fraction": FRACTION,
}


@dataclass(frozen=True)
class FeatureSizes:
    """Padded sizes of the named feature axes."""

    residues: int
    msa: int
    extra: int
    templates: int = 0


def max_clusters(config: FeatureConfig) -> int:
    """Rows of the clustered MSA, the template rows not counted. `check_config` makes sure that there is one."""
    return config.msa_clusters - config.max_templates


def check_config(config: FeatureConfig, where: str = "") -> None:
    """Raise SettingError if a size or a probability of `config` is out of range. `where`: the name of `config` and a dot, for
    messages."""
    check_numbers(config, _RANGES, where)
    if max_clusters(config) < 1:
        expected = f"above {where}max_templates, which is {config.max_templates}: each template takes one of these rows"
        raise SettingError(f"{where}msa_clusters", config.msa_clusters, expected)
    if (total := config.masked_uniform + config.masked_profile + config.masked_same) > 1 + 1e-6:
        expected = f"lower: with masked_uniform and masked_profile the sum is {total:g}, and it can be at most 1"
        raise SettingError(f"{where}masked_same", config.masked_same, expected)


INTERFACE_DISTANCE = 10.0
"""CA atoms of two chains that are nearer than this in Å belong to an interface."""

_TIE_BREAKER = 1e-3  # Å per residue, so that of equally near residues the first is kept
_ROWS_AT_ONCE = 128


@dataclass(frozen=True, eq=False)
class Crop:
    """The residues that a sample keeps: their numbers in the chain from 0, ascending. They need not be neighbours."""

    residues: Int64[np.ndarray, " R"]

    def __len__(self) -> int:
        return len(self.residues)

    @property
    def first(self) -> int:
        """The first residue of a piece of the chain; -1 if the residues are not neighbours."""
        return int(self.residues[0]) if self.residues[-1] - self.residues[0] == len(self) - 1 else -1

    @property
    def index(self) -> slice | Int64[np.ndarray, " R"]:
        """The index of these residues; of a piece a slice, which copies nothing."""
        return self.residues if self.first < 0 else slice(self.first, self.first + len(self))


def piece(start: int, length: int) -> Crop:
    """The residues start, start + 1, …, start + length - 1 of a chain."""
    return Crop(np.arange(start, start + length))


def crop_start(surplus: int, clamped: bool, shift: float, position: float) -> int:
    """First residue of a training crop that leaves out `surplus` residues of the chain.

    `shift`, `position`: uniform random numbers in [0, 1). Samples with clamped FAPE start uniformly in 0..surplus. The others
    start uniformly in 0..surplus - x, with x uniform in 0..surplus, which favours the beginning of the chain.
    """
    last = surplus if clamped else surplus - int(shift * (surplus + 1))
    return int(position * (last + 1))


def training_crop(length: int, crop_size: int | None, clamped: bool, draws: Draws) -> Crop:
    """A random crop of `crop_size` residues of a chain; the whole chain if it is not longer."""
    if crop_size is None or length <= crop_size:
        return piece(0, length)
    shift, position = draws.at("crop").uniform(2)
    return piece(crop_start(length - crop_size, clamped, float(shift), float(position)), crop_size)


def centre_crop(length: int, crop_size: int | None) -> Crop:
    """The middle `crop_size` residues, for validation: the same crop in every run and epoch."""
    if crop_size is None or length <= crop_size:
        return piece(0, length)
    return piece((length - crop_size) // 2, crop_size)


def complex_crop(
    lengths: Sequence[int],
    positions: Float[np.ndarray, "N 3"],
    mask: Float[np.ndarray, " N"],
    crop_size: int | None,
    draws: Draws,
    spatial_fraction: float,
) -> Crop:
    """A random crop of `crop_size` residues of a complex; the whole complex if it is not larger.

    `lengths`: residues of each chain. `positions`, `mask`: its CA atoms, 1 where they are resolved. With probability
    `spatial_fraction` the crop is spatial, if there is an interface; otherwise it is contiguous.
    """
    if crop_size is None or sum(lengths) <= crop_size:
        return piece(0, sum(lengths))
    if draws.at("crop_kind").uniform(1)[0] < spatial_fraction:
        crop = spatial_crop(lengths, positions, mask, crop_size, draws)
        if crop is not None:
            return crop
    return contiguous_crop(lengths, crop_size, draws)


def contiguous_crop(lengths: Sequence[int], crop_size: int, draws: Draws) -> Crop:
    """A piece of each chain, `crop_size` residues in all, or all of the complex if it is smaller (algorithm 1 of
    AlphaFold-Multimer's supplement).

    Chains take their pieces in random order. Each has a uniformly random length, from what the chains after it cannot make up
    for to what is left, and a uniformly random start. A piece may have no residues.
    """
    starts = np.cumsum([0, *lengths])
    draws = draws.at("contiguous_crop")
    shares, places = draws.at("pieces").uniform(2, len(lengths))
    wanted, remaining = min(crop_size, int(starts[-1])), int(starts[-1])
    residues = []
    for chain in draws.at("order").permutation(len(lengths)):
        length = lengths[chain]
        remaining -= length
        least, most = max(0, wanted - remaining), min(wanted, length)
        size = least + int(shares[chain] * (most - least + 1))
        wanted -= size
        first = starts[chain] + int(places[chain] * (length - size + 1))
        residues.append(np.arange(first, first + size))
    return Crop(np.sort(np.concatenate(residues)))


def spatial_crop(
    lengths: Sequence[int],
    positions: Float[np.ndarray, "N 3"],
    mask: Float[np.ndarray, " N"],
    crop_size: int,
    draws: Draws,
) -> Crop | None:
    """The `crop_size` residues that are nearest to a random residue of an interface (algorithm 2 of
    AlphaFold-Multimer's supplement); None without interfaces.

    Distances are between CA atoms. Residues without one come after all others, in order.
    """
    interface = interface_residues(lengths, positions, mask)
    if not len(interface):
        return None
    centre = interface[draws.at("spatial_crop").integer(0, len(interface))]
    distance = np.sqrt(_squared_distances(positions[centre, None], positions)[0])
    distance = np.where(mask > 0, distance + _TIE_BREAKER * np.arange(len(mask)), np.inf)
    return Crop(np.sort(np.argsort(distance, kind="stable")[:crop_size]))


def interface_residues(
    lengths: Sequence[int],
    positions: Float[np.ndarray, "N 3"],
    mask: Float[np.ndarray, " N"],
) -> Int64[np.ndarray, " n"]:
    """The residues whose CA atom is nearer than `INTERFACE_DISTANCE` to a CA atom of another chain, ascending.

    Memory is linear in the number of residues.
    """
    chain, resolved = np.repeat(np.arange(len(lengths)), lengths), np.flatnonzero(mask > 0)
    if not len(resolved):
        return resolved
    # Sorted along the longest axis of the complex, atoms that may be near to some rows are a part of all atoms.
    axis = np.ptp(positions[resolved], 0).argmax()
    resolved = resolved[np.argsort(positions[resolved, axis], kind="stable")]
    chain, positions = chain[resolved], positions[resolved]
    along = positions[:, axis]
    near = np.zeros(len(resolved), bool)
    for start in range(0, len(resolved), _ROWS_AT_ONCE):
        here = slice(start, start + _ROWS_AT_ONCE)
        first, last = along[here][[0, -1]] + [-INTERFACE_DISTANCE, INTERFACE_DISTANCE]
        others = slice(np.searchsorted(along, first, "left"), np.searchsorted(along, last, "right"))
        close = _squared_distances(positions[here], positions[others]) < INTERFACE_DISTANCE**2
        near[here] = (close & (chain[here, None] != chain[others])).any(1)
    return np.sort(resolved[near])


def _squared_distances(x: Float[np.ndarray, "m 3"], y: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "m n"]:
    """In float64, because the tie-breaker is small beside distances."""
    total = np.zeros((len(x), len(y)))
    for one, other in zip(x.T.astype(np.float64), y.T.astype(np.float64), strict=True):
        total += np.square(one[:, None] - other)
    return total


RAGGED = (
    "msa_letters", "msa_profile_bits", "msa_kept", "crop_residues", "deletion_cells", "deletion_numbers", "msa_blocks",
)  # fmt: skip
"""Entries whose sizes differ between samples. Each has one axis; a batch joins those of its samples. Only samples of complexes
have `msa_blocks`."""

HOST = ("msa_sizes", "msa_kept_counts")
"""Entries that the host reads, which stay there: they say how large the features are."""

STREAMS = ("msa_order", "msa_replace", "msa_letter")
"""The random streams of one recycling iteration that the device draws from: see `evodsp.features.batch.Drawn`."""

_ONE_HOT = np.eye(LETTERS_WITH_MASK, dtype=np.float32)
_MOST_CELLS = 1 << 31


def raw_features(
    aatype: Int32[np.ndarray, " L"],
    msa: MsaFeatures,
    config: FeatureConfig,
    draws: Draws,
    cycles: int,
    crop: Crop,
    templates: TemplateFeatures | None = None,
) -> dict[str, np.ndarray]:
    """A sample whose MSA is still whole. Each iteration will sample it with the stream `draws.at(cycle)`.

    It holds the features that do not change between recycling iterations, with a leading axis of 1 instead of C, padded to
    `config.crop_size` residues, and of the MSA:

    - `msa_letters` int8 [N L], `msa_profile_bits` int32 [L 22]: flat. The profile is float32, kept as its bits: a run in half
      precision rounds floats, and would draw other letters.
    - `deletion_cells`, `deletion_numbers` int32 [K]: flat places in [N, R], ascending, and the numbers of deletions there.
    - `msa_kept` bool [C N]: whether block deletion leaves each row. `msa_kept_counts` int64 [C]: the number of these rows.
    - `msa_keys` int64 [C, 3]: the keys of `STREAMS` in each iteration.
    - `crop_residues` int64 [R]: the columns of the crop, ascending.
    - `msa_sizes` int64 [5]: N, L, the first residue of the crop (-1 if its residues are not neighbours), R, K.

    Raises UserError if the cropped MSA has more than 2^31 cells.
    """
    check_config(config)
    (rows, columns), cycle_draws = msa.msa.shape, [draws.at(cycle) for cycle in range(cycles)]
    if rows * len(crop) >= _MOST_CELLS:
        raise UserError(f"its alignment has {rows} x {len(crop)} cells, more than 2^31; filter it, or train on crops")
    deletions = np.ascontiguousarray(msa.deletions[:, crop.index]).reshape(-1)
    cells = np.flatnonzero(deletions)
    kept = np.stack(
        [kept_rows(rows, deleted_block_starts(d, rows, config), config.block_delete_fraction) for d in cycle_draws]
    )
    return {
        **fixed_features(aatype, config, 1, crop, config.crop_size or len(crop), templates),
        "msa_letters": msa.msa.flatten(),  # a copy: the chain is cached
        "msa_profile_bits": msa.profile.flatten().view(np.int32),
        "msa_kept": kept.reshape(-1),
        "msa_kept_counts": kept.sum(1),
        "msa_keys": np.array([[d.at(stream).signed_key() for stream in STREAMS] for d in cycle_draws], np.int64),
        "msa_sizes": np.array([rows, columns, crop.first, len(crop), len(cells)], np.int64),
        "crop_residues": crop.residues,
        "deletion_cells": cells.astype(np.int32),
        "deletion_numbers": deletions[cells].astype(np.int32),
    }


def complex_features(
    merged: MergedMsa,
    config: FeatureConfig,
    draws: Draws,
    cycles: int,
    crop: Crop,
    templates: TemplateFeatures | None = None,
) -> dict[str, np.ndarray]:
    """A sample of a complex. AlphaFold-Multimer samples its MSA after the crop, so the columns outside of it are left out.

    Its entries are those of `raw_features`, but for these:

    - `target_feat` has the 21 residue types alone, without a column for breaks.
    - `residue_index` begins anew in each chain; `asym_id`, `entity_id` and `sym_id` int32 [1, R] number chains, sequences and
      the copies of a sequence from 1. They are 0 in padding.
    - `msa_blocks` int32 [N]: 0 for paired rows, else the `entity_id` of the only residues that a row covers. Rows of sequences
      that the crop leaves out are left out.

    `templates`: of the whole complex. Raises UserError as `raw_features` does.
    """
    columns = crop.index
    entity = merged.ids.entity_id[columns]
    kept = (merged.block == 0) | np.isin(merged.block, entity)
    letters, deletions = merged.msa[kept][:, columns], merged.deletions[kept][:, columns]
    msa = MsaFeatures(letters, deletions, letter_profile(letters))
    own = None if templates is None else templates.select(slice(None), columns)
    aatype = merged.aatype()[columns]
    sample = raw_features(aatype, msa, config, draws, cycles, piece(0, len(crop)), own)
    length = sample["aatype"].shape[1]
    for field in dataclasses.fields(merged.ids):
        numbers = np.zeros((1, length), np.int32)
        numbers[0, : len(crop)] = getattr(merged.ids, field.name)[columns]
        sample[field.name] = numbers
    types = np.zeros((1, length, LETTERS_WITH_X), np.float32)
    types[0, np.arange(len(crop)), aatype] = 1
    return sample | {"target_feat": types, "msa_blocks": merged.block[kept]}


def target_features(aatype: Int32[np.ndarray, " R"]) -> Float32[np.ndarray, "R 22"]:
    """`target_feat`: one column that marks chain breaks (zero in a monomer), then the one-hot residue type (21)."""
    features = np.zeros((len(aatype), 22), np.float32)
    features[:, 1:] = _ONE_HOT[aatype, :LETTERS_WITH_X]
    return features


def sequence_features(aatype: Int32[np.ndarray, " L"], crop: Crop) -> dict[str, np.ndarray]:
    """The features that do not change between recycling iterations, cropped to R residues."""
    cropped = aatype[crop.index]
    return {
        "aatype": cropped,
        "residue_index": np.arange(len(aatype), dtype=np.int32)[crop.index],
        "seq_length": np.array(len(cropped), np.int32),
        "seq_mask": np.ones(len(cropped), np.float32),
        "target_feat": target_features(cropped),
        "atom14_atom_exists": residues.RESTYPE_ATOM14_MASK[cropped].astype(np.float32),
        "atom37_atom_exists": residues.RESTYPE_ATOM37_MASK[cropped].astype(np.float32),
        "residx_atom14_to_atom37": residues.RESTYPE_ATOM14_TO_ATOM37[cropped].astype(np.int32),
        "residx_atom37_to_atom14": residues.RESTYPE_ATOM37_TO_ATOM14[cropped].astype(np.int32),
    }


def fixed_features(
    aatype: Int32[np.ndarray, " L"],
    config: FeatureConfig,
    cycles: int,
    crop: Crop,
    length: int,
    templates: TemplateFeatures | None = None,
) -> dict[str, np.ndarray]:
    """The features that are the same in each recycling iteration, padded with zeros to `length` residues.

    If `max_templates` is above 0 there are always that many templates: the first ones of `templates` (whose R is L), then
    masked zeros. If it is 0, `templates` is ignored.
    """
    fixed = sequence_features(aatype, crop)
    if config.max_templates:
        found = TemplateFeatures.none(len(aatype)) if templates is None else templates
        fixed |= found.select(slice(config.max_templates), crop.index).processed()
    padded = FeatureSizes(length, 0, 0, config.max_templates)
    return {name: _repeated(name, values, padded, cycles) for name, values in fixed.items()}


def _repeated(name: str, values: np.ndarray, sizes: FeatureSizes, cycles: int) -> np.ndarray:
    """A feature that is the same in each recycling iteration, with these as first axis, padded with zeros to `sizes`."""
    axes = FEATURE_AXES[name] if name in FEATURE_AXES else TEMPLATE_AXES[name]
    shape = tuple(getattr(sizes, axis) if axis else size for axis, size in zip(axes, values.shape, strict=True))
    out = np.zeros((cycles, *shape), values.dtype)
    out[(slice(None), *(slice(size) for size in values.shape))] = values
    return out


def deleted_block_starts(draws: Draws, rows: int, config: FeatureConfig) -> Int64[np.ndarray, " blocks"]:
    """The first row of each block that one recycling iteration deletes; none unless `config` deletes blocks."""
    blocks = config.block_delete_blocks if config.block_delete else 0
    return (draws.at("block_deletion").uniform(blocks) * rows).astype(np.int64)


def kept_rows(rows: int, starts: Int64[np.ndarray, " blocks"], fraction: float) -> Bool[np.ndarray, " {rows}"]:
    """MSA block deletion (algorithm 1): whether each row remains if, from each start, a block of `fraction` of all rows is
    deleted. The query remains."""
    keep = np.ones(rows, bool)
    index = np.arange(rows)
    length = int(rows * fraction)
    for start in starts:
        keep &= (index < start) | (index >= start + length)
    keep[0] = True
    return keep

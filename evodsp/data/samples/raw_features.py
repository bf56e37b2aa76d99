"""The samples that worker processes make; the device makes the features of the MSA from them (`evodsp.features`).

Letters are bytes and deletions are listed, so a sample has a thirtieth of the bytes of its features. Columns outside the
crop are needed too: sequences are assigned to clusters by all their columns (supplement 1.2.7), before the crop.

Shapes: N sequences, L columns of the chain, R residues of the crop, C recycling iterations, K cells of the crop with deletions.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import MergedMsa
from evodsp.data.samples.crop import Crop, piece
from evodsp.data.samples.feature_axes import FEATURE_AXES, TEMPLATE_AXES, FeatureSizes, check_config
from evodsp.data.sources.msa import MsaFeatures, letter_profile
from evodsp.data.templates.features import TemplateFeatures
from evodsp.errors import UserError
from evodsp.geometry import residues
from evodsp.geometry.residues import LETTERS_WITH_MASK, LETTERS_WITH_X
from evodsp.rng import Draws

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
    """Whether each row remains after deleting, from each start, a block of `fraction` of all rows (algorithm 1). The query
    remains."""
    keep = np.ones(rows, bool)
    index = np.arange(rows)
    length = int(rows * fraction)
    for start in starts:
        keep &= (index < start) | (index >= start + length)
    keep[0] = True
    return keep

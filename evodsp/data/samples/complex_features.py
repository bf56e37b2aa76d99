"""Samples of complexes, as worker processes make them: those of chains (`raw_features`), and the numbers of the chains.

AlphaFold-Multimer samples its MSA after the crop, so the columns outside of it are left out here.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import MergedMsa
from evodsp.data.samples.crop import Crop, piece
from evodsp.data.samples.raw_features import raw_features
from evodsp.data.sources.msa import MsaFeatures, letter_profile
from evodsp.data.templates.features import TemplateFeatures
from evodsp.geometry.alphabet import LETTERS_WITH_X
from evodsp.rng import Draws


def complex_features(
    merged: MergedMsa,
    config: FeatureConfig,
    draws: Draws,
    cycles: int,
    crop: Crop,
    templates: TemplateFeatures | None = None,
) -> dict[str, np.ndarray]:
    """A sample of a complex. Its entries are those of `raw_features`, but for these:

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

"""What a worker process hands over of a sample's MSA, so that the training device makes its features (`evodsp.features`).

Letters are bytes and deletions are listed, so a sample has a thirtieth of the bytes of its features. Columns outside the
crop are needed too: sequences are assigned to clusters by all their columns (supplement 1.2.7), before the crop.

Shapes: N sequences, L columns of the chain, R residues of the crop, C recycling iterations, K cells of the crop with deletions.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32

from evodsp.config import FeatureConfig
from evodsp.data.crop import Crop
from evodsp.data.features import check_config, deleted_block_starts, fixed_features, kept_rows
from evodsp.data.msa import MsaFeatures
from evodsp.data.templates.features import TemplateFeatures
from evodsp.errors import UserError
from evodsp.rng import Draws

RAGGED = ("msa_letters", "msa_profile_bits", "msa_kept", "deletion_cells", "deletion_numbers")
"""Entries whose sizes differ between samples. Each has one axis; a batch joins those of its samples."""

HOST = ("msa_sizes", "msa_kept_counts")
"""Entries that the host reads, which stay there: they say how large the features are."""

STREAMS = ("msa_order", "msa_replace", "msa_letter")
"""The random streams of one recycling iteration that the device draws from; see `features.CycleDraws`."""

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
    """What `features.make_features` needs, with the same arguments, before anything is sampled.

    It holds the features that do not change between recycling iterations, with a leading axis of 1 instead of C, padded to
    `config.crop_size` residues, and of the MSA:

    - `msa_letters` int8 [N L], `msa_profile_bits` int32 [L 22]: flat. The profile is float32, kept as its bits: a run in half
      precision rounds what is a float, and other letters would be drawn.
    - `deletion_cells`, `deletion_numbers` int32 [K]: flat places in [N, R], ascending, and how many deletions there.
    - `msa_kept` bool [C N]: rows that block deletion leaves. `msa_kept_counts` int64 [C]: their number.
    - `msa_keys` int64 [C, 3]: the keys of `STREAMS` in each iteration.
    - `msa_sizes` int64 [5]: N, L, the first residue of the crop, R, K.

    Raises UserError if the cropped MSA has more than 2^31 cells.
    """
    check_config(config)
    (rows, columns), cycle_draws = msa.msa.shape, [draws.at(cycle) for cycle in range(cycles)]
    if rows * crop.length >= _MOST_CELLS:
        raise UserError(
            f"its alignment has {rows} x {crop.length} cells, more than 2^31; filter it, or set a crop_size"
        )
    deletions = np.ascontiguousarray(msa.deletions[:, crop.residues]).reshape(-1)
    cells = np.flatnonzero(deletions)
    kept = np.stack(
        [kept_rows(rows, deleted_block_starts(d, rows, config), config.block_delete_fraction) for d in cycle_draws]
    )
    return {
        **fixed_features(aatype, config, 1, crop, config.crop_size or crop.length, templates),
        "msa_letters": msa.msa.flatten(),  # a copy: the chain is cached
        "msa_profile_bits": msa.profile.flatten().view(np.int32),
        "msa_kept": kept.reshape(-1),
        "msa_kept_counts": kept.sum(1),
        "msa_keys": np.array([[d.at(stream).signed_key() for stream in STREAMS] for d in cycle_draws], np.int64),
        "msa_sizes": np.array([rows, columns, crop.start, crop.length, len(cells)], np.int64),
        "deletion_cells": cells.astype(np.int32),
        "deletion_numbers": deletions[cells],
    }

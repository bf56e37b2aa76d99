"""The features that the model gets: their names and axes, and the settings that size them (table 1 of the supplement)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evodsp.config import FeatureConfig
from evodsp.errors import COUNT, FRACTION, SIZE, SettingError, check_numbers

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

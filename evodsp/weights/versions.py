"""Checkpoints written by earlier versions, brought up to date when they are read."""

from __future__ import annotations

import re
from typing import Any

FORMAT_VERSION = 2
"""Version of the checkpoints that are written. Every earlier one can be read."""

# `ensembles` was a feature size in version 1 and is an option of prediction now.
_RETIRED_FEATURES = ("ensembles",)
# Version 1 had the sub-layers of the MSA stack directly in the block.
_MSA_LAYER = re.compile(
    r"(?<=\.)(blocks\.\d+\.)(row_attention|column_attention|msa_transition|outer_product_mean)(?=\.)"
)
# Version 1 had a module for each head, called `<name>_head`.
_HEAD = re.compile(r"(?<![\w.])(model\.)?(distogram|masked_msa|plddt|resolved|pae)_head(?=\.)")
_HEADS = {"resolved": "experimentally_resolved", "pae": "predicted_aligned_error"}
_WEIGHTS = ("state_dict", "ema_state_dict")


def upgrade(checkpoint: dict[str, Any]) -> None:
    """Change a checkpoint of an earlier version into one of `FORMAT_VERSION`, in place. Others are left as they are."""
    if checkpoint.get("format_version") != 1:
        return
    for key in _WEIGHTS:
        if isinstance(weights := checkpoint.get(key), dict):
            checkpoint[key] = {_renamed(name): value for name, value in weights.items()}
    if isinstance(features := checkpoint.get("features"), dict):
        checkpoint["features"] = {name: size for name, size in features.items() if name not in _RETIRED_FEATURES}
    checkpoint["format_version"] = FORMAT_VERSION


def _renamed(name: str) -> str:
    """'…blocks.0.msa_transition.norm.weight' -> '…blocks.0.msa_stack.transition.norm.weight'; 'pae_head.…' -> 'heads.…'."""
    name = _HEAD.sub(lambda found: f"{found[1] or ''}heads.{_HEADS.get(found[2], found[2])}", name)
    return _MSA_LAYER.sub(lambda found: f"{found[1]}msa_stack.{found[2].removeprefix('msa_')}", name)

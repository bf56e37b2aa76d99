"""The parts of a model that differ between AlphaFold2 and AlphaFold-Multimer. `ModelConfig.arrangement` chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from evodsp.config import ArrangementName, EmbedderConfig, TemplateConfig
from evodsp.geometry.residues import LETTERS_WITH_GAP, LETTERS_WITH_MASK, LETTERS_WITH_X
from evodsp.model.embedders import TARGET_CHANNELS, RelativePosition
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.multimer import (
    ChainRelativePosition,
    ChainTemplateEmbedder,
    ChainTemplates,
    ChainTorsionEmbedder,
)
from evodsp.model.outer_product_first import OuterProductFirstStack
from evodsp.model.primitives import Linear
from evodsp.model.templates import TemplateEmbedder, Templates, TemplateTorsionEmbedder

FEATURES = (
    "aatype", "residue_index", "seq_mask", "target_feat", "msa_feat", "msa_mask",
    "extra_msa", "extra_msa_mask", "extra_has_deletion", "extra_deletion_value",
)  # fmt: skip
CHAIN_FEATURES = ("asym_id", "entity_id", "sym_id")
TEMPLATE_STRUCTURES = (
    "template_aatype", "template_all_atom_positions", "template_all_atom_masks",
    "template_pseudo_beta", "template_pseudo_beta_mask",
)  # fmt: skip
TEMPLATE_FEATURES = (*TEMPLATE_STRUCTURES, "template_mask")


@dataclass(frozen=True)
class Arrangement:
    """The parts of a model."""

    features: tuple[str, ...]
    """The features that the model reads, without the templates'."""
    template_features: tuple[str, ...]
    target_channels: int
    """Channels of `target_feat`."""
    relative_position: Callable[[int, EmbedderConfig], Linear]
    templates: Callable[[Mapping[str, Tensor]], Any]
    """Makes the record of the templates, which the next two read, from the features."""
    template_embedder: Callable[[int, TemplateConfig], TemplateEmbedder | ChainTemplateEmbedder]
    template_torsion_embedder: Callable[[int], TemplateTorsionEmbedder]
    stack: Callable[..., EvoformerStack | OuterProductFirstStack]
    masked_letters: int
    """Letters of which the masked-MSA head predicts one."""
    passes_after_settling: int
    """Passes that are run after one which has not changed the structure, where passes stop early."""


ARRANGEMENTS: dict[ArrangementName, Arrangement] = {
    "monomer": Arrangement(
        features=FEATURES,
        template_features=TEMPLATE_FEATURES,
        target_channels=TARGET_CHANNELS,
        relative_position=RelativePosition,
        templates=Templates.from_features,
        template_embedder=TemplateEmbedder,
        template_torsion_embedder=TemplateTorsionEmbedder,
        stack=EvoformerStack,
        masked_letters=LETTERS_WITH_MASK,
        passes_after_settling=0,
    ),
    "multimer": Arrangement(
        features=(*FEATURES, *CHAIN_FEATURES),
        template_features=TEMPLATE_STRUCTURES,
        target_channels=LETTERS_WITH_X,
        relative_position=ChainRelativePosition,
        templates=ChainTemplates.from_features,
        template_embedder=ChainTemplateEmbedder,
        template_torsion_embedder=ChainTorsionEmbedder,
        stack=OuterProductFirstStack,
        masked_letters=LETTERS_WITH_GAP,
        passes_after_settling=1,
    ),
}

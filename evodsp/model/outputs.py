"""The results of the model. All lengths are in Å.

Shapes: B batch, S clusters of the MSA, R residues, T iterations of the structure module. A small letter (i j r) is this rank's
shard of the residues: rows and columns of the pair, columns of the MSA. Tensors without a small letter are whole and the same
on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.geometry.frames import Rigid


@dataclass(frozen=True)
class StructureOutput:
    """Result of the structure module (algorithm 20)."""

    backbone: Rigid
    """Backbone frames after each iteration, [T, B, R]."""
    angles: Float[Tensor, "T B R 7 2"]
    """(sin, cos) of omega, phi, psi, chi1..chi4 after each iteration."""
    unnormalized_angles: Float[Tensor, "T B R 7 2"]
    """The (sin, cos) vectors before they are normalised to unit length."""
    frames: Rigid
    """The eight rigid-group frames of the last iteration, [B, R, 8]."""
    atom14: Float[Tensor, "B R 14 3"]
    """Atom positions of the last iteration."""
    positions: Float[Tensor, "B R 37 3"]
    """Atom positions of the last iteration in atom37 order, differentiable."""
    mask: Float[Tensor, "B R 37"]
    """1 for the atoms that the residue's type has, 0 for the others and in padding."""
    single: Float[Tensor, "B R c_s"]
    """Single representation after the last iteration (input of the pLDDT head)."""


@dataclass(frozen=True)
class ModelOutput:
    """Result of the last pass (recycling iteration) of the model.

    `representations` and `logits` go by name, so that a model with another trunk or other heads has its own names here.
    AlphaFold's:

    representation  shape              what it is
    msa             B S r c_m          MSA representation; with several feature sets in a pass, that of the first one, as in AF2
    first_row       B R c_m            the query's row of it, averaged over the feature sets of the pass
    pair            B R j c_z          pair representation, averaged likewise
    single          B R c_s            single representation

    logits          shape              predicts
    distogram       B i R bins         binned CB-CB distances
    masked_msa      B S r 23           letters that were masked in the MSA
    plddt           B R plddt_bins     binned lDDT-CA
    experimentally_resolved  B R 37    which atoms an experiment resolves
    predicted_aligned_error  B i R pae_bins  binned aligned error
    """

    representations: Mapping[str, Tensor]
    structure: StructureOutput
    logits: Mapping[str, Tensor]
    """Logits of the heads that the model has."""
    ca_change: Float[Tensor, " B"] | None = None
    """Root mean square change of the CA-CA distances since the previous pass, in Å, if a stop tolerance was given."""


# FSDP2 gathers parameters before the backward pass reaches them, if it finds the tensors that a model returned. Before torch
# 2.13 it looks for them in registered pytrees only.
for _record in (StructureOutput, ModelOutput):
    torch.export.register_dataclass(_record)

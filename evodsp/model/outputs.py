"""What the model returns. All lengths in Å.

Shapes: B batch, S clusters of the MSA, R residues, T iterations of the structure module; i j r this rank's shard of the
residues (rows and columns of the pair, columns of the MSA), on one device all of them. What has no small letter is whole, and
the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from evodsp.geometry.rigid import Rigid


@dataclass(frozen=True)
class StructureOutput:
    """Result of the structure module (algorithm 20)."""

    backbone: Rigid
    """Backbone frames after each iteration, [T, B, R]."""
    angles: Float[Tensor, "T B R 7 2"]
    """(sin, cos) of omega, phi, psi, chi1..chi4 after each iteration."""
    unnormalized_angles: Float[Tensor, "T B R 7 2"]
    """The same before they are brought to unit length."""
    frames: Rigid
    """The eight rigid-group frames of the last iteration, [B, R, 8]."""
    atom14: Float[Tensor, "B R 14 3"]
    """Atom positions of the last iteration."""
    positions: Float[Tensor, "B R 37 3"]
    """The same in atom37 order."""
    mask: Float[Tensor, "B R 37"]
    """Which atoms each residue has."""
    single: Float[Tensor, "B R c_s"]
    """Single representation after the last iteration (input of the pLDDT head)."""


@dataclass(frozen=True)
class ModelOutput:
    """Result of the last pass (recycling iteration) of the model."""

    msa: Float[Tensor, "B S r c_m"]
    """With several feature sets to a pass: that of the first set, as in AF2."""
    first_row: Float[Tensor, "B R c_m"]
    """The query's row of the MSA representation, the mean over the pass's feature sets."""
    pair: Float[Tensor, "B R j c_z"]
    single: Float[Tensor, "B R c_s"]
    structure: StructureOutput
    distogram_logits: Float[Tensor, "B i R bins"]
    masked_msa_logits: Float[Tensor, "B S r 23"]
    plddt_logits: Float[Tensor, "B R plddt_bins"]
    resolved_logits: Float[Tensor, "B R 37"] | None = None
    """Which atoms an experiment resolves, if the model has that head."""
    pae_logits: Float[Tensor, "B i R pae_bins"] | None = None
    """Binned aligned error, if the model has that head."""
    ca_change: Float[Tensor, " B"] | None = None
    """How far CA-CA distances moved since the pass before (root mean square, Å), if a stop tolerance was given."""

"""The training loss: weighted sum of its terms (supplement 1.9, equation 7)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from evodsp.config import HeadsConfig, LossConfig
from evodsp.errors import UserError
from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import CA
from evodsp.losses.heads import distogram_loss, experimentally_resolved_loss, masked_msa_loss, pae_loss, plddt_loss
from evodsp.losses.permutation import compute_renamed_ground_truth
from evodsp.losses.structure import (
    angle_norm_loss,
    backbone_fape,
    backbone_fape_by_chain,
    chain_centre_loss,
    sidechain_fape,
    torsion_loss,
    unique_residue_numbers,
)
from evodsp.losses.violation import find_violations, violation_loss
from evodsp.model.graphs import Recorded
from evodsp.model.heads import ModelOutput
from evodsp.model.precision import without_autocast
from evodsp.parallel.exchange import Exchange, LocalExchange


@dataclass(frozen=True)
class _Inputs:
    """The inputs of every term. `batch` is what `_read` returns, axes [B, ...]."""

    output: ModelOutput
    batch: dict[str, Tensor]
    config: LossConfig
    heads: HeadsConfig
    exchange: Exchange

    def logits(self, head: str) -> Tensor:
        """The logits of a head. `_require` has checked that they exist."""
        return self.output.logits[head]

    @property
    def chain(self) -> Tensor | None:
        """The number of each residue's chain, of complexes."""
        return self.batch.get(CHAIN)

    @cached_property
    def backbone_fapes(self) -> list[Tensor]:
        """Backbone FAPE; of complexes, that within chains and that across chains, which two terms share."""
        backbone = self.output.structure.backbone
        truth = Rigid.from_flat12(self.batch["rigidgroups_gt_frames"][:, :, 0])
        mask, clamped = self.batch["backbone_affine_mask"], self.batch.get("use_clamped_fape")
        if self.chain is None:
            return [backbone_fape(backbone, truth, mask, clamped, self.exchange)]
        widest = self.config.interface_clamp
        return backbone_fape_by_chain(backbone, truth, mask, self.chain, clamped, widest, self.exchange)


def _backbone_fape(x: _Inputs) -> Float[Tensor, " B"]:
    return x.backbone_fapes[0]


def _interface_fape(x: _Inputs) -> Float[Tensor, " B"]:
    return x.backbone_fapes[1]


def _sidechain_fape(x: _Inputs) -> Float[Tensor, " B"]:
    structure = x.output.structure
    truth = compute_renamed_ground_truth(x.batch, structure.atom14, x.exchange)
    mask = x.batch["rigidgroups_gt_exists"]
    lists = x.batch.get("observed_frames"), x.batch.get("observed_atoms")
    return sidechain_fape(
        structure.frames, truth.frames, mask, structure.atom14, truth.atom14, truth.atom14_mask, x.exchange, *lists
    )


def _torsion(x: _Inputs) -> Float[Tensor, " B"]:
    names = ("torsion_angles_sin_cos", "alt_torsion_angles_sin_cos", "torsion_angles_mask")
    truth, alternative, mask = (x.batch[name][:, :, 3:] for name in names)  # chi1 to chi4
    return torsion_loss(x.output.structure.angles[..., 3:, :], truth, alternative, mask)


def _angle_norm(x: _Inputs) -> Float[Tensor, " B"]:
    return angle_norm_loss(x.output.structure.unnormalized_angles, x.batch["seq_mask"])


def _distogram(x: _Inputs) -> Float[Tensor, " B"]:
    edges = x.heads.distogram_min_distance, x.heads.distogram_max_distance
    positions, mask = x.batch["pseudo_beta"], x.batch["pseudo_beta_mask"]
    return distogram_loss(x.logits("distogram"), positions, mask, *edges, x.exchange)


def _masked_msa(x: _Inputs) -> Float[Tensor, " B"]:
    return masked_msa_loss(x.logits("masked_msa"), x.batch["true_msa"], x.batch["bert_mask"], x.exchange)


def _plddt(x: _Inputs) -> Float[Tensor, " B"]:
    predicted, truth = x.output.structure.positions[:, :, CA], x.batch["all_atom_positions"][:, :, CA]
    mask, bounds = x.batch["all_atom_mask"][:, :, CA], _resolution_bounds(x)
    return plddt_loss(x.logits("plddt"), predicted, truth, mask, x.batch["resolution"], *bounds, x.exchange)


def _experimentally_resolved(x: _Inputs) -> Float[Tensor, " B"]:
    logits = x.logits("experimentally_resolved")
    observed, exists = x.batch["all_atom_mask"], x.batch["atom37_atom_exists"]
    return experimentally_resolved_loss(logits, observed, exists, x.batch["resolution"], *_resolution_bounds(x))


def _violation(x: _Inputs) -> Float[Tensor, " B"]:
    mask = x.batch["atom14_atom_exists"]
    index, aatype, existing = x.batch["residue_index"], x.batch["aatype"], x.batch.get("existing_atoms")
    if x.chain is not None:
        index = unique_residue_numbers(index, x.chain)
    found = find_violations(x.output.structure.atom14, mask, index, aatype, x.exchange, existing)
    return violation_loss(found, mask)


def _pae(x: _Inputs) -> Float[Tensor, " B"]:
    logits = x.logits("predicted_aligned_error")
    truth = Rigid.from_flat12(x.batch["rigidgroups_gt_frames"][:, :, 0])
    mask, bounds = x.batch["backbone_affine_mask"], _resolution_bounds(x)
    backbone = x.output.structure.backbone[-1]
    return pae_loss(logits, backbone, truth, mask, x.batch["resolution"], *bounds, x.heads.pae_max_error, x.exchange)


def _chain_centre(x: _Inputs) -> Float[Tensor, " B"]:
    predicted, truth = x.output.structure.positions[:, :, CA], x.batch["all_atom_positions"][:, :, CA]
    return chain_centre_loss(predicted, truth, x.batch["all_atom_mask"][:, :, CA], x.batch[CHAIN], x.exchange)


def _resolution_bounds(x: _Inputs) -> tuple[float, float]:
    return x.config.confidence_min_resolution, x.config.confidence_max_resolution


@dataclass(frozen=True)
class _Term:
    """A term of the loss: a function that returns one number per sample, and the arrays of the batch that it needs.

    On several ranks the function may return this rank's share, if the mean over ranks is the term (see `total_loss`).
    """

    compute: Callable[[_Inputs], Tensor]
    features: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    head: str | None = None
    """Name of the output head that the term reads."""


CHAIN = "asym_id"
"""The feature of complexes, which single chains have not: the number of each residue's chain, from 1 on, 0 in padding."""
OPTIONAL = ("use_clamped_fape", "observed_frames", "observed_atoms", "existing_atoms", "ambiguous_residues")
"""Entries that terms read only where a batch has them."""
_BACKBONE = ("rigidgroups_gt_frames", "backbone_affine_mask")
TERMS = {
    "backbone_fape": _Term(_backbone_fape, labels=_BACKBONE),
    "sidechain_fape": _Term(
        _sidechain_fape,
        labels=(
            "rigidgroups_gt_frames", "rigidgroups_alt_gt_frames", "rigidgroups_gt_exists", "atom14_gt_positions",
            "atom14_gt_exists", "atom14_alt_gt_positions", "atom14_alt_gt_exists", "atom14_atom_is_ambiguous",
        ),
    ),
    "torsion": _Term(
        _torsion, labels=("torsion_angles_sin_cos", "alt_torsion_angles_sin_cos", "torsion_angles_mask")
    ),
    "angle_norm": _Term(_angle_norm, features=("seq_mask",)),
    "distogram": _Term(_distogram, labels=("pseudo_beta", "pseudo_beta_mask"), head="distogram"),
    "masked_msa": _Term(_masked_msa, features=("true_msa", "bert_mask"), head="masked_msa"),
    "plddt": _Term(_plddt, labels=("all_atom_positions", "all_atom_mask", "resolution"), head="plddt"),
    "experimentally_resolved": _Term(
        _experimentally_resolved, features=("atom37_atom_exists",), labels=("all_atom_mask", "resolution"),
        head="experimentally_resolved",
    ),
    "violation": _Term(_violation, features=("atom14_atom_exists", "residue_index", "aatype")),
    "pae": _Term(_pae, labels=(*_BACKBONE, "resolution"), head="predicted_aligned_error"),
    "interface_fape": _Term(_interface_fape, features=(CHAIN,), labels=_BACKBONE),
    "chain_centre": _Term(_chain_centre, features=(CHAIN,), labels=("all_atom_positions", "all_atom_mask")),
}  # fmt: skip
"""The terms, by the names of their weights in LossConfig; logs have columns of these names."""


def total_loss(
    output: ModelOutput,
    batch: dict[str, Tensor],
    config: LossConfig,
    heads: HeadsConfig,
    exchange: Exchange = LocalExchange(),
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """The loss, which is the weighted sum of its terms, mean over the batch; and each term by itself.

    `batch` holds features [B, cycle, ...], of which the last iteration is used, and labels [B, ...]. The backbone FAPE is
    clamped unless `use_clamped_fape` says otherwise. In batches of complexes, which have the feature `asym_id`, it counts
    the pairs within chains, and violations know the chains; the terms that single chains have too count all residues alike
    (pLDDT and PAE also judge distances between chains, as in AlphaFold-Multimer's code). The breakdown holds every term whose
    weight is not zero, unweighted and not scaled by length, as a mean over the batch, and the loss itself as `total`; all are
    detached. Raises UserError if the batch lacks labels that a term needs. The lists of `evodsp.data.samples.dataset.collate`
    save work on entries that do not exist; they do not change the result.

    On several ranks the logits of distogram, PAE and masked MSA are this rank's shards; everything else in `output` and `batch`
    is whole. The MEAN over ranks of the results is the loss and its breakdown, and the mean of the gradients is the gradient.
    """
    return _total(_Inputs(output, _read(output, batch, config), config, heads, exchange))


class RecordedLoss(Recorded):
    """`total_loss` in a training step, whose calls may be replayed. Batches of other passes have the same shapes here, because
    only what the terms read is an input.
    """

    def __init__(self, config: LossConfig, heads: HeadsConfig) -> None:
        super().__init__()
        self.config, self.heads = config, heads
        self._tree: TreeSpec | None = None
        """Structure of a call's inputs."""

    def __call__(self, output: ModelOutput, batch: dict[str, Tensor]) -> Any:
        read = _read(output, batch, self.config)
        heads = {term.head for term in _weighted(self.config).values()}
        logits = {name: x for name, x in output.logits.items() if name in heads}
        tensors, self._tree = tree_flatten((logits, output.structure, read))
        self.sharded_inputs = tuple(range(len(logits)))
        return super().__call__(*tensors)

    def forward(self, *tensors: Tensor) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        assert self._tree is not None
        logits, structure, read = tree_unflatten(tensors, self._tree)
        return _total(_Inputs(ModelOutput({}, structure, logits), read, self.config, self.heads, self.exchange))

    def settings(self) -> Hashable | None:
        return super().settings(), self._tree


def _weighted(config: LossConfig) -> dict[str, _Term]:
    return {name: term for name, term in TERMS.items() if getattr(config, name) != 0}


def _read(output: ModelOutput, batch: dict[str, Tensor], config: LossConfig) -> dict[str, Tensor]:
    """Inputs of the terms: features of the last recycling iteration, and labels. Raises UserError if something is missing."""
    terms = _weighted(config)
    _require(terms, batch, output)
    features = {"seq_mask", CHAIN, *(name for term in terms.values() for name in term.features)}
    labels = {*OPTIONAL, *(name for term in terms.values() for name in term.labels)} - features
    read = {name: x[:, -1] for name, x in batch.items() if name in features}
    return read | {name: x for name, x in batch.items() if name in labels}


def _total(x: _Inputs) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """The loss, and its terms."""
    config, positions = x.config, x.output.structure.positions
    # Losses sum many small numbers, so they need at least float32, whatever precision the layers use.
    with without_autocast(positions.device):
        losses = {name: term.compute(x) for name, term in _weighted(config).items()}
    total = positions.new_zeros(len(positions), dtype=torch.promote_types(positions.dtype, torch.float32))
    for name, loss in losses.items():
        total = total + getattr(config, name) * loss
    if config.scale_by_length:
        total = total * x.batch["seq_mask"].sum(-1).sqrt()
    mean = total.mean()
    breakdown = {name: loss.detach().mean() for name, loss in losses.items()}
    return mean, {**breakdown, "total": mean.detach()}


def check_heads(config: LossConfig, heads: HeadsConfig) -> None:
    """Raise UserError if a term with a weight needs a head that the model lacks."""
    for name, term in TERMS.items():
        if getattr(config, name) != 0 and term.head is not None and getattr(heads, term.head, None) is False:
            raise UserError(
                f"model.loss.{name} is {getattr(config, name)}, but the model has no head for it; set model.heads.{term.head} "
                "to true, or the weight to 0"
            )


def _require(terms: dict[str, _Term], batch: dict[str, Tensor], output: ModelOutput) -> None:
    """Raise UserError naming a missing head, or the missing labels, and the terms that need them."""
    for name, term in terms.items():
        if term.head is not None and term.head not in output.logits:
            raise UserError(
                f"loss.{name} is not 0, but the model has no head for it; set heads.{term.head} to true or the weight to 0"
            )
    lacking = {name: [key for key in term.labels + term.features if key not in batch] for name, term in terms.items()}
    missing = sorted({key for keys in lacking.values() for key in keys})
    if missing:
        needing = ", ".join(name for name, keys in lacking.items() if keys)
        raise UserError(
            f"the batch has no {', '.join(missing)}, which the loss terms {needing} need: "
            f"give {'complexes' if CHAIN in missing else 'chains'} with known structures, or set those terms' weights to 0"
        )

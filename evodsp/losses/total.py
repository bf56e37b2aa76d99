"""The training loss: the weighted sum of its terms (supplement 1.9, equation 7); and those terms that are losses of the heads:
distogram and masked MSA (1.9.8 and 1.9.9), predicted lDDT-CA and aligned error (1.9.6 and 1.9.7), and which atoms are resolved
(1.9.10).

pLDDT, PAE and pTM are computed from the heads' logits in `evodsp.model.heads`.

Shapes: B batch, S sequences, R residues; i and r are this rank's shard of the residues (rows of the pair representation, or
columns of the MSA), which on one device is all R. Each rank sums over its shard and multiplies by the number of ranks, so
that the MEAN over ranks is the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from evodsp.config import HeadsConfig, LossConfig
from evodsp.errors import UserError
from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import CA
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
from evodsp.metrics import lddt_ca
from evodsp.model.graphs import Recorded
from evodsp.model.heads import MAX_ALIGNED_ERROR, ModelOutput
from evodsp.model.precision import without_autocast
from evodsp.parallel.exchange import Exchange, LocalExchange


def distance_bins(
    positions: Float[Tensor, "B R 3"], bins: int, min_distance: float, max_distance: float, rows: slice = slice(None)
) -> Int64[Tensor, "B i R"]:
    """Bin of the distance between each residue of `rows` and every residue.

    The `bins` - 1 edges are equally spaced from `min_distance` to `max_distance` (Å); the first and the last bin are open.
    """
    edges = torch.linspace(min_distance, max_distance, bins - 1, dtype=positions.dtype, device=positions.device)
    squared = (positions[:, rows, None] - positions[:, None]).square().sum(-1)
    return torch.bucketize(squared, edges.square())


def distogram_loss(
    logits: Float[Tensor, "B i R bins"],
    pseudo_beta: Float[Tensor, "B R 3"],
    mask: Float[Tensor, "B R"],
    min_distance: float,
    max_distance: float,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """Cross-entropy of the binned distances between CB atoms (CA for glycine), mean over pairs of observed residues.

    Positions and distances are in Å. The logits are this rank's rows; positions and mask are the whole chain's.
    """
    rows = exchange.owned(mask.shape[1])
    target = distance_bins(pseudo_beta, logits.shape[-1], min_distance, max_distance, rows)
    pair_mask = mask[:, rows, None] * mask[:, None]
    total = exchange.ranks * (cross_entropy(logits, target) * pair_mask).sum((1, 2))
    return total / (1e-6 + mask.sum(1).square())


def masked_msa_loss(
    logits: Float[Tensor, "B S r letters"],
    true_msa: Int[Tensor, "B S R"],
    bert_mask: Float[Tensor, "B S R"],
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """Cross-entropy of the true letters, mean over the positions that were masked (`bert_mask`).

    The logits are this rank's residues; letters and mask are the whole MSA's.
    """
    columns = exchange.owned(bert_mask.shape[2])
    error = cross_entropy(logits, true_msa[:, :, columns]) * bert_mask[:, :, columns]
    return exchange.ranks * error.sum((1, 2)) / (1e-8 + bert_mask.sum((1, 2)))


def cross_entropy(logits: Float[Tensor, "*b bins"], target: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Negative log-probability of `target`, in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = functional.cross_entropy(logits.flatten(0, -2), target.flatten().long(), reduction="none")
    return flat.reshape(target.shape)


def plddt_loss(
    logits: Float[Tensor, "B R bins"],
    ca: Float[Tensor, "B R 3"],
    true_ca: Float[Tensor, "B R 3"],
    mask: Float[Tensor, "B R"],
    resolution: Float[Tensor, " B"],
    min_resolution: float,
    max_resolution: float,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """Cross-entropy of the bin of the prediction's lDDT-CA, mean over residues with an observed CA.

    Positions and resolutions are in Å. The loss is zero for structures whose resolution is outside the bounds (predicted
    and NMR structures have resolution 0). The positions get no gradient: the head must judge the structure, not change it.
    All arguments are whole on every rank; each rank sums over its own residues.
    """
    bins, rows = logits.shape[-1], exchange.owned(mask.shape[1])
    scores = lddt_ca(ca.detach().to(true_ca.dtype), true_ca, mask, per_residue=True, rows=rows)
    target = (scores * bins).long().clamp(max=bins - 1)
    total = exchange.ranks * (cross_entropy(logits[:, rows], target) * mask[:, rows]).sum(-1)
    loss = total / (1e-8 + mask.sum(-1))
    return loss * ((resolution >= min_resolution) & (resolution <= max_resolution))


def pae_loss(
    logits: Float[Tensor, "B i R bins"],
    backbone: Rigid,
    true_backbone: Rigid,
    mask: Float[Tensor, "B R"],
    resolution: Float[Tensor, " B"],
    min_resolution: float,
    max_resolution: float,
    max_error: float = MAX_ALIGNED_ERROR,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """Cross-entropy of the bin of the aligned error, mean over pairs of residues with an observed backbone.

    The aligned error of (i, j) is the distance in Å between residue j's predicted and true CA, each seen from residue i's
    backbone frame of the same structure. `backbone` and `true_backbone` are [B, R], `mask` is `backbone_affine_mask`. The
    loss is zero for structures whose resolution is outside the bounds. The structure gets no gradient: the head must judge
    it, not change it. The logits are this rank's rows; all other arguments are whole on every rank.
    """
    rows = exchange.owned(mask.shape[1])
    pair_mask = mask[:, rows, None] * mask[:, None]
    target = aligned_error_bins(backbone, true_backbone, logits.shape[-1], max_error, rows)
    total = exchange.ranks * (cross_entropy(logits, target) * pair_mask).sum((1, 2))
    loss = total / (1e-8 + mask.sum(1).square())
    return loss * ((resolution >= min_resolution) & (resolution <= max_resolution))


@torch.no_grad()
def aligned_error_bins(
    backbone: Rigid,
    true_backbone: Rigid,
    bins: int,
    max_error: float = MAX_ALIGNED_ERROR,
    rows: slice = slice(None),
) -> Int64[Tensor, "B i R"]:
    """Bin of the aligned error of each frame of `rows` and each CA. `bins` - 1 edges divide 0 to `max_error` equally.

    Frames are [B, R]. The first edge is 0, so only the diagonal, whose error is 0 by definition, falls in the first bin.
    """

    def seen(frames: Rigid) -> Tensor:
        return frames[:, rows].unsqueeze(-1).apply_inverse(frames.translation[..., None, :, :])

    squared = (seen(backbone) - seen(true_backbone)).square().sum(-1)
    squared.diagonal(offset=rows.start or 0, dim1=-2, dim2=-1).zero_()  # exactly 0, not up to rounding
    edges = torch.linspace(0, max_error, bins - 1, dtype=squared.dtype, device=squared.device)
    return torch.bucketize(squared, edges.square())


def experimentally_resolved_loss(
    logits: Float[Tensor, "B R 37"],
    observed: Float[Tensor, "B R 37"],
    exists: Float[Tensor, "B R 37"],
    resolution: Float[Tensor, " B"],
    min_resolution: float,
    max_resolution: float,
) -> Float[Tensor, " B"]:
    """Binary cross-entropy of whether each atom was observed, mean over the atoms that the residues have.

    `observed` is `all_atom_mask`, `exists` is `atom37_atom_exists`. The loss is zero for structures whose resolution in Å
    is outside the bounds: atoms missing from a poor map, or from a predicted structure (resolution 0), carry no
    information.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    error = functional.binary_cross_entropy_with_logits(logits, observed.to(logits.dtype), reduction="none")
    loss = (error * exists).sum((1, 2)) / (1e-8 + exists.sum((1, 2)))
    return loss * ((resolution >= min_resolution) & (resolution <= max_resolution))


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

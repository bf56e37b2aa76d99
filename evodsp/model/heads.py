"""Output heads (supplement 1.9.6 to 1.9.10), the results of the model, and the confidence that follows from the heads'
logits: pLDDT, predicted aligned error (PAE) and predicted TM-score (pTM), and of a complex the pTM of its interfaces
(ipTM) and of its parts.

A head names the representation that it `reads`: `msa` (on R), `pair_rows` (the pair representation on I), `single`, or
`structure` (the single representation after the structure module).

Each head of a confidence predicts a distribution over bins; the confidence is an expected value over the bins' centres. The
losses that train the heads are in `evodsp.losses.total`. All lengths are in Å.

Shape legend: *b batch axes, B batch, S clusters of the MSA, R residues, T iterations of the structure module, C chains,
whose numbers are 1 to C (`asym_id`; 0 in padding). A small letter (i j r) is this rank's shard of the residues: rows and
columns of the pair, columns of the MSA. On one device it is all of them. Tensors without a small letter are whole and the
same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from evodsp.config import ChannelsConfig, HeadsConfig
from evodsp.geometry.frames import Rigid
from evodsp.model.precision import without_autocast
from evodsp.model.primitives import Budgeted, LayerNorm, Linear
from evodsp.parallel.exchange import Exchange, LocalExchange


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

ATOMS = 37


class DistogramHead(Budgeted):
    """Logits of the binned CB-CB distance, symmetric in the two residues (supplement 1.9.8). z is on I."""

    reads = "pair_rows"

    def __init__(self, channels: ChannelsConfig, config: HeadsConfig) -> None:
        super().__init__()
        self.half_logits = Linear(channels.pair, config.distogram_bins, init="final")

    def forward(self, z: Float[Tensor, "B i R c_z"]) -> Float[Tensor, "B i R bins"]:
        half = self.half_logits(z)
        pieces = self.budget.channels(half, half.shape[0] * half.shape[2] ** 2)
        into = half if self.budget.in_place else None
        return pieces.collect(lambda bins: self._symmetric(half[..., bins]), into=into)

    def _symmetric(self, half: Float[Tensor, "B i R bins"]) -> Float[Tensor, "B i R bins"]:
        """The sum of `half` and its transpose (i and j exchanged). Any subset of the bins may be given."""
        columns = self.exchange.switch(half, "i", "j", whole=half.shape[2])  # [B, R, j, bins], j the same residues as i
        return half + columns.transpose(1, 2)


class MaskedMSAHead(nn.Module):
    """Logits of the letters that were masked in the MSA (supplement 1.9.9). m is on R. `letters`: how many there are."""

    reads = "msa"

    def __init__(self, channels: ChannelsConfig, letters: int) -> None:
        super().__init__()
        self.logits = Linear(channels.msa, letters, init="final")

    def forward(self, m: Float[Tensor, "B S r c_m"]) -> Float[Tensor, "B S r letters"]:
        return self.logits(m)


class PLDDTHead(nn.Module):
    """Logits of the binned lDDT-CA of each residue (algorithm 29).

    Runs in the parameters' precision even under autocast, as the structure module, which makes its input: in bf16 a logit of
    2 is rounded by up to 0.008, as much as the logits of residues differ when the head begins to tell them apart.
    """

    reads = "structure"
    computes_in_float32 = True

    def __init__(self, channels: ChannelsConfig, config: HeadsConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(channels.single)
        self.first = Linear(channels.single, config.plddt_channels, init="relu")
        self.second = Linear(config.plddt_channels, config.plddt_channels, init="relu")
        self.logits = Linear(config.plddt_channels, config.plddt_bins, init="final")

    def forward(self, s: Float[Tensor, "B R c_s"]) -> Float[Tensor, "B R bins"]:
        with without_autocast(s.device):
            return self.logits(self.second(self.first(self.norm(s)).relu()).relu())


class ExperimentallyResolvedHead(nn.Module):
    """Logits of each atom being resolved in an experiment (supplement 1.9.10), from the Evoformer's single representation."""

    reads = "single"

    def __init__(self, channels: ChannelsConfig) -> None:
        super().__init__()
        self.logits = Linear(channels.single, ATOMS, init="final")

    def forward(self, s: Float[Tensor, "B R c_s"]) -> Float[Tensor, "B R 37"]:
        return self.logits(s)


class PredictedAlignedErrorHead(nn.Module):
    """Logits of the binned error of residue j seen from the frame of residue i (supplement 1.9.7). z is on I."""

    reads = "pair_rows"

    def __init__(self, channels: ChannelsConfig, config: HeadsConfig) -> None:
        super().__init__()
        self.logits = Linear(channels.pair, config.pae_bins, init="final")

    def forward(self, z: Float[Tensor, "B i R c_z"]) -> Float[Tensor, "B i R bins"]:
        return self.logits(z)


def make_heads(channels: ChannelsConfig, config: HeadsConfig, letters: int) -> dict[str, nn.Module]:
    """The heads of a model by the names of their logits. `letters`: of which the masked-MSA head predicts one."""
    heads: dict[str, nn.Module] = {
        "distogram": DistogramHead(channels, config),
        "masked_msa": MaskedMSAHead(channels, letters),
        "plddt": PLDDTHead(channels, config),
    }
    if config.experimentally_resolved:
        heads["experimentally_resolved"] = ExperimentallyResolvedHead(channels)
    if config.predicted_aligned_error:
        heads["predicted_aligned_error"] = PredictedAlignedErrorHead(channels, config)
    return heads


Number = TypeVar("Number", float, Tensor)

MAX_ALIGNED_ERROR = 31.0
"""Last bin edge of the aligned error in Å; larger errors fall in the last bin (supplement 1.9.7)."""
CONTACT_DISTANCE = 8.0
"""Largest CB-CB distance of two residues in contact in Å, as CASP defines it."""
_ROWS = 64
"""Number of rows of residue pairs that are computed together."""
_SHORTEST_CHAIN = 19
"""Smallest number of residues for d0: the TM-score does not define it below 16, and AlphaFold2 treats chains of less than 19
as having 19."""


def compute_plddt(logits: Float[Tensor, "*b R bins"]) -> Float[Tensor, "*b R"]:
    """Expected lDDT-CA of each residue, 0 to 100 (algorithm 29). The bins divide 0 to 100 equally."""
    bins = logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    centres = (torch.arange(bins, dtype=logits.dtype, device=logits.device) + 0.5) / bins  # [bins]
    return 100 * (logits.softmax(-1) * centres).sum(-1)


def compute_contacts(
    logits: Float[Tensor, "*b i R bins"], min_distance: float, max_distance: float
) -> Float[Tensor, "*b i R"]:
    """Probability, 0 to 1, that two residues are in contact: CB atoms (CA of glycine) within about `CONTACT_DISTANCE`.

    It is the total probability of the distogram's bins that end below this distance: at 7.94 Å in AlphaFold2, whose bins are
    0.31 Å wide. Any subset of the rows may be given. `min_distance`, `max_distance`: the first and the last edge between
    bins, Å (supplement 1.9.8).
    """
    return _nearest(logits, int((_edges(logits, min_distance, max_distance) <= CONTACT_DISTANCE).sum()))


def compute_contact_weights(
    logits: Float[Tensor, "*b i R bins"], min_distance: float, max_distance: float
) -> Float[Tensor, "*b i R"]:
    """The weights of pairs in actifpTM (`compute_complex_confidence`), 0 to 1, with the arguments of `compute_contacts`.

    They are contact probabilities, too, but ColabFold, whose scores these are, also counts the bin that `CONTACT_DISTANCE` lies
    in: up to 8.25 Å in AlphaFold2.
    """
    return _nearest(logits, int((_edges(logits, min_distance, max_distance) < CONTACT_DISTANCE).sum()) + 1)


def compute_pae(logits: Float[Tensor, "*b i R bins"], max_error: float = MAX_ALIGNED_ERROR) -> Float[Tensor, "*b i R"]:
    """Expected aligned error in Å: how far the CA of each residue (last axis) is from its true place, seen from the backbone
    frame of each row's residue (axis i). Any subset of the rows may be given."""
    centres = _centres(logits, max_error)
    return _by_rows(logits, lambda probabilities: (probabilities * centres).sum(-1))


def highest_pae(bins: int, max_error: float = MAX_ALIGNED_ERROR) -> float:
    """The largest error in Å that `compute_pae` can return: the last bin's centre."""
    return (bins - 0.5) * max_error / (bins - 2)


@torch.no_grad()
def compute_ptm(
    logits: Float[Tensor, "*b i R bins"],
    mask: Float[Tensor, "*b R"],
    max_error: float = MAX_ALIGNED_ERROR,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, "*b"]:
    """Predicted TM-score, 0 to 1 (supplement 1.9.7): the expected TM-score seen from a residue's frame, for the best residue.

    `mask` is 1 for the residues that count (at least one) and 0 for padding. The logits are this rank's rows, the mask is
    the whole chain's; every rank gets the same score. It is not differentiated.
    """
    rows = exchange.owned(mask.shape[-1])
    mask = mask.to(_wide(logits))
    expected = _expected_terms(logits, mask.sum(-1, keepdim=True), max_error)
    return exchange.max(_best_frames(expected, mask[..., None, :], mask[..., None, rows])).squeeze(-1)


@dataclass(frozen=True)
class ComplexConfidence:
    """Predicted TM-scores of a complex and of its parts, 0 to 1. All of one chain's are 0 but `ptm` and `chain_ptm`."""

    ptm: Float[Tensor, "*b"]
    """pTM of the whole complex (`compute_ptm`)."""
    iptm: Float[Tensor, "*b"]
    """ipTM: like pTM, over pairs of residues of different chains (Evans et al. 2021, AlphaFold-Multimer)."""
    actifptm: Float[Tensor, "*b"]
    """ipTM in which a pair weighs as much as its contact is probable, so that flexible tails do not count (actifpTM: Varga et
    al. 2025, Bioinformatics 41, btaf107)."""
    chain_ptm: Float[Tensor, "*b C"]
    """pTM of each chain as if it were alone: its own pairs, and d0 of its own length."""
    pair_iptm: Float[Tensor, "*b C C"]
    """ipTM of each two chains, symmetric; 0 on the diagonal. As in ColabFold, d0 is the whole complex's."""
    pair_actifptm: Float[Tensor, "*b C C"]
    """actifpTM of each two chains, symmetric; 0 on the diagonal."""

    @property
    def ranking_confidence(self) -> Float[Tensor, "*b"]:
        """Ranking confidence, 0 to 1 (`complex_ranking`)."""
        return complex_ranking(self.iptm, self.ptm)


def complex_ranking(iptm: Number, ptm: Number) -> Number:
    """Ranking confidence of AlphaFold-Multimer, 0 to 1: 0.8 ipTM + 0.2 pTM."""
    return 0.8 * iptm + 0.2 * ptm


@torch.no_grad()
def compute_complex_confidence(
    logits: Float[Tensor, "*b i R bins"],
    contacts: Float[Tensor, "*b i R"],
    mask: Float[Tensor, "*b R"],
    chains: Int[Tensor, "*b R"],
    number: int,
    max_error: float = MAX_ALIGNED_ERROR,
    exchange: Exchange = LocalExchange(),
) -> ComplexConfidence:
    """The predicted TM-scores of a complex, of its chains and of their pairs, from the aligned error's logits.

    `contacts`: of `compute_contact_weights`. `mask`: 1 for the residues that count and 0 for padding. `chains`: each residue's
    chain, of `number` chains. Logits and contacts are this rank's rows, all else is the whole complex's; every rank gets the
    same scores. They are not differentiated.

    Each score is the highest, over some frames, of a weighted mean over residues of the expected TM-score's terms. A score is 0
    where all weights are, as for a chain that is not there.
    """
    rows = exchange.owned(mask.shape[-1])
    mask = mask.to(_wide(logits))
    numbers = torch.arange(1, number + 1, device=chains.device)
    members = mask[..., None, :] * (chains[..., None, :] == numbers[:, None])  # [*b, C, R]
    everywhere, of_chain = mask[..., None, rows], members[..., rows]  # frames: [*b, 1, i], [*b, C, i]
    same = chains[..., rows, None] == chains[..., None, :]  # [*b, i, R]
    within, between = mask[..., None, :] * same, mask[..., None, :] * ~same
    touching = contacts.to(mask.dtype) * between

    lengths = (members * members.sum(-1, keepdim=True)).sum(-2)[..., rows]  # of each row's chain: [*b, i]
    alone = _best_frames(_expected_terms(logits, lengths, max_error), within, of_chain)
    expected = _expected_terms(logits, mask.sum(-1, keepdim=True), max_error)

    def whole(weight: Float[Tensor, "*b #i R"]) -> Float[Tensor, "*b"]:
        return exchange.max(_best_frames(expected, weight, everywhere)).squeeze(-1)

    def pairs(weight: Float[Tensor, "*b i R"]) -> Float[Tensor, "*b C C"]:
        best = [_best_frames(expected, weight * chain[..., None, :], of_chain) for chain in members.unbind(-2)]
        directed = exchange.max(torch.stack(best, -1))  # the first chain's frames, the second chain's residues
        return torch.maximum(directed, directed.mT)

    return ComplexConfidence(
        ptm=whole(mask[..., None, :]),
        iptm=whole(between),
        actifptm=whole(touching),
        chain_ptm=exchange.max(alone),
        pair_iptm=pairs(between),
        pair_actifptm=pairs(touching),
    )


def _expected_terms(
    logits: Float[Tensor, "*b i R bins"], residues: Float[Tensor, "*b #i"], max_error: float
) -> Float[Tensor, "*b i R"]:
    """Expected term of each residue (last axis) in the TM-score seen from each row's frame: 1 / (1 + (error / d0)²).

    `residues`: the number of residues that d0 is of, for each row or for all.
    """
    d0 = 1.24 * (residues.clamp(min=_SHORTEST_CHAIN) - 15) ** (1 / 3) - 1.8  # [*b, #i], Å
    terms = 1 / (1 + (_centres(logits, max_error) / d0[..., None]).square())  # [*b, #i, bins]
    terms = terms[..., None, :].expand(*logits.shape[:-2], 1, logits.shape[-1])
    return _by_rows(logits, lambda probabilities, of_rows: (probabilities * of_rows).sum(-1), terms)


def _best_frames(
    expected: Float[Tensor, "*b i R"], weight: Float[Tensor, "*b #i R"], frames: Float[Tensor, "*b f i"]
) -> Float[Tensor, "*b f"]:
    """The highest weighted mean over residues among this rank's rows, for each of f sets of rows (1 where a row belongs to it).

    It is 0 for a set without rows, and of rows that weigh nothing.
    """
    per_frame = (expected * weight).sum(-1) / (1e-8 + weight.sum(-1))  # [*b, i]
    return (per_frame[..., None, :] * frames).amax(-1)


def _nearest(logits: Float[Tensor, "*b i R bins"], near: int) -> Float[Tensor, "*b i R"]:
    """Total probability of the first `near` bins."""
    return _by_rows(logits, lambda probabilities: probabilities[..., :near].sum(-1))


def _edges(logits: Float[Tensor, "*b i R bins"], min_distance: float, max_distance: float) -> Float[Tensor, " bins-1"]:
    """The edges between the bins of a distogram, Å."""
    return torch.linspace(min_distance, max_distance, logits.shape[-1] - 1, dtype=torch.float64, device="cpu")


def _by_rows(
    logits: Float[Tensor, "*b i R bins"],
    of: Callable[..., Float[Tensor, "*b n R"]],
    *beside: Float[Tensor, "*b i 1 bins"],
) -> Float[Tensor, "*b i R"]:
    """`of` applied to the probabilities of the bins, in float32 or wider, and to the same rows of `beside`. A few rows are
    computed at a time: the probabilities of all pairs would be as large as the logits, and twice as large for logits in half
    precision.
    """
    wide = _wide(logits)
    pieces = zip(*(x.split(_ROWS, -3) for x in (logits, *beside)), strict=True)
    return torch.cat([of(rows.to(wide).softmax(-1), *others) for rows, *others in pieces], -2)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _centres(logits: Float[Tensor, "*b i R bins"], max_error: float) -> Float[Tensor, " bins"]:
    """The centres of the aligned error's bins in Å, in float32 or wider.

    `bins` - 1 edges divide 0 to `max_error` equally. The first bin lies below 0, so its centre is half a bin above; the last
    one is open.
    """
    bins, dtype = logits.shape[-1], _wide(logits)
    return (torch.arange(bins, dtype=dtype, device=logits.device) + 0.5) * (max_error / (bins - 2))

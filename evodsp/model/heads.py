"""Output heads (supplement 1.9.6 to 1.9.10).

A head names the representation that it `reads`: `msa` (on R), `pair_rows` (the pair representation on I), `single`, or
`structure` (the single representation after the structure module).

Shape legend: B batch, S clusters of the MSA, R residues. A small letter (i r) is this rank's shard of the residues: rows of the
pair, columns of the MSA. On one device it is all of them.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from evodsp.config import ChannelsConfig, HeadsConfig
from evodsp.model.precision import without_autocast
from evodsp.model.primitives import Budgeted, LayerNorm, Linear

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

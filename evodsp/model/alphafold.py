"""The whole model (algorithm 2): embedders, stacks, structure module, heads and recycling.

Shape legend: B batch, S clusters of the MSA, E extra sequences, R residues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.embedders import ExtraMSAEmbedder, InputEmbedder, RecyclingEmbedder
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.heads import (
    DistogramHead,
    ExperimentallyResolvedHead,
    MaskedMSAHead,
    PLDDTHead,
    PredictedAlignedErrorHead,
)
from evodsp.model.msa_ops import first_row
from evodsp.model.outputs import ModelOutput
from evodsp.model.primitives import Linear, ShardedModule
from evodsp.model.recycling import Recycled, settled, with_ca_change
from evodsp.model.structure_module import StructureModule
from evodsp.model.templates import TemplateEmbedder, Templates, TemplateTorsionEmbedder
from evodsp.rng import Draws

FEATURES = (
    "aatype", "residue_index", "seq_mask", "target_feat", "msa_feat", "msa_mask",
    "extra_msa", "extra_msa_mask", "extra_has_deletion", "extra_deletion_value",
)  # fmt: skip
TEMPLATE_FEATURES = (
    "template_aatype", "template_all_atom_positions", "template_all_atom_masks",
    "template_pseudo_beta", "template_pseudo_beta_mask", "template_mask",
)  # fmt: skip


class AlphaFold(ShardedModule):
    """AlphaFold2's monomer model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.channels
        self.input_embedder = InputEmbedder(channels, config.embedder)
        self.recycling_embedder = RecyclingEmbedder(channels, config.embedder)
        self.extra_msa_embedder = ExtraMSAEmbedder(channels)
        templates = config.templates
        self.features = (*FEATURES, *TEMPLATE_FEATURES) if templates.enabled else FEATURES
        self.template_embedder = TemplateEmbedder(channels.pair, templates) if templates.enabled else None
        torsions = templates.enabled and templates.torsions
        self.template_torsion_embedder = TemplateTorsionEmbedder(channels.msa) if torsions else None
        self.extra_msa_stack = EvoformerStack(channels.extra_msa, channels.pair, config.extra_msa, extra=True)
        self.evoformer = EvoformerStack(channels.msa, channels.pair, config.evoformer)
        self.single = Linear(channels.msa, channels.single)
        self.structure_module = StructureModule(channels.single, channels.pair, config.structure_module)
        self.distogram_head = DistogramHead(channels, config.heads)
        self.masked_msa_head = MaskedMSAHead(channels)
        self.plddt_head = PLDDTHead(channels, config.heads)
        heads = config.heads
        self.resolved_head = ExperimentallyResolvedHead(channels) if heads.experimentally_resolved else None
        self.pae_head = PredictedAlignedErrorHead(channels, heads) if heads.predicted_aligned_error else None

    def forward(
        self, batch: Mapping[str, Tensor], draws: Sequence[Draws] = (), ensembles: int = 1, stop_tolerance: float = 0.0
    ) -> ModelOutput:
        """Run every recycling iteration of `batch`; gradients flow through the last one only (algorithm 31).

        `batch`: processed features, axes [batch, cycle, …] (others are ignored). `draws`: one stream of dropout per sample,
        none for no dropout.

        `ensembles`: feature sets to a pass, whose representations are averaged (supplement 1.11.2; training takes one). The
        cycle axis then holds passes x ensembles sets, those of one pass side by side.

        `stop_tolerance`: for prediction; the passes end early once no sample's CA-CA distances change by more than this (root
        mean square, Å) from one to the next. 0 never ends them.

        Raises UserError if a feature is missing, ValueError if the cycle axis does not hold whole passes.
        """
        missing = [name for name in self.features if name not in batch]
        if missing:
            raise UserError(f"the batch lacks the features {', '.join(missing)}; build it with evodsp.data.dataset")
        sets = batch["aatype"].shape[1]
        if ensembles < 1 or sets % ensembles:
            raise ValueError(f"a cycle axis of {sets} feature sets does not hold passes of {ensembles}")
        last = sets // ensembles - 1
        recycled = self._first(batch)
        for cycle in range(last + 1):
            members = [
                {name: batch[name][:, entry] for name in self.features}
                for entry in range(cycle * ensembles, (cycle + 1) * ensembles)
            ]
            with torch.set_grad_enabled(torch.is_grad_enabled() and cycle == last):
                output = self.one_pass(members, recycled, [d.at("cycle", cycle) for d in draws])
            if stop_tolerance > 0 and cycle > 0:
                output = with_ca_change(output, recycled, members[0]["seq_mask"])
            if cycle == last or settled(output, stop_tolerance):
                break
            recycled = Recycled.of(output)
        return output

    def one_pass(
        self, members: Sequence[Mapping[str, Tensor]], recycled: Recycled, draws: Sequence[Draws] = ()
    ) -> ModelOutput:
        """One recycling iteration. `members`: one or more feature sets, axes [batch, …], of the same sequence."""
        first = members[0]
        msa, pair = self.representations(first, recycled, draws)
        row = first_row(msa)
        for number, member in enumerate(members[1:], start=1):
            m, z = self.representations(member, recycled, [d.at("ensemble", number) for d in draws])
            row, pair = row + first_row(m), pair + z
        if len(members) > 1:
            row, pair = row / len(members), pair / len(members)
        # AF2 averages the single representations; they are linear in the rows, so it is the same to average these.
        single = self.single(row)
        structure = self.structure_module(
            single, pair, first["aatype"], first["seq_mask"], [d.at("structure") for d in draws]
        )
        return ModelOutput(
            msa=msa,
            first_row=row,
            pair=pair,
            single=single,
            structure=structure,
            distogram_logits=self.distogram_head(pair),
            masked_msa_logits=self.masked_msa_head(msa),
            plddt_logits=self.plddt_head(structure.single),
            resolved_logits=None if self.resolved_head is None else self.resolved_head(single),
            pae_logits=None if self.pae_head is None else self.pae_head(pair),
        )

    def representations(
        self, features: Mapping[str, Tensor], recycled: Recycled, draws: Sequence[Draws] = ()
    ) -> tuple[Float[Tensor, "B S R c_m"], Float[Tensor, "B R R c_z"]]:
        """MSA and pair representation of one feature set: embedders and stacks (algorithm 2, lines 5 to 18)."""
        aatype, seq_mask, msa_mask = features["aatype"], features["seq_mask"], features["msa_mask"]
        pair_mask = seq_mask.unsqueeze(2) * seq_mask.unsqueeze(1)
        m, z = self.input_embedder(features["target_feat"], features["msa_feat"], features["residue_index"])
        row_update, pair_update = self.recycling_embedder(recycled.first_row, recycled.pair, recycled.positions, aatype)
        m = torch.cat([(m[:, 0] + row_update).unsqueeze(1), m[:, 1:]], 1)
        clusters = m.shape[1]
        templates = Templates.from_features(features) if self.template_embedder is not None else None
        if self.template_torsion_embedder is not None and templates is not None:
            rows, rows_mask = self.template_torsion_embedder(templates)
            m, msa_mask = torch.cat([m, rows], 1), torch.cat([msa_mask, rows_mask], 1)
        # Here one sample is spread over the ranks: from now on each works on its shard.
        m, z = self.exchange.shard(m, "seq"), self.exchange.shard(z + pair_update, "j")
        if self.template_embedder is not None and templates is not None:
            z = z + self.template_embedder(z, templates, pair_mask, [d.at("templates") for d in draws])
        extra = self.extra_msa_embedder(
            features["extra_msa"], features["extra_has_deletion"], features["extra_deletion_value"]
        )
        extra_mask = features["extra_msa_mask"]
        extra = self.exchange.shard(extra, "seq")
        _, z = self.extra_msa_stack(extra, z, extra_mask, pair_mask, [d.at("extra") for d in draws])
        m, z = self.evoformer(m, z, msa_mask, pair_mask, [d.at("evoformer") for d in draws])
        residues = aatype.shape[1]
        m, z = self.exchange.start_gather(m, "res", whole=residues), self.exchange.start_gather(z, "j", whole=residues)
        return m.wait()[:, :clusters], z.wait()

    def _first(self, batch: Mapping[str, Tensor]) -> Recycled:
        """The first pass recycles zeros; its embedder still adds biases, as AF2's does."""
        b, _, r, _ = batch["target_feat"].shape
        zeros = batch["target_feat"].new_zeros
        channels = self.config.channels
        return Recycled(zeros(b, r, channels.msa), zeros(b, r, r, channels.pair), zeros(b, r, 37, 3))

"""The whole model (algorithm 2): embedders, stacks, structure module, heads and recycling.

Shape legend: B batch, S clusters of the MSA, E extra sequences, R residues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.embedders import ExtraMSAEmbedder, InputEmbedder, RecyclingEmbedder
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.heads import make_heads
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
EXTRA_MSA_FEATURES = ("extra_msa", "extra_has_deletion", "extra_deletion_value")
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
        self.heads = nn.ModuleDict(make_heads(channels, config.heads))

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
        cycle = 0
        while True:
            members = [
                {name: batch[name][:, entry] for name in self.features}
                for entry in range(cycle * ensembles, (cycle + 1) * ensembles)
            ]
            # Before torch 2.11 weights that were cast in a pass without gradients stayed cast: the last pass gave them none.
            torch.clear_autocast_cache()
            with torch.set_grad_enabled(torch.is_grad_enabled() and cycle == last):
                output = self.one_pass(members, recycled, [d.at("cycle", cycle) for d in draws])
            if stop_tolerance > 0 and cycle > 0:
                output = with_ca_change(output, recycled, members[0]["seq_mask"], self.exchange)
            if cycle == last or settled(output, stop_tolerance):
                return output
            recycled, cycle = Recycled.of(output), cycle + 1
            del output  # its logits are as large as the pair representation: not to be kept beside the next pass

    def one_pass(
        self, members: Sequence[Mapping[str, Tensor]], recycled: Recycled, draws: Sequence[Draws] = ()
    ) -> ModelOutput:
        """One recycling iteration. `members`: one or more feature sets, axes [batch, …], of the same sequence."""
        first = members[0]
        residues = first["aatype"].shape[1]
        msa, pair = self.representations(first, recycled, draws)
        row = first_row(msa)
        for number, member in enumerate(members[1:], start=1):
            m, z = self.representations(member, recycled, [d.at("ensemble", number) for d in draws])
            row, pair = row + first_row(m), pair + z
        if len(members) > 1:
            row, pair = row / len(members), pair / len(members)
        rows = self.exchange.start_switch(pair, "j", "i", whole=residues)  # structure module and heads read z on I
        row = self.exchange.gather(row.unsqueeze(1), "res", whole=residues).squeeze(1)
        # AF2 averages the single representations; they are linear in the rows, so it is the same to average these.
        single, pair_rows = self.single(row), rows.wait()
        structure = self.structure_module(
            single, pair_rows, first["aatype"], first["seq_mask"], [d.at("structure") for d in draws]
        )
        representations = {"msa": msa, "first_row": row, "pair": pair, "single": single}
        readable = {**representations, "pair_rows": pair_rows, "structure": structure.single}
        logits = {name: head(readable[head.reads]) for name, head in self.heads.items()}  # type: ignore[index]
        return ModelOutput(representations, structure, logits)

    def representations(
        self, features: Mapping[str, Tensor], recycled: Recycled, draws: Sequence[Draws] = ()
    ) -> tuple[Float[Tensor, "B S r c_m"], Float[Tensor, "B R j c_z"]]:
        """MSA and pair representation of one feature set: embedders and stacks (algorithm 2, lines 5 to 18). m on R, z on J."""
        seq_mask = features["seq_mask"]
        pair_mask = seq_mask.unsqueeze(2) * seq_mask.unsqueeze(1)
        templates = Templates.from_features(features) if self.template_embedder is not None else None
        m, z, msa_mask = self._embedded(features, recycled, templates)
        if self.template_embedder is not None and templates is not None:
            z = z + self.template_embedder(z, templates, pair_mask, [d.at("templates") for d in draws])
        z = self._with_extra_msa(z, features, pair_mask, [d.at("extra") for d in draws])
        m, z = self.evoformer(m, z, msa_mask, pair_mask, [d.at("evoformer") for d in draws])
        return m[:, : features["msa_feat"].shape[1]], z

    def _embedded(
        self, features: Mapping[str, Tensor], recycled: Recycled, templates: Templates | None
    ) -> tuple[Float[Tensor, "B s R c_m"], Float[Tensor, "B R j c_z"], Float[Tensor, "B S R"]]:
        """The first MSA representation (clusters, then templates) on S, the first pair on J, and the whole MSA's mask."""
        row_update, pair_update = self.recycling_embedder(
            recycled.first_row, recycled.pair, recycled.positions, features["aatype"]
        )
        msa_feat, msa_mask = features["msa_feat"], features["msa_mask"]
        clusters = msa_feat.shape[1]
        template_rows = None
        if self.template_torsion_embedder is not None and templates is not None:
            template_rows, template_mask = self.template_torsion_embedder(templates)
            msa_mask = torch.cat([msa_mask, template_mask], 1)
        own = self.exchange.owned(msa_mask.shape[1])
        m, z = self.input_embedder(features["target_feat"], msa_feat[:, own], features["residue_index"])
        query = slice(0, int(own.start == 0 < own.stop))  # the query's row is on one rank only: elsewhere this is empty
        m = torch.cat([m[:, query] + row_update.unsqueeze(1)[:, query], m[:, query.stop :]], 1)
        if template_rows is not None:
            m = torch.cat([m, template_rows[:, max(own.start - clusters, 0) : max(own.stop - clusters, 0)]], 1)
        return m, z + pair_update, msa_mask

    def _with_extra_msa(
        self,
        z: Float[Tensor, "B R j c_z"],
        features: Mapping[str, Tensor],
        pair_mask: Float[Tensor, "B R R"],
        draws: Sequence[Draws],
    ) -> Float[Tensor, "B R j c_z"]:
        """z after the extra-MSA stack. By itself, so that what is large and of no more use is gone before the Evoformer."""
        extra = self.extra_msa_embedder(*(self.exchange.shard(features[name], "seq") for name in EXTRA_MSA_FEATURES))
        return self.extra_msa_stack(extra, z, features["extra_msa_mask"], pair_mask, draws)[1]

    def _first(self, batch: Mapping[str, Tensor]) -> Recycled:
        """The first pass recycles zeros; its embedder still adds biases, as AF2's does."""
        b, _, r, _ = batch["target_feat"].shape
        own = self.exchange.owned(r)
        zeros = batch["target_feat"].new_zeros
        channels = self.config.channels
        return Recycled(zeros(b, r, channels.msa), zeros(b, r, own.stop - own.start, channels.pair), zeros(b, r, 37, 3))

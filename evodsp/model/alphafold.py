"""The whole model (algorithm 2): embedders, stacks, structure module, heads and recycling, with early stopping as in
AlphaFold-Multimer.

`ModelConfig.arrangement` chooses the parts that differ between AlphaFold2 and AlphaFold-Multimer.

Shape legend: B batch, S clusters of the MSA, E extra sequences, R residues; j this rank's shard of the pair's columns; on
one device all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evodsp.config import (
    ArrangementName,
    EmbedderConfig,
    FeatureConfig,
    ModelConfig,
    TemplateConfig,
)
from evodsp.errors import UserError
from evodsp.geometry.frames import pseudo_beta
from evodsp.geometry.residues import CA, LETTERS_WITH_GAP, LETTERS_WITH_MASK, LETTERS_WITH_X
from evodsp.model.dropout import NO_DROPOUT, DropoutKeys, Streams, below
from evodsp.model.embedders import TARGET_CHANNELS, ExtraMSAEmbedder, InputEmbedder, RecyclingEmbedder, RelativePosition
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.graphs import Recordable
from evodsp.model.heads import ModelOutput, make_heads
from evodsp.model.layers import first_row
from evodsp.model.multimer import (
    ChainRelativePosition,
    ChainTemplateEmbedder,
    ChainTemplates,
    ChainTorsionEmbedder,
)
from evodsp.model.precision import activation_dtype
from evodsp.model.primitives import Budgeted, Linear, widest
from evodsp.model.structure_module import StructureModule
from evodsp.model.templates import TemplateEmbedder, Templates, TemplateTorsionEmbedder
from evodsp.parallel.exchange import Exchange, LocalExchange
from evodsp.rng import Draws

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
        masked_letters=LETTERS_WITH_GAP,
        passes_after_settling=1,
    ),
}


@dataclass(frozen=True)
class Recycled:
    """The results of a pass that the next one takes as inputs, without gradients. Positions are in Å."""

    first_row: Float[Tensor, "B R c_m"]
    pair: Float[Tensor, "B R j c_z"]
    positions: Float[Tensor, "B R 37 3"]

    @classmethod
    def of(cls, output: ModelOutput) -> Recycled:
        """The recycled results of a pass that was run without gradients."""
        return cls(output.representations["first_row"], output.representations["pair"], output.structure.positions)

    def copied(self) -> Recycled:
        """The same with a pair representation of its own."""
        return dataclasses.replace(self, pair=self.pair.clone())


def with_ca_change(
    output: ModelOutput, former: Recycled, seq_mask: Float[Tensor, "B R"], exchange: Exchange = LocalExchange()
) -> ModelOutput:
    """The output with `ca_change`: the change of its CA-CA distances since the previous pass.

    Every rank gets the same number. Otherwise rounding could make one rank stop while the others wait for it.
    """
    # Residues of unknown type have no CA atom; the position in its slot stays at the origin and must not count.
    mask = seq_mask * output.structure.mask[..., CA]
    change = ca_change(output.structure.positions[..., CA, :], former.positions[..., CA, :], mask)
    return dataclasses.replace(output, ca_change=exchange.max(change))


def ca_change(
    new: Float[Tensor, "B R 3"], old: Float[Tensor, "B R 3"], mask: Float[Tensor, "B R"]
) -> Float[Tensor, " B"]:
    """Root mean square change, in Å, of all CA-CA distances between residues whose `mask` is 1.

    Pairs of a residue with itself count too, as in AlphaFold-Multimer. No superposition is needed. 0 if no residue counts.
    """
    pairs = mask.unsqueeze(-1) * mask.unsqueeze(-2)
    difference = _distances(new) - _distances(old)
    return ((difference.square() * pairs).sum((-1, -2)) / pairs.sum((-1, -2)).clamp(min=1)).sqrt()


def settled(output: ModelOutput, tolerance: float) -> bool:
    """Whether every sample of the batch changed by at most `tolerance` in this pass. It is always False after the first pass.
    A settled pass is the result, as in ColabFold; AlphaFold-Multimer runs one more.
    """
    return output.ca_change is not None and bool((output.ca_change <= tolerance).all())


def _distances(points: Float[Tensor, "B R 3"]) -> Float[Tensor, "B R R"]:
    # The faster mode, which uses a matrix product, has errors above typical tolerances at the size of a protein.
    return torch.cdist(points.float(), points.float(), compute_mode="donot_use_mm_for_euclid_dist")


TORSIONS = "template_torsions"
"""Input of the embedder of the templates' torsion angles: a feature that the model makes itself, once for all passes."""
EXTRA_MSA_FEATURES = ("extra_msa", "extra_has_deletion", "extra_deletion_value")


class AlphaFold(Recordable, Budgeted):
    """The model of AlphaFold2 (algorithm 2) or of AlphaFold-Multimer. Its `graphs` replay whole passes; stacks then
    have none."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(
                f"AlphaFold takes a ModelConfig, but got {config!r}; ModelConfig.preset('model_1_ptm') makes one"
            )
        self.config = config
        self.trained_features: FeatureConfig | None = None
        """Feature sizes of the checkpoint from which the model was loaded."""
        channels, parts = config.channels, ARRANGEMENTS[config.arrangement]
        self.arrangement = parts
        self.input_embedder = InputEmbedder(channels, config.embedder, parts.target_channels, parts.relative_position)
        self.recycling_embedder = RecyclingEmbedder(channels, config.embedder)
        self.extra_msa_embedder = ExtraMSAEmbedder(channels)
        templates = config.templates
        self.features = (*parts.features, *(parts.template_features if templates.enabled else ()))
        self.template_embedder = parts.template_embedder(channels.pair, templates) if templates.enabled else None
        torsions = templates.enabled and templates.torsions
        self.template_torsion_embedder = parts.template_torsion_embedder(channels.msa) if torsions else None
        self.extra_msa_stack = EvoformerStack(
            channels.extra_msa, channels.pair, config.in_order(config.extra_msa), extra=True
        )
        self.evoformer = EvoformerStack(channels.msa, channels.pair, config.in_order(config.evoformer))
        self.single = Linear(channels.msa, channels.single)
        self.structure_module = StructureModule(channels.single, channels.pair, config.structure_module)
        self.heads = nn.ModuleDict(make_heads(channels, config.heads, parts.masked_letters))

    def forward(
        self,
        batch: Mapping[str, Tensor],
        draws: Sequence[Draws] = (),
        ensembles: int = 1,
        stop_tolerance: float = 0.0,
        ended: Callable[[ModelOutput], None] | None = None,
    ) -> ModelOutput:
        """Run every pass (recycling iteration) of `batch`. Gradients flow through the last pass only (algorithms 30 and 31).

        `batch`: processed features, axes [batch, cycle, …]; other entries are ignored. Its axis of templates may be empty. It
        may be on the host: the features of a pass are copied to the model's device when the pass begins.

        `draws`: one dropout stream per sample; none means no dropout.

        `ensembles`: number of feature sets per pass. Their representations are averaged (supplement 1.11.2); training uses one
        set. The cycle axis holds passes x ensembles sets, and the sets of a pass are neighbours.

        `stop_tolerance`: tolerance in Å for stopping early, in prediction. No further pass is run (multimer: one more)
        once the root mean square change of the CA-CA distances from one pass to the next is at most this in every sample. 0
        runs all passes.

        `ended`: called with the output of each pass when the host has launched it.

        Raises UserError if a feature is missing, ValueError if the cycle axis is not a whole number of passes.
        """
        missing = [name for name in self.features if name not in batch]
        if missing:
            raise UserError(
                f"the batch lacks the features {', '.join(missing)}; build it with evodsp.data.samples.dataset"
            )
        sets = batch["aatype"].shape[1]
        if ensembles < 1 or sets % ensembles:
            raise ValueError(f"a cycle axis of {sets} feature sets does not hold passes of {ensembles}")
        last = sets // ensembles - 1
        device = next(self.parameters()).device
        recycled: Recycled | None = None
        # Features that are the same in all sets, which `evodsp.features.batch` expands, and what follows from them.
        shared = {
            name: batch[name][:, 0].to(device) for name in self.features if sets > 1 and not batch[name].stride(1)
        }
        once = self.graphs is None or bool(self.graphs.given_up)  # a replay computes them without the host
        if once and self.template_torsion_embedder and set(self.arrangement.template_features) <= shared.keys():
            shared[TORSIONS] = self.template_torsion_embedder.features(self.arrangement.templates(shared))
        own = [name for name in self.features if name not in shared]
        cycle = 0
        while True:
            members = [
                {**shared, **{name: batch[name][:, entry].to(device) for name in own}}
                for entry in range(cycle * ensembles, (cycle + 1) * ensembles)
            ]
            if recycled is None:
                recycled = self.first_inputs(members[0])
            with torch.set_grad_enabled(torch.is_grad_enabled() and cycle == last):
                output = self._pass(members, recycled, self._dropout_keys(members, draws, cycle))
            if ended is not None:
                ended(output)
            if stop_tolerance > 0 and cycle > 0:
                output = with_ca_change(output, recycled, members[0]["seq_mask"], self.exchange)
            if settled(output, stop_tolerance):
                last = min(last, cycle + self.arrangement.passes_after_settling)
            if cycle == last:
                return output
            recycled, cycle = Recycled.of(output), cycle + 1
            # Logits are as large as the pair representation; free them, and the features, before the next pass.
            del output, members

    def dropout_streams(self, draws: Sequence[Draws], ensembles: int, templates: int) -> Streams:
        """The dropout streams of one pass. `draws`: the pass's stream for each sample.

        `ensembles`: number of feature sets; the first set draws from the same streams as without an ensemble. `templates`:
        number of templates of a sample.
        """
        streams = below(("structure",), self.structure_module.dropout_streams([d.at("structure") for d in draws]))
        for number in range(ensembles):
            own = [d.at("ensemble", number) for d in draws] if number else draws
            streams |= below(("ensemble", number) if number else (), self._representation_streams(own, templates))
        return streams

    def _representation_streams(self, draws: Sequence[Draws], templates: int) -> Streams:
        """The dropout streams of one feature set."""
        streams = below(("extra",), self.extra_msa_stack.dropout_streams([d.at("extra") for d in draws]))
        streams |= below(("evoformer",), self.evoformer.dropout_streams([d.at("evoformer") for d in draws]))
        if self.template_embedder is not None:
            own = self.template_embedder.dropout_streams([d.at("templates") for d in draws], templates)
            streams |= below(("templates",), own)
        return streams

    def _dropout_keys(self, members: Sequence[Mapping[str, Tensor]], draws: Sequence[Draws], cycle: int) -> DropoutKeys:
        """The dropout keys of one pass, sent to the device."""
        first = members[0]
        templates = first["template_aatype"].shape[1] if self.template_embedder is not None else 0
        streams = self.dropout_streams([d.at("cycle", cycle) for d in draws], len(members), templates)
        return DropoutKeys.of(streams, first["aatype"].device)

    def memory_limit(
        self, memory: int | None, number: int, residues: int, clusters: int, extra: int, templates: int = 0
    ) -> int | None:
        """The limit for `use_memory`: `memory` bytes, or None if no layer needs more than that to be computed whole.

        `number`: bytes of a number in layers. The others are the sizes of a sample.
        """
        if memory is None:
            return None
        pairs = residues**2 * max(widest(self), widest(self, "working_width_of_pairs"))
        rows: list[tuple[int, nn.Module]] = [(clusters + templates, self.evoformer), (extra, self.extra_msa_stack)]
        if self.template_embedder is not None:
            rows.append((templates * residues, self.template_embedder))
        needed = max(pairs, *(own * residues * widest(part) for own, part in rows))
        return memory if needed * number > memory else None

    def _pass(self, members: Sequence[Mapping[str, Tensor]], recycled: Recycled, keys: DropoutKeys) -> ModelOutput:
        """`one_pass`, replayed if passes are recorded."""
        if self.graphs is None:
            return self.one_pass(members, recycled, keys)
        names = list(members[0])

        def run(row: Tensor, pair: Tensor, positions: Tensor, keys: DropoutKeys, *features: Tensor) -> ModelOutput:
            left = iter(features)
            sets = [{name: next(left) for name in names} for _ in members]
            before = Recycled(row, pair, positions)
            # In place, a pass would overwrite the inputs of its recording.
            return self.one_pass(sets, before.copied() if self.budget.in_place else before, keys)

        features = [member[name] for member in members for name in names]
        inputs = [recycled.first_row, recycled.pair, recycled.positions, keys, *features]
        output: ModelOutput = self.graphs.call(self, run, inputs)
        return output

    def one_pass(
        self, members: Sequence[Mapping[str, Tensor]], recycled: Recycled, keys: DropoutKeys = NO_DROPOUT
    ) -> ModelOutput:
        """One recycling iteration. `members`: one or more feature sets, axes [batch, …], of the same sequence.

        `keys`: keys of the streams that `dropout_streams` names.
        """
        first = members[0]
        found = self.trunk(members, recycled, keys)
        whole = first["seq_mask"].unsqueeze(2).expand(-1, -1, first["aatype"].shape[1])  # the pair's sizes
        columns = self.sharded(found["pair"], "j", whole)
        rows = columns.switch("i")  # structure module and heads read z on I
        single, pair_rows = found["single"], rows.x
        structure = self.structure_module(single, pair_rows, first["aatype"], first["seq_mask"], keys.at("structure"))
        readable = {"msa": found["msa"], "pair_rows": pair_rows, "single": single, "structure": structure.single}
        logits = {name: head(readable[head.reads]) for name, head in self.heads.items()}  # type: ignore[index]
        if columns.switches_in_place:
            found["pair"] = rows.switch("j").x  # the next pass reads z on J
        return ModelOutput(found, structure, logits)

    def trunk(
        self, members: Sequence[Mapping[str, Tensor]], recycled: Recycled, keys: DropoutKeys = NO_DROPOUT
    ) -> dict[str, Tensor]:
        """The representations of `ModelOutput` in one recycling iteration, with the arguments of `one_pass`. `recycled` may be
        overwritten."""
        first = members[0]
        residues = first["aatype"].shape[1]
        # With a budget, a feature set's pair representation overwrites the recycled one, which only the last set may do.
        msa, pair = self.representations(first, recycled if len(members) == 1 else recycled.copied(), keys)
        row = first_row(msa)
        for number, member in enumerate(members[1:], start=1):
            m, z = self.representations(member, recycled.copied(), keys.at("ensemble", number))
            row, pair = row + first_row(m), pair + z
        if len(members) > 1:
            row, pair = row / len(members), pair / len(members)
        row = self.exchange.gather(row.unsqueeze(1), "res", whole=residues).squeeze(1)
        # AF2 averages the single representations. They are linear in the first rows, so averaging the rows is the same.
        return {"msa": msa, "first_row": row, "pair": pair, "single": self.single(row)}

    def representations(
        self, features: Mapping[str, Tensor], recycled: Recycled, keys: DropoutKeys = NO_DROPOUT
    ) -> tuple[Float[Tensor, "B S r c_m"], Float[Tensor, "B R j c_z"]]:
        """MSA and pair representation of one feature set (algorithm 2, lines 5 to 18). m on R, z on J."""
        seq_mask = features["seq_mask"]
        pair_mask = seq_mask.unsqueeze(2) * seq_mask.unsqueeze(1)
        templates = self.arrangement.templates(features) if self.template_embedder is not None else None
        z = self._initial_pair(features, recycled, pair_mask)
        if self.template_embedder is not None and features["template_aatype"].shape[1]:
            pair = self.sharded(z, "j", pair_mask)
            pair += self.template_embedder(pair, templates, keys.at("templates"))
            z = pair.x
        z = self._with_extra_msa(z, features, pair_mask, keys.at("extra"))
        m, msa_mask = self._initial_msa(features, recycled, templates)
        m, z = self.evoformer(m, z, msa_mask, pair_mask, keys.at("evoformer"))
        return m[:, : features["msa_feat"].shape[1]], z

    def _initial_pair(
        self, features: Mapping[str, Tensor], recycled: Recycled, pair_mask: Float[Tensor, "B R R"]
    ) -> Float[Tensor, "B R j c_z"]:
        """Initial pair representation on J. With a budget it overwrites the recycled one."""
        beta = pseudo_beta(features["aatype"], recycled.positions, None)

        def rows_of(rows: slice) -> Tensor:
            own = self.input_embedder.pair_representation(features, rows)
            return own + self.recycling_embedder.pair_update(recycled.pair[:, rows], beta, rows)

        # The intermediates are four sums of embeddings, the norm, and the binned distances.
        width = 6 * self.config.channels.pair + 3 * self.config.embedder.recycle_bins
        pieces = self.budget.pieces(recycled.pair, 1, pair_mask, width)
        into = recycled.pair if self.budget.in_place else None
        return pieces.collect(rows_of, into=into)

    def _initial_msa(
        self, features: Mapping[str, Tensor], recycled: Recycled, templates: Any
    ) -> tuple[Float[Tensor, "B s R c_m"], Float[Tensor, "B S R"]]:
        """Initial MSA representation on S (clusters, then template rows), and the mask of all its rows."""
        row_update = self.recycling_embedder.msa_norm(recycled.first_row)
        msa_feat, msa_mask = features["msa_feat"], features["msa_mask"]
        clusters = msa_feat.shape[1]
        template_rows = None
        if self.template_torsion_embedder is not None and templates is not None:
            torsions = features.get(TORSIONS)
            if torsions is None:
                torsions = self.template_torsion_embedder.features(templates)
            template_rows, template_mask = self.template_torsion_embedder(torsions)
            msa_mask = torch.cat([msa_mask, template_mask], 1)
        local = self.exchange.owned(msa_mask.shape[1])
        m = self.input_embedder.msa_representation(features["target_feat"], msa_feat[:, local])
        query = slice(0, int(local.start == 0 < local.stop))  # the query's row; empty on all ranks but the first
        m = torch.cat([m[:, query] + row_update.unsqueeze(1)[:, query], m[:, query.stop :]], 1)
        if template_rows is not None:
            m = torch.cat([m, template_rows[:, max(local.start - clusters, 0) : max(local.stop - clusters, 0)]], 1)
        return m, msa_mask

    def _with_extra_msa(
        self,
        z: Float[Tensor, "B R j c_z"],
        features: Mapping[str, Tensor],
        pair_mask: Float[Tensor, "B R R"],
        keys: DropoutKeys,
    ) -> Float[Tensor, "B R j c_z"]:
        """z after the extra-MSA stack. This is a separate method so that the extra MSA is freed before the Evoformer runs."""
        mask = features["extra_msa_mask"]
        own = [self.exchange.shard(features[name], "seq") for name in EXTRA_MSA_FEATURES]

        def rows_of(rows: slice) -> Tensor:
            return self.extra_msa_embedder(*(feature[:, rows] for feature in own))

        # The intermediates are one-hot letters as integers and as floats, these joined with deletions, and the embedding.
        width = 4 * LETTERS_WITH_MASK + self.config.channels.extra_msa
        pieces = self.budget.cut(own[0].shape[1], 1, mask, width * mask.element_size())
        return self.extra_msa_stack(pieces.collect(rows_of), z, mask, pair_mask, keys)[1]

    def first_inputs(self, features: Mapping[str, Tensor]) -> Recycled:
        """Input of the first pass: zeros. The recycling embedder still adds its biases, as AF2's does."""
        b, r, _ = features["target_feat"].shape
        local = self.exchange.owned(r)
        zeros, channels = features["target_feat"].new_zeros, self.config.channels
        dtype = activation_dtype(features["target_feat"])
        return Recycled(
            zeros(b, r, channels.msa, dtype=dtype),
            zeros(b, r, local.stop - local.start, channels.pair, dtype=dtype),
            zeros(b, r, 37, 3),
        )

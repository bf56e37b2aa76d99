"""Samples as AlphaFold-Multimer makes them: the chains of an assembly side by side; a single chain is one of one chain.

Where chains have copies, a sample also has the labels of all chains before the crop, `copies_<label>` [C, L, ...], because a
loss has to find out which copies a prediction means (`evodsp.losses.permutation`), and `copies_entity` [C], the number of each
chain's sequence. Otherwise they are empty.

Shapes: C chains in the order of the columns of the MSA, N residues of all of them, L residues of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from evodsp.data.complexes.merging import MergedMsa, merge
from evodsp.data.complexes.templates import side_by_side
from evodsp.data.samples.chain_record import (
    SCALAR_LABELS,
    Drawing,
    Sample,
    chain_labels,
    draw_templates,
    observed_atoms,
    sampled_rows,
)
from evodsp.data.samples.crop import complex_crop, contiguous_crop
from evodsp.data.samples.raw_features import complex_features
from evodsp.data.sources.parsed import Parsed
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.source import FoundTemplates
from evodsp.geometry.residues import CA, encode_sequence

COPIES = "copies_"
"""The beginning of the names of these entries, by which `evodsp.losses.permutation` knows them; it cannot be imported here."""


@dataclass(frozen=True)
class ComplexRecord:
    """The parsed data of a complex: its merged MSA, and the labels of all residues, chain after chain."""

    merged: MergedMsa
    lengths: tuple[int, ...]
    labels: dict[str, Tensor]
    copies: dict[str, Tensor] = field(repr=False)
    """The labels of all chains side by side, for samples; see above."""
    templates: Mapping[str, FoundTemplates] = field(default_factory=dict)
    """The templates of each sequence; empty without a source of templates."""

    max_rows: int | None = None
    """At most this many rows of the merged MSA are used, a new random sample of them each time; None: all."""

    @classmethod
    def of(
        cls,
        parsed: Parsed,
        templates: Mapping[str, FoundTemplates],
        assumed_resolution: float | None = None,
        max_rows: int | None = None,
    ) -> ComplexRecord:
        """The record of one or several chains. Other arguments: see `ChainRecord.of`."""
        merged = merge(parsed.chains)
        chains = [parsed.assembly.chains[place] for place in merged.order()]
        labels = [chain_labels(chain, encode_sequence(chain.sequence), assumed_resolution) for chain in chains]
        by_chain = {name: [own[name] for own in labels] for name in labels[0] if name not in SCALAR_LABELS}
        joined = {name: torch.cat(own) for name, own in by_chain.items()}
        entity = torch.tensor(
            [number for number, one in enumerate(merged.entities, 1) for _ in one.members], dtype=torch.int32
        )
        copies = {name: pad_sequence(own, batch_first=True) for name, own in by_chain.items()}
        for name, exists in (("frames", copies["rigidgroups_gt_exists"]), ("atoms", observed_atoms(copies))):
            seen = in_any_copy(exists, entity)
            joined[f"{name}_of_any_copy"] = torch.cat(
                [own[: len(chain)] for own, chain in zip(seen, chains, strict=True)]
            )
        if len(merged.entities) == len(chains):  # no copies, nothing to choose
            entity, copies = entity[:0], {name: label[:0, :0] for name, label in copies.items()}
        named = {f"{COPIES}{name}": label for name, label in copies.items()} | {f"{COPIES}entity": entity}
        scalars = {"resolution": labels[0]["resolution"]}
        return cls(merged, tuple(map(len, chains)), joined | scalars, named, templates, max_rows)

    @property
    def nbytes(self) -> int:
        msa = self.merged.msa.nbytes + self.merged.deletions.nbytes + self.merged.block.nbytes
        templates = sum(found.features.nbytes for found in self.templates.values())
        return msa + sum(label.nbytes for label in (*self.labels.values(), *self.copies.values())) + templates

    def sample(self, drawing: Drawing) -> Sample:
        """A random crop, half of the time around an interface; in validation pieces of all chains, the same in every epoch."""
        config, draws = drawing.config, drawing.draws
        crop = contiguous_crop(self.lengths, config.crop_size or sum(self.lengths), draws)
        if drawing.training:
            positions, mask = (self.labels[f"all_atom_{name}"][:, CA].numpy() for name in ("positions", "mask"))
            crop = complex_crop(self.lengths, positions, mask, config.crop_size, draws, config.spatial_crop_fraction)
        merged = self.merged
        if (rows := sampled_rows(len(merged.msa), self.max_rows, draws)) is not None:
            merged = merged.of_rows(rows)
        features = complex_features(merged, config, draws, drawing.cycles, crop, self._templates(drawing))
        copies = {name: values.clone() for name, values in self.copies.items()}  # the record is cached
        return drawing.sample_of(features, self.labels, crop) | copies

    def _templates(self, drawing: Drawing) -> TemplateFeatures | None:
        """The templates of a sample: of each sequence the best, in training random ones, the same for all of its chains."""
        if not self.templates:
            return None
        most, chosen = drawing.config.max_templates, {}
        for number, entity in enumerate(self.merged.entities):
            found, draws = self.templates[entity.letters].features, drawing.draws.at("entity", number)
            taken = draw_templates(found, most, draws) if drawing.training else found.select(slice(most))
            chosen[entity.letters] = taken
        return side_by_side(self.merged.entities, chosen)


def in_any_copy(exists: Float[Tensor, "C L k"], entity: Int32[Tensor, " C"]) -> Float[Tensor, "C L k"]:
    """1 where any chain of the same sequence has the part, else 0."""
    same = (entity[:, None] == entity).to(exists.dtype)
    return ((same @ exists.flatten(1)) > 0).view(exists.shape).to(exists.dtype)

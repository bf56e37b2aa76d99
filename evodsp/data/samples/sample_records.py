"""Records of samples: of a single chain as AlphaFold2 makes them, and of the chains of an assembly side by side, as
AlphaFold-Multimer does.

A record is parsed once and cached. Each of its samples is a random crop with random templates; the device makes the features
of the MSA from it (`raw_features`). The other features (`raw_features.FEATURE_AXES`) have a leading axis of 1 for the
recycling iterations, labels (`geometry.frames.structure_labels`, in Å) have the residue axis first.

Shapes: L residues of the chain.

Where chains have copies, a sample also has the labels of all chains before the crop, `copies_<label>` [C, L, ...], because a
loss has to find out which copies a prediction means (`evodsp.losses.permutation`), and `copies_entity` [C], the number of
each chain's sequence. Otherwise they are empty.

Shapes: C chains in the order of the columns of the MSA, N residues of all of them, L residues of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import MergedMsa, merge, side_by_side
from evodsp.data.records import Chain
from evodsp.data.samples.raw_features import (
    FEATURE_AXES,
    Crop,
    centre_crop,
    complex_crop,
    complex_features,
    contiguous_crop,
    raw_features,
    training_crop,
)
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.sources.parsed import Parsed
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.source import FoundTemplates
from evodsp.errors import UserError
from evodsp.geometry.frames import structure_labels
from evodsp.geometry.residues import CA, encode_sequence
from evodsp.rng import Draws

Sample = dict[str, Tensor]

SCALAR_LABELS = ("resolution", "use_clamped_fape")
"""Labels without a residue axis."""


@dataclass(frozen=True)
class Drawing:
    """Recipe that makes a sample of a record: its random stream, its recycling iterations, and whether it is for training."""

    config: FeatureConfig
    draws: Draws
    cycles: int
    training: bool

    @property
    def is_clamped(self) -> bool:
        """Whether backbone FAPE is clamped. Not in validation: a clamped error hides how far a prediction is off."""
        return self.training and bool(self.draws.at("clamp").uniform(1)[0] < self.config.clamp_fape_fraction)

    def sample_of(self, features: Mapping[str, np.ndarray], labels: dict[str, Tensor], crop: Crop) -> Sample:
        """Features that are cropped already, and the labels of the crop, padded with zeros to the crop size. Labels are copied:
        those of a record, which is cached, must not change with the sample."""
        sample = {name: torch.from_numpy(values) for name, values in features.items()}
        for name, label in labels.items():
            if name in SCALAR_LABELS:
                sample[name] = label.clone()
                continue
            sample[name] = label.new_zeros(self.config.crop_size or len(crop), *label.shape[1:])
            sample[name][: len(crop)] = label[crop.index]
        return sample | {"use_clamped_fape": torch.tensor(float(self.is_clamped))}


@dataclass(frozen=True)
class ChainRecord:
    """The parsed data of a chain: features before sampling, labels of the whole chain.

    `max_rows`: at most this many rows of the MSA are used, a new random sample of them each time; None: all.
    """

    aatype: Int32[np.ndarray, " L"]
    msa: MsaFeatures
    labels: dict[str, Tensor]
    templates: FoundTemplates | None = None
    max_rows: int | None = None

    @classmethod
    def of(
        cls,
        parsed: Parsed,
        templates: Mapping[str, FoundTemplates],
        assumed_resolution: float | None = None,
        max_rows: int | None = None,
    ) -> ChainRecord:
        """The record of a single chain. `templates`: by its sequence; empty without a source of templates.

        `assumed_resolution`: the resolution in Å that a structure without one is given; None gives 0, which the losses of the
        confidence heads do not count. Raises UserError for several chains.
        """
        if len(parsed.chains) > 1:
            raise UserError(f"{parsed.assembly.pdb_id}: {len(parsed.chains)} chains, but a sample of a monomer has one")
        (chain,), (own,) = parsed.assembly.chains, parsed.chains
        aatype = encode_sequence(chain.sequence)
        labels = chain_labels(chain, aatype, assumed_resolution)
        return cls(aatype, own.msa, labels, templates.get(chain.sequence), max_rows)

    @property
    def nbytes(self) -> int:
        templates = 0 if self.templates is None else self.templates.features.nbytes
        return self.msa.nbytes + sum(label.nbytes for label in self.labels.values()) + templates

    def sample(self, drawing: Drawing) -> Sample:
        """A random crop of the chain with random templates in training; otherwise its middle, and the best templates."""
        config, draws, msa = drawing.config, drawing.draws, self.msa
        if (rows := sampled_rows(msa.num_alignments, self.max_rows, draws)) is not None:
            msa = MsaFeatures(msa.msa[rows], msa.deletions[rows], msa.profile)  # the profile stays that of all rows
        crop = centre_crop(len(self.aatype), config.crop_size)
        if drawing.training:
            crop = training_crop(len(self.aatype), config.crop_size, drawing.is_clamped, draws)
        templates = None if self.templates is None else self.templates.features
        if templates is not None and drawing.training:
            templates = draw_templates(templates, config.max_templates, draws)
        features = raw_features(self.aatype, msa, config, draws, drawing.cycles, crop, templates)
        return drawing.sample_of(features, self.labels, crop)


def sampled_rows(rows: int, most: int | None, draws: Draws) -> Int64[np.ndarray, " n"] | None:
    """The query and a random sample of the other rows, `most` in all; None where there are no more, or without a limit."""
    if most is None or rows <= most:
        return None
    return np.concatenate([[0], 1 + np.sort(draws.at("distillation_rows").permutation(rows - 1)[: most - 1])])


def chain_labels(
    chain: Chain, aatype: Int32[np.ndarray, " L"], assumed_resolution: float | None = None
) -> dict[str, Tensor]:
    """Labels of a whole chain under AF2's names, float32 (Å) and int32.

    A chain without a resolution has the assumed one, or 0.
    """
    positions, mask = torch.from_numpy(chain.positions), torch.from_numpy(chain.mask)
    labels = structure_labels(torch.from_numpy(aatype), positions, mask)
    resolution = torch.tensor(chain.resolution or assumed_resolution or 0.0)
    labels |= {"all_atom_positions": positions, "all_atom_mask": mask, "resolution": resolution}
    # `atom14_atom_exists` is a feature too; the label would overwrite it.
    return {name: _narrow(label) for name, label in labels.items() if name not in FEATURE_AXES}


def _narrow(values: Tensor) -> Tensor:
    return values.to(torch.float32 if values.is_floating_point() else torch.int32)


def draw_templates(templates: TemplateFeatures, most: int, draws: Draws) -> TemplateFeatures:
    """The templates of a training sample: min(k, `most`) of the n, in random order, with k uniform in 0..n (supplement 1.2.3).

    The model thus sees bad templates, or none, and cannot rely on copying the best one.
    """
    number = min(draws.at("template_number").integer(0, len(templates) + 1), most)
    return templates.select(draws.at("template_order").permutation(len(templates))[:number])


def observed_atoms(labels: Mapping[str, Tensor]) -> Tensor:
    """Above 0 for the atoms14 that are resolved under either naming."""
    return labels["atom14_gt_exists"] + labels["atom14_alt_gt_exists"]


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

"""What samples are made of, and the samples of a single chain, as AlphaFold2 makes them.

A record is parsed once and cached. Each of its samples is a random crop with random templates; the device makes the features of
the MSA from it (`raw_features`). The other features (`feature_axes.FEATURE_AXES`) have a leading axis of 1 for the recycling
iterations, labels (`geometry.frames.structure_labels`, in Å) have the residue axis first.

Shapes: L residues of the chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.data.records import Chain
from evodsp.data.samples.crop import Crop, centre_crop, training_crop
from evodsp.data.samples.feature_axes import FEATURE_AXES
from evodsp.data.samples.raw_features import raw_features
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.sources.parsed import Parsed
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.source import FoundTemplates
from evodsp.errors import UserError
from evodsp.geometry.frames import structure_labels
from evodsp.geometry.residues import encode_sequence
from evodsp.rng import Draws

Sample = dict[str, Tensor]

SCALAR_LABELS = ("resolution", "use_clamped_fape")
"""Labels without a residue axis."""


@dataclass(frozen=True)
class Drawing:
    """How a sample is made of a record: its random stream, its recycling iterations, and whether it is for training."""

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

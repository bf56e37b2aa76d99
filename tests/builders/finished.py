"""Samples with their features, as the model gets them."""

from __future__ import annotations

import numpy as np
import torch

from evodsp.config import FeatureConfig
from evodsp.data.samples.dataset import Sample, collate, existing_entries
from evodsp.data.samples.raw_features import Crop, piece, raw_features
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.templates.features import TemplateFeatures
from evodsp.features.batch import with_features
from evodsp.rng import Draws


def made(
    aatype: np.ndarray,
    msa: MsaFeatures,
    config: FeatureConfig,
    draws: Draws,
    cycles: int,
    crop: Crop | None = None,
    templates: TemplateFeatures | None = None,
) -> dict[str, np.ndarray]:
    """The features of one sample. They have the sizes of the data if `config` has no `crop_size`. `crop`: None for all."""
    raw = raw_features(aatype, msa, config, draws, cycles, crop or piece(0, len(aatype)), templates)
    batch = with_features(collate([{name: torch.from_numpy(values) for name, values in raw.items()}]), config)
    return {name: values[0].numpy() for name, values in batch.items()}


def finished(sample: Sample, config: FeatureConfig) -> Sample:
    """One sample of a `SampleDataset` as `evodsp.features` finishes it, without the batch axis and the lists for the losses."""
    raw = collate([sample])
    lists = existing_entries(raw)
    return {name: values[0] for name, values in with_features(raw, config).items() if name not in lists}

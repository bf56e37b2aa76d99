"""Training samples with their features, as the model gets them."""

from __future__ import annotations

from evodsp.config import FeatureConfig
from evodsp.data.dataset import Sample, collate, existing_entries
from evodsp.features.batch import with_features


def finished(sample: Sample, config: FeatureConfig) -> Sample:
    """One sample of a `ChainDataset` as `evodsp.features` finishes it, without the batch axis and the lists for the losses."""
    raw = collate([sample])
    lists = existing_entries(raw)
    return {name: values[0] for name, values in with_features(raw, config).items() if name not in lists}

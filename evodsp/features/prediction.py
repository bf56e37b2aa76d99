"""The features of a chain, or of a complex, whose structure is to be predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import MergedMsa
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.samples.crop import piece
from evodsp.data.samples.dataset import Sample, collate
from evodsp.data.samples.feature_axes import TEMPLATE_AXES
from evodsp.data.samples.raw_features import complex_features, raw_features
from evodsp.data.sources.msa import msa_of
from evodsp.data.sources.query_check import check_alignments
from evodsp.data.templates.features import TemplateFeatures
from evodsp.features.batch import with_features
from evodsp.geometry.residues import encode_sequence
from evodsp.rng import Draws


def prediction_sample(
    query: ProteinSequence,
    alignments: list[Alignment],
    config: FeatureConfig,
    seed: int,
    templates: TemplateFeatures | None = None,
    ensembles: int = 1,
) -> Sample:
    """Features of the whole chain `query` for prediction; `crop_size` is ignored.

    The leading axis has `ensembles` independently drawn feature sets for each of the `recycles` + 1 iterations; the sets of
    one iteration are adjacent. `templates`: the templates, best first; the first `max_templates` are taken. There may be
    fewer, or none: the masked ones that fill up a sample of training would change nothing here, but cost as much as real
    ones. Without alignments the MSA is the query alone.
    Raises UserError if the first row of an alignment is not the query.
    """
    aatype = encode_sequence(query.letters)
    check_alignments(alignments, query)
    msa = msa_of(alignments, query)
    sets = (config.recycles + 1) * ensembles
    whole = replace(config, crop_size=None)
    raw = raw_features(aatype, msa, whole, _draws(seed), sets, piece(0, len(aatype)), templates)
    features = _features(raw, whole)
    found = 0 if templates is None else len(templates.names)
    return {name: values[0, :, :found] if name in TEMPLATE_AXES else values[0] for name, values in features.items()}


def complex_sample(
    merged: MergedMsa,
    config: FeatureConfig,
    seed: int,
    templates: TemplateFeatures | None = None,
    ensembles: int = 1,
) -> Sample:
    """Features of a whole complex for prediction, as `prediction_sample` makes those of a chain.

    There are always `max_templates` templates, the last ones absent: AlphaFold-Multimer's model takes the mean over its
    templates, and has no mask of them.
    """
    sets, whole = (config.recycles + 1) * ensembles, replace(config, crop_size=None)
    raw = complex_features(merged, whole, _draws(seed), sets, piece(0, merged.msa.shape[1]), templates)
    return {name: values[0] for name, values in _features(raw, whole).items()}


def _draws(seed: int) -> Draws:
    return Draws.root(seed).at("prediction")


def _features(raw: dict[str, np.ndarray], config: FeatureConfig) -> Sample:
    """The features of a batch with one sample."""
    return with_features(collate([{name: torch.from_numpy(values) for name, values in raw.items()}]), config)

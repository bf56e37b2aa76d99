"""The features of a chain whose structure is to be predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from evodsp.config import FeatureConfig
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.samples.crop import piece
from evodsp.data.samples.dataset import Sample, collate
from evodsp.data.samples.feature_axes import TEMPLATE_AXES
from evodsp.data.samples.raw_features import raw_features
from evodsp.data.sources.msa import merge_alignments, query_only
from evodsp.data.sources.query_check import check_alignments
from evodsp.data.templates.features import TemplateFeatures
from evodsp.features.batch import with_features
from evodsp.geometry.alphabet import encode_sequence
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
    if alignments:
        check_alignments(alignments, query)
        msa = merge_alignments(alignments)
    else:
        msa = query_only(aatype.astype(np.int8))
    sets = (config.recycles + 1) * ensembles
    whole, draws = replace(config, crop_size=None), Draws.root(seed).at("prediction")
    raw = raw_features(aatype, msa, whole, draws, sets, piece(0, len(aatype)), templates)
    features = with_features(collate([{name: torch.from_numpy(values) for name, values in raw.items()}]), whole)
    found = 0 if templates is None else len(templates.names)
    return {name: values[0, :, :found] if name in TEMPLATE_AXES else values[0] for name, values in features.items()}

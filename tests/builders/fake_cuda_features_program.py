"""Makes the MSA features of one sample on tensors that say they are on a GPU; returns its `Pass` (see `fake_cuda.py`)."""

from __future__ import annotations

# isort: off
import guard  # noqa: F401  (of ../shared/fake_cuda: before torch)

# isort: on

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from evodsp.config import FeatureConfig
from evodsp.data.samples.dataset import collate
from evodsp.data.samples.raw_features import HOST, piece, raw_features
from evodsp.data.sources.msa import MsaFeatures, letter_profile
from evodsp.features.batch import with_features
from evodsp.rng import Draws
from tests.builders.fake_cuda_program import Counter


def run(rows: int, columns: int, crop: int, cycles: int, clusters: int, extra: int) -> dict[str, object]:
    """The fields of `Pass`, for an MSA whose rows differ in the block that is deleted."""
    config = FeatureConfig(crop_size=crop, msa_clusters=clusters, extra_msa=extra, block_delete=True)
    generator = np.random.default_rng(0)
    letters = generator.integers(0, 20, (rows, columns)).astype(np.int8)
    deletions = (generator.random(letters.shape) < 0.01).astype(np.int32)
    msa = MsaFeatures(letters, deletions, letter_profile(letters))
    sample = raw_features(letters[0].astype(np.int32), msa, config, Draws.root(0), cycles, piece(0, crop))
    batch = collate([{name: torch.from_numpy(values) for name, values in sample.items()}])
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_device = {
            name: values if name in HOST else torch.empty(values.shape, dtype=values.dtype, device="cuda")
            for name, values in batch.items()
        }
        # No parameter is as large as this one, so nothing counts as a cast of parameters.
        with Counter([torch.empty(1 << 40, device="meta")]) as counter:
            with_features(on_device, config)
    return counter.summary()

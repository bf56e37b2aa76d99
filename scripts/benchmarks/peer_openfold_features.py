"""OpenFold as a peer of `msa_features.py`: the MSA features of four recycling iterations.

    OPENFOLD_SOURCE=<clone> .venv-openfold/bin/python -m scripts.benchmarks.peer_openfold_features

`msa_features.py` starts it. It runs OpenFold's transforms in the order of OpenFold's pipeline, up to `msa_feat`; padding and
cropping are left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np
import torch

from scripts.benchmarks.peer_side import serve
from scripts.parity.openfold_side import SOURCE, hide_deepspeed, replace_kernel

CYCLES = 4


def prepare(case: str, clusters: int, extra: int) -> Callable[[], None]:
    """`case`: an .npz file with `msa` and `deletions` [N, L]."""
    from openfold.config import model_config  # type: ignore[import-not-found]
    from openfold.data import data_transforms as transforms  # type: ignore[import-not-found]

    config = model_config("model_1_ptm").data.common
    arrays = np.load(case)
    msa = torch.from_numpy(arrays["msa"]).long()
    fixed = {
        "aatype": msa[0],
        "between_segment_residues": torch.zeros_like(msa[0]),
        "msa": msa,
        "deletion_matrix": torch.from_numpy(arrays["deletions"]).float(),
    }
    fixed = transforms.make_hhblits_profile(transforms.make_msa_mask(transforms.make_seq_mask(fixed)))
    steps = [
        transforms.sample_msa(clusters, keep_extra=True),
        transforms.make_masked_msa(config.masked_msa, 0.15),
        transforms.nearest_neighbor_clusters(),
        transforms.summarize_clusters(),
        transforms.crop_extra_msa(extra),
        transforms.make_msa_feat(),
    ]

    def run() -> None:
        for _ in range(CYCLES):
            features = dict(fixed)
            for step in steps:
                features = step(features)

    return run


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if source := os.environ.get(SOURCE):
        sys.path.insert(0, source)
    replace_kernel()
    hide_deepspeed()
    sys.exit(serve(prepare))

"""Compare the confidence of a complex live with DeepMind's code and, where it is installed there, ColabFold's.

    .venv/bin/python -m scripts.parity.confidence --alphafold .venv-parity/bin/python [--seed 0]

Both sides get the same random logits of three chains and of padding. ColabFold's package has what DeepMind's lacks: the scores
of pairs of chains, and actifpTM. `pip install --no-deps --target FOLDER colabfold==1.6.3` installs it, and PYTHONPATH=FOLDER
lets the other side find it. The exit code is 1 if a difference is larger than allowed, and 2 if the other side could not run.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch

from evodsp.config import HeadsConfig
from evodsp.model.heads import compute_complex_confidence, compute_contact_weights

from . import table
from .compare import deepminds_side, program

LENGTHS = 70, 45, 12
PADDING = 5
ALLOWED = 1e-5
"""Largest difference of a score, 0 to 1."""


def draw(seed: int) -> dict[str, np.ndarray]:
    """Logits that favour low errors in some blocks and contacts of some residues; noise in padding."""
    rng = np.random.default_rng(seed)
    chains = np.repeat([*range(1, len(LENGTHS) + 1), 0], [*LENGTHS, PADDING])
    size, heads = len(chains), HeadsConfig()
    logits, distogram = 2 * rng.standard_normal((2, size, size, 64), np.float32)
    logits[..., :10] += 3 * rng.random((size, size, 1), np.float32)
    distogram[..., 40:] += 4 * rng.random((size, size, 1), np.float32)
    return {
        "logits": logits,
        "distogram": distogram,
        "chains": chains.astype(np.int32),
        "mask": (chains > 0).astype(np.float32),
        "breaks": np.linspace(0, heads.pae_max_error, heads.pae_bins - 1, dtype=np.float32),
    }


def ours_of(subject: dict[str, np.ndarray]) -> table.Arrays:
    logits, distogram, mask, chains = (
        torch.from_numpy(subject[name]) for name in ("logits", "distogram", "mask", "chains")
    )
    heads = HeadsConfig()
    contacts = compute_contact_weights(distogram, heads.distogram_min_distance, heads.distogram_max_distance)
    found = compute_complex_confidence(logits, contacts, mask, chains, len(LENGTHS), heads.pae_max_error)
    return {
        **{name: value.numpy() for name, value in vars(found).items()},
        "ranking_confidence": found.ranking_confidence.numpy(),
    }


def run(options: argparse.Namespace) -> bool:
    subject = draw(options.seed)
    theirs = deepminds_side(options.alphafold, "alphafold_confidence_side", subject)
    ours = ours_of(subject)
    rows = [
        table.Row(name, float(np.abs(ours[name] - value).max()), ALLOWED, f"of at most {value.max():.4f}")
        for name, value in theirs.items()
    ]
    print(table.text(rows))
    return all(row.passed for row in rows)


def main(arguments: list[str] | None = None) -> int:
    return program(run, "Compare the confidence of a complex live with DeepMind's JAX code.", "the logits", arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Compare the MSA features of complexes live with DeepMind's code of AlphaFold-Multimer: all that happens before each pass.

    .venv/bin/python -m scripts.parity.complex_msas --alphafold .venv-parity/bin/python [--seed 0]

Both sides get the same merged MSAs (`pairing.py` compares the merging) and the same draws: evodsp's. Rows, masks and letters
must be equal; profiles and deletions of the clusters, and the probabilities of hidden letters, nearly so. The exit code is 1
if a difference is larger than allowed, and 2 if the other side could not run.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int8

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import MergedMsa, merge
from evodsp.data.samples.dataset import collate
from evodsp.data.samples.raw_features import complex_features, piece
from evodsp.data.sources.msa import letter_profile
from evodsp.features.batch import draw, with_features
from evodsp.features.clusters import mask_letters
from evodsp.geometry.residues import LETTERS_WITH_MASK
from evodsp.rng import Draws

from . import pairing
from .compare import deepminds_side, program
from .data import Results, compare
from .table import text

NAMES = "two chains", "A, B, B", "A, A", "one chain", "no shared species", "chains regrouped"
"""The cases of `pairing.CASES` whose features are compared."""
SIZES = {"": (24, 40), ", all rows are clusters": (508, 2048)}
"""Clusters and extra rows. With the second, DeepMind's code pads the MSA with rows of masked letters."""
PADDING = 4
"""DeepMind's code pads an MSA to this number of rows more than there are clusters."""
PASSES = 2
STEPS = 1 << 12
"""Numbers at which the distribution of a hidden letter is read."""
ALLOWED = {
    "msa_feat": 2e-6,  # sums over clusters in float32
    "extra_deletion_value": 1e-6,
    "probabilities": 2 / STEPS,
}
COMPARED = (
    "msa_feat", "msa_mask", "bert_mask", "true_msa", "extra_msa", "extra_has_deletion", "extra_deletion_value",
    "extra_msa_mask",
)  # fmt: skip


def probabilities_of(
    rows: Int8[np.ndarray, "S R"], profile: np.ndarray, config: FeatureConfig
) -> Float64[np.ndarray, "S R 23"]:
    """How often each letter is drawn for each cell, over a grid of uniform numbers."""
    letter = torch.from_numpy((np.arange(STEPS) + 0.5) / STEPS)
    counts = np.zeros((*rows.shape, LETTERS_WITH_MASK))
    for row, letters in enumerate(rows):
        same = torch.from_numpy(letters).expand(STEPS, -1)
        numbers = letter[:, None].expand(-1, len(letters))
        drawn, _ = mask_letters(
            same, torch.from_numpy(profile), torch.zeros_like(numbers), numbers.contiguous(), config
        )
        for column in range(len(letters)):
            counts[row, column] = np.bincount(drawn[:, column].numpy(), minlength=LETTERS_WITH_MASK)
    return counts / STEPS


@dataclass(frozen=True)
class Case:
    """The MSA of a complex, and the sizes of its features."""

    name: str
    merged: MergedMsa
    clusters: int
    extra: int

    def compared(self, seed: int) -> tuple[Results, Results, list[dict[str, Any]]]:
        """evodsp's features of each pass; what DeepMind's side gets: the MSA and what is drawn; the passes with their sizes."""
        rows, length = self.merged.msa.shape
        config = FeatureConfig(crop_size=length, msa_clusters=self.clusters, extra_msa=self.extra)
        made = complex_features(self.merged, config, Draws.root(seed), PASSES, piece(0, length))
        batch = collate([{key: torch.from_numpy(value) for key, value in made.items()}])
        features = {key: value[0].numpy() for key, value in with_features(batch, config).items()}
        centres, padded = min(self.clusters, rows), self.clusters + PADDING
        drawn = draw(batch["msa_keys"][0], batch["msa_kept"].view(PASSES, rows), centres, length)
        shown = min(self.extra, max(rows, padded) - self.clusters)
        ours: Results = {}
        subject: Results = {}
        passes = [f"{self.name}, pass {cycle + 1}" for cycle in range(PASSES)]
        for cycle, name in enumerate(passes):
            own = {key: features[key][cycle] for key in COMPARED}
            own |= {key: value[:shown] for key, value in own.items() if key.startswith("extra_")}
            true = own["true_msa"][:centres].astype(np.int8)
            own["probabilities"] = probabilities_of(true, letter_profile(self.merged.msa), config)
            own["rows that come first"] = np.arange(len(self.merged.msa)) == 0
            ours |= {f"{key}|{name}": value for key, value in own.items()}
            given = {
                "msa": self.merged.msa,
                "deletion_matrix": self.merged.deletions,
                "bert_mask": self.merged.bert_mask(),
                "msa_mask": np.ones(self.merged.msa.shape),
                "cluster_bias_mask": np.arange(len(self.merged.msa)) == 0,
                "order": drawn.order[cycle].numpy(),
                "hidden": (drawn.replace[cycle] < config.masked_msa_fraction).numpy(),
                "letters": own["msa_feat"][:centres, :, :LETTERS_WITH_MASK].argmax(-1),
            }
            subject |= {f"{name}|{key}": value for key, value in given.items()}
        sizes = {"clusters": self.clusters, "extra": self.extra, "padded_rows": padded}
        return ours, subject, [{"name": name, **sizes} for name in passes]


def cases(seed: int) -> list[Case]:
    """Some of the complexes of `pairing`, each with all sizes."""
    drawn = [
        pairing.draw(case, np.random.default_rng((seed, place)))
        for place, case in enumerate(pairing.CASES)
        if case.name in NAMES
    ]
    merged = {each.case.name: merge(each.chains, each.case.most_rows, each.case.most_rows // 2) for each in drawn}
    return [Case(name + of, msa, *sizes) for name, msa in merged.items() for of, sizes in SIZES.items()]


def run(options: argparse.Namespace) -> bool:
    ours: Results = {}
    subject: Results = {}
    passes: list[dict[str, Any]] = []
    for case in cases(options.seed):
        own, given, named = case.compared(options.seed)
        ours, subject, passes = ours | own, subject | given, passes + named
    given = {"cases": np.array(json.dumps(passes)), **subject}
    theirs = deepminds_side(options.alphafold, "alphafold_complex_msas_side", given)
    rows = compare(ours, theirs, ALLOWED)
    print(text(rows))
    return all(row.passed for row in rows)


def main(arguments: list[str] | None = None) -> int:
    what = "Compare the MSA features of complexes live with DeepMind's code."
    return program(run, what, "the MSAs and of what is drawn", arguments)


if __name__ == "__main__":
    sys.exit(main())

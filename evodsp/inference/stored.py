"""What a target's folder holds already: seeds that need no model, structures to write in another format, the user's own files.

Structures are stored with 0.001 Å and pLDDT with 0.01, in mmCIF as in PDB: so a format is written from a file of the other one,
and holds the same numbers as if it had been written at once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evodsp.data.mmcif import read_chain
from evodsp.errors import UserError
from evodsp.geometry.alphabet import RESTYPES_WITH_X
from evodsp.inference.results import (
    OURS,
    RANKING,
    REPORT,
    TIMINGS,
    Format,
    PredictionResult,
    read_with_settings,
    scores_name,
)
from evodsp.inference.writers import PredictedStructure, structure_text


@dataclass(frozen=True)
class Stored:
    """A complete result of an earlier run with the same inputs and settings."""

    result: PredictionResult
    ranking: Sequence[Mapping[str, Any]]
    """The entries of ranking.json."""
    timings: Mapping[str, Any]
    """timings.json."""

    def missing(self, seeds: Sequence[int]) -> list[int]:
        """Those of `seeds` that have to be predicted."""
        return [seed for seed in seeds if seed not in self.result.mean_plddt]

    def has_all(self, seeds: Sequence[int], file_format: Format) -> bool:
        """Whether every seed is there, with a structure in this format and the page (which earlier versions did not write)."""
        complete = not self.missing(seeds) and not self.without(file_format)
        return complete and (self.result.folder / REPORT).is_file()

    def without(self, file_format: Format) -> list[int]:
        """The seeds that have no structure in this format."""
        folder = self.result.folder
        return [seed for seed in self.result.mean_plddt if not (folder / f"seed_{seed}.{file_format}").is_file()]

    def write_format(self, folder: Path, file_format: Format) -> None:
        """Write the structures that lack this format into `folder`. Raises UserError if the format cannot hold them."""
        for seed in self.without(file_format):
            text = structure_text(_read_structure(self.result, seed), file_format)
            (folder / f"seed_{seed}.{file_format}").write_text(text, encoding="utf-8")

    def with_timings(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """timings.json after a run that added seeds, whose entries are `more`: times of both, the other numbers of that run."""
        sums = {name: round(self.timings[name] + more[name], 3) for name in ("features_seconds", "model_seconds")}
        return {**more, **sums, "seeds": [*self.timings["seeds"], *more["seeds"]]}


def find_stored(folder: Path, settings: Mapping[str, Any], overwrite: bool) -> Stored | None:
    """The result that `folder` already holds, or None if everything has to be predicted.

    Raises UserError if `folder` holds results of other settings, or an incomplete one (unless `overwrite`).
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(
            f"{folder}: is a file, but the results need a folder of this name; move it or choose another --output"
        )
    if overwrite or not any(OURS.fullmatch(path.name) for path in folder.iterdir()):
        return None
    result, made_with = read_with_settings(folder)
    if differing := [key for key in settings if made_with.get(key) != settings[key]]:
        key = differing[0]
        raise UserError(
            f"{folder}: holds results of another run ({key}: {made_with.get(key)} there, {settings[key]} now); "
            "choose another --output, or replace them with --overwrite"
        )
    try:
        ranking = json.loads((folder / RANKING).read_text(encoding="utf-8"))["ranking"]
        timings = json.loads((folder / TIMINGS).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder / TIMINGS}: not JSON ({error}); predict again with --overwrite") from error
    return Stored(result, ranking, timings)


def copy_files(folder: Path, into: Path, with_ours: bool) -> None:
    """Copy the user's own files of a target's folder into its successor; `with_ours`: those of earlier predictions too."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if not with_ours and OURS.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, into / path.name, symlinks=True)
        else:
            shutil.copy2(path, into / path.name, follow_symlinks=False)


def _read_structure(result: PredictionResult, seed: int) -> PredictedStructure:
    chain = read_chain(result.structure(seed), "A")
    scores = json.loads((result.folder / scores_name(seed)).read_text(encoding="utf-8"))
    return PredictedStructure(
        name=result.name,
        aatype=np.array([RESTYPES_WITH_X.index(letter) for letter in chain.sequence]),
        positions=chain.positions,
        mask=chain.mask,
        plddt=np.array(scores["plddt"], np.float32),
    )

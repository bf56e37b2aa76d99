"""Results of earlier runs in a target's folder: seeds that need no model, structures to write in another format, a user's
files.

Structures are stored with 0.001 Å and pLDDT with 0.01, in mmCIF as in PDB: so a format is written from a file of the other one,
and holds the same numbers as if it had been written at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evodsp.config import ArrangementName, FeatureConfig
from evodsp.errors import UserError
from evodsp.inference.config import PassSettings, SaveSettings
from evodsp.inference.models import SIZES, NamedModel
from evodsp.inference.representations import is_saved
from evodsp.inference.result_checks import read_object
from evodsp.inference.results import (
    OURS,
    RANKING,
    REPORT,
    Format,
    Key,
    PredictionResult,
    holds_pae,
    read_aligned_error,
    read_structure,
    read_timings,
    read_with_ranking,
    stem,
)
from evodsp.inference.structure_files import Origin, structure_text
from evodsp.inference.target_templates import Templates, template_digest, template_names
from evodsp.inference.targets import Target

NUMERICS: Mapping[ArrangementName, int] = {"monomer": 1, "multimer": 2}
"""Raised when a version of evodsp computes other numbers from the same inputs, beyond rounding: its results do not mix. 2:
residue types of a complex are those of its sequences, where an alignment has X."""


@dataclass(frozen=True)
class EarlierResult:
    """A complete result of an earlier run with the same inputs and settings."""

    result: PredictionResult
    content: Mapping[str, Any]
    """ranking.json."""
    timings: Mapping[str, Any]
    """timings.json."""
    model: str | None
    """Name of this run's model among several; None if it is the only one."""

    @property
    def ranking(self) -> Sequence[Mapping[str, Any]]:
        """The entries of ranking.json."""
        return self.content["ranking"]

    @property
    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings of all models in the folder, if there are several."""
        return self.content.get("models", {})

    def missing(self, seeds: Sequence[int], save: SaveSettings | None = None) -> list[int]:
        """The seeds among `seeds` that have to be predicted, also those whose arrays are to be saved, but are not there."""
        folder = self.result.folder
        there = {
            entry["seed"]
            for key, entry in self._entries.items()
            if entry.get("model") == self.model and is_saved(folder, entry, stem(key), save)
        }
        return [seed for seed in seeds if seed not in there]

    def has_all(self, file_format: Format, pae: bool = False) -> bool:
        """Whether all structures are there in this format, and the page (which earlier versions did not write).

        `pae`: whether ModelCIF files have to hold the aligned errors.
        """
        return not self.without(file_format, pae) and (self.result.folder / REPORT).is_file()

    def without(self, file_format: Format, pae: bool = False) -> list[Key]:
        """The predictions that have no structure in this format, or none with aligned errors where it has to hold them."""
        files = {key: self.result.folder / f"{stem(key)}.{file_format}" for key in self._entries}
        return [
            key
            for key, file in files.items()
            if not file.is_file() or (pae and "ptm" in self._entries[key] and not holds_pae(file))
        ]

    @property
    def _entries(self) -> dict[Key, Mapping[str, Any]]:
        return dict(zip(self.result.mean_plddt, self.ranking, strict=True))

    def write_format(self, folder: Path, file_format: Format, pae: bool = False) -> None:
        """Write the structures that lack this format into `folder`. Raises UserError if the format cannot hold them."""
        for key in self.without(file_format, pae):
            entry = self._entries[key]
            made_with = self.models[entry["model"]] if "model" in entry else self.content["settings"]
            structure = read_structure(self.result, key)
            if pae and "ptm" in entry:
                structure = replace(structure, aligned_error=read_aligned_error(self.result.folder, key, entry["ptm"]))
            text = structure_text(structure, file_format, Origin.of(entry, made_with), pae)
            (folder / f"{stem(key)}.{file_format}").write_text(text, encoding="utf-8")

    def with_timings(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """timings.json after a run that added seeds, whose entries are `more`: times of both, the other numbers of that run."""
        sums = {name: round(self.timings[name] + more[name], 3) for name in ("features_seconds", "model_seconds")}
        again = {(entry.get("model"), entry["seed"]) for entry in more["seeds"]}
        kept = [entry for entry in self.timings["seeds"] if (entry.get("model"), entry["seed"]) not in again]
        return {**more, **sums, "seeds": [*kept, *more["seeds"]]}


_INPUTS = {"numerics", "sequence", "alignments"}
"""The settings in which all models of a folder are equal."""


def find_earlier(
    folder: Path, settings: Mapping[str, Any], model: str | None, overwrite: bool = False
) -> EarlierResult | None:
    """The result that `folder` already holds, or None if everything has to be predicted.

    `model`: the name of the model in this run, if it has several; one that has no results there yet joins the others. Raises
    UserError if `folder` holds results of other settings, or an incomplete one (unless `overwrite`).
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(
            f"{folder}: is a file, but the results need a folder of this name; move it or choose another --output"
        )
    if overwrite or not any(map(_ours(folder), (path.name for path in folder.iterdir()))):
        return None
    result, content = read_with_ranking(folder)
    models: Mapping[str, Mapping[str, Any]] = content.get("models", {})
    if models and model is None:
        raise _other_run(folder, f"several models ({', '.join(models)}), and this run has one")
    if model is not None and not models:
        raise _other_run(folder, "one model, and this run has several")
    made_with: Mapping[str, Any] = content.get("settings", {})
    known = set(settings)
    if model is not None:
        made_with = models.get(model) or next(iter(models.values()))
        known &= known if model in models else _INPUTS
    if differing := [key for key in settings if key in known and made_with.get(key) != settings[key]]:
        key = differing[0]
        raise _other_run(folder, f"another run ({key}: {made_with.get(key)} there, {settings[key]} now)")
    return EarlierResult(result, content, {"seeds": [], **read_timings(folder)}, model)


def _other_run(folder: Path, of: str) -> UserError:
    return UserError(f"{folder}: holds results of {of}; choose another --output, or replace them with --overwrite")


def copy_files(folder: Path, into: Path, stored: EarlierResult | None) -> None:
    """Copy the user's own files of a target's folder into its successor, and the files of the earlier predictions `stored`."""
    if not folder.is_dir():
        return
    ours = _ours(folder)
    for path in folder.iterdir():
        if stored is None and ours(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, into / path.name, symlinks=True)
        else:
            shutil.copy2(path, into / path.name, follow_symlinks=False)


def _ours(folder: Path) -> Callable[[str], bool]:
    """Whether predict has written the file of this name into `folder`; all others are the user's."""
    models: list[str] = []
    with suppress(UserError):
        models = list(read_object(folder / RANKING).get("models", {}))
    return lambda name: any(OURS.fullmatch(name.removeprefix(before)) for before in ("", *(f"{m}_" for m in models)))


def result_settings(
    passes: PassSettings,
    raw: bool,
    features: FeatureConfig,
    target: Target,
    model: NamedModel,
    templates: Templates,
) -> dict[str, Any]:
    """Everything that the numbers of a seed depend on. An earlier result is kept only if every entry is equal.

    `raw`: whether the weights are the raw ones. `templates`: the templates in use.
    """
    return {
        "numerics": NUMERICS[model.arrangement],
        "sequence": target.sequence,
        "alignments": target.digest,
        "checkpoint": model.digest,
        "raw": raw,
        **{name: getattr(features, name) for name in SIZES},
        "ensembles": passes.ensembles,
        "stop_tolerance": passes.stop_tolerance or None,
        "templates": template_names(target, templates),
        "templates_digest": template_digest(templates),
        # None for the default: earlier versions, which had no other, wrote no entry.
        "precision": passes.precision if passes.half else None,
        "matmul_precision": None if passes.matmul_precision == "highest" else passes.matmul_precision,
        # Only where rows of different chains can be paired: the files of single chains have no entry.
        **({"pairing": target.pairing} if target.pairs else {}),
    }

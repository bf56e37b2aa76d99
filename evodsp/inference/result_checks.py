"""Checks of the JSON files of a finished prediction against what predict writes: people edit them, and copies are cut short.

What passes can be shown, compared and completed by further predictions without another look.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from evodsp.errors import FileFormatError
from evodsp.printing import shown
from evodsp.reading.text_files import read_json

FIX = "predict again with --overwrite true"
_STRUCTURE = re.compile(r"[^/\\\0]{1,200}\.(cif|pdb)")
_MODEL = re.compile(r"[^/\\\0]{1,150}")
_LARGEST_SEED = 1 << 63
_DEEPEST = 10


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object. Raises UserError, with the fix, for any other file."""
    content = read_json(path, FIX)
    if not isinstance(content, dict):
        raise wrong(path, "", content, "an object")
    return content


def wrong(path: Path, name: str, value: object, expected: str) -> FileFormatError:
    """The message for a value that predict does not write."""
    return FileFormatError(path, f"not written by evodsp predict ({name} is {shown(value)}, not {expected}); {FIX}")


def check_ranking(path: Path, content: Mapping[str, Any]) -> None:
    """Raise FileFormatError unless `content` of ranking.json is complete, and names files and models that may exist."""
    if not isinstance(content.get("name"), str):
        raise wrong(path, "name", content.get("name"), "a text")
    models, entries = content.get("models"), content.get("ranking")
    if models is None and not _is_settings(content.get("settings")):
        raise wrong(path, "settings", content.get("settings"), "an object of settings")
    if models is not None and not (isinstance(models, dict) and models and all(map(_is_settings, models.values()))):
        raise wrong(path, "models", models, "the settings of each model")
    if not _is_settings(content.get("settings", {})):
        raise wrong(path, "settings", content.get("settings"), "an object of settings")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise wrong(path, "ranking", entries, "a list of predictions")
    for entry in entries:
        _check_entry(path, entry, models)
    named = [(entry.get("model"), entry["seed"]) for entry in entries]
    if len(set(named)) < len(named):
        raise wrong(path, "ranking", "the same seed twice", "one prediction for each seed")


def _check_entry(path: Path, entry: Mapping[str, Any], models: Mapping[str, Any] | None) -> None:
    seed, structure, model = entry.get("seed"), entry.get("structure"), entry.get("model")
    if type(seed) is not int or not 0 <= seed < _LARGEST_SEED:
        raise wrong(path, "seed", seed, "a whole number from 0 on")
    if not isinstance(structure, str) or not _STRUCTURE.fullmatch(structure):
        raise wrong(path, "structure", structure, "the name of a .cif or .pdb file")
    if ("model" in entry) != (models is not None):
        raise wrong(path, "model", model, "one of the models")
    if models is not None and not (isinstance(model, str) and model in models and _MODEL.fullmatch(model)):
        raise wrong(path, "model", model, "one of the models")
    saved = entry.get("saved", {"arrays": [], "file": ""})
    texts = (
        [saved.get("file"), *saved["arrays"]]
        if isinstance(saved, dict) and isinstance(saved.get("arrays"), list)
        else [0]
    )
    if not all(isinstance(text, str) and "/" not in text for text in texts):
        raise wrong(path, "saved", saved, "the arrays of a file")
    for name, highest in (("mean_plddt", 100.0), ("ptm", 1.0), ("iptm", 1.0)):
        if (name == "mean_plddt" or name in entry) and not is_number(entry.get(name), 0.0, highest):
            raise wrong(path, name, entry.get(name), f"a number from 0 to {highest:g}")


def check_timings(path: Path, content: Mapping[str, Any]) -> None:
    """Raise FileFormatError unless timings.json has the seconds of a run, and a list of those of its seeds."""
    for name in ("features_seconds", "model_seconds"):
        if not is_number(content.get(name), 0.0):
            raise wrong(path, name, content.get(name), "a number of seconds")
    seeds = content.get("seeds", [])
    if not isinstance(seeds, list) or not all(isinstance(seed, dict) for seed in seeds):
        raise wrong(path, "seeds", seeds, "a list of objects")
    if not _is_settings(content):
        raise wrong(path, "its content", content, "a flat object")


def check_relaxation(path: Path, content: Mapping[str, Any]) -> None:
    """Raise FileFormatError unless a <stem>_relaxed.json has all that `Relaxed` has besides the structure."""
    for when in ("before", "after"):
        violations, energy = content.get(f"violations_{when}"), content.get(f"energy_{when}")
        if not isinstance(violations, dict) or not is_number(violations.get("any"), 0.0):
            raise wrong(path, f"violations_{when}", violations, "numbers of residues")
        if energy is not None and not is_number(energy):
            raise wrong(path, f"energy_{when}", energy, "a number")
    for name in ("rmsd", "seconds"):
        if not is_number(content.get(name), 0.0):
            raise wrong(path, name, content.get(name), "a number")


def numbers(path: Path, name: str, value: Any, axes: int, lowest: float, highest: float) -> Float32[np.ndarray, "..."]:
    """An array of numbers from `lowest` to `highest`, not empty, of equal sides. Raises FileFormatError for anything else."""
    try:
        array = np.array(value, np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise wrong(path, name, value, "numbers") from error
    if array.ndim != axes or not array.size or len(set(array.shape)) > 1:
        raise FileFormatError(path, f"not written by evodsp predict ({name} of shape {array.shape}); {FIX}")
    if not bool(((array >= lowest) & (array <= highest)).all()):
        raise wrong(path, name, "beyond them or not a number", f"numbers from {lowest:g} to {highest:g}")
    return array


def is_number(value: Any, lowest: float = -math.inf, highest: float = math.inf) -> bool:
    """Whether a value is a finite number in a range."""
    return type(value) in (int, float) and abs(value) < 1e300 and lowest <= value <= highest


def _is_settings(value: Any, level: int = 0) -> bool:
    """Whether a value is an object of texts, numbers, lists and small objects."""
    if level > _DEEPEST:
        return False
    inner: Sequence[Any] = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return (level > 0 or isinstance(value, dict)) and all(_is_settings(one, level + 1) for one in inner)

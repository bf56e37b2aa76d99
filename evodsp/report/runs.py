"""A training run as its folder tells it: the learning curve (`curve.csv`: a row per logged step, a column per metric) and
the settings; and the settings of `evodsp report`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evodsp.errors import FileFormatError, UserError
from evodsp.printing import shown
from evodsp.reading.text_files import read_json, read_yaml

RESUMED = "resumed"
"""The column that only the first row of a resumed start has: the number of the step with which the run went on."""
_MOST_DIGITS = 15


def read_curve(path: Path) -> dict[int, dict[str, str]]:
    """The rows of a learning curve by step, without empty cells; no rows if there is no such file. A last line without its end,
    as a full disk leaves it, does not count.

    Raises FileFormatError, with the line, for a file that is no learning curve.
    """
    if not path.is_file():
        return {}
    rows: dict[int, dict[str, str]] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            reader = csv.DictReader(line for line in file if line.endswith("\n"))
            for row in reader:
                step = row.get("step")
                if step is None or not step.isdecimal() or len(step) > _MOST_DIGITS:
                    raise FileFormatError(
                        path, f"step is {shown(step)}, expected a number: no learning curve", reader.line_num
                    )
                rows[int(step)] = {name: cell for name, cell in row.items() if name is not None and cell}
        except (csv.Error, ValueError) as error:
            raise FileFormatError(path, f"no learning curve ({error})") from error
    return rows


@dataclass(frozen=True)
class ReportConfig:
    """Whose learning curves to draw, and where to."""

    runs: list[Path]
    """Output folders of `evodsp fit`."""
    output: Path = Path("report.html")
    """The page. An earlier one is replaced."""


_OF_ONE_START = ("output", "overwrite", "ckpt_path")
"""Settings that say where a run's files are and how it was started, not what it computes."""
UNSET = "—"
_STEP_SECONDS = "train/step_seconds"


@dataclass(frozen=True)
class Baseline:
    """Nearest-neighbour baseline of a run on its validation chains, which the run computed at its start."""

    lddt_ca: float
    """The mean."""
    chains: int
    """Validation chains."""
    copies: dict[str, tuple[str, float]]
    """Training chain that is copied, and lDDT-CA of the copy, by validation chain; without those that have no copy."""
    interface_lddt_ca: float | None = None
    """The mean over complexes whose chains are in contact; None for chains."""

    @property
    def name(self) -> str:
        some = "" if len(self.copies) == self.chains else f" ({len(self.copies):,} of {self.chains:,} chains)"
        what = "chain" if self.interface_lddt_ca is None else "complex"
        return f"copying the nearest training {what}{some}"


@dataclass(frozen=True)
class Run:
    """A run's learning curve and settings."""

    name: str
    rows: dict[int, dict[str, str]]
    """Cells of `curve.csv` by step and column."""
    settings: dict[str, str]
    """Every setting by its dotted name; none if the folder has no config.yaml."""
    baseline: Baseline | None = None
    """None if the folder has no baseline.json, or if validation chains are trained on."""
    overlap: str = ""
    """A line about validation chains that are trained on."""

    @property
    def columns(self) -> list[str]:
        """Names of all metrics, sorted."""
        return sorted({name for row in self.rows.values() for name in row} - {"step", "epoch", "seconds", RESUMED})

    @property
    def resumes(self) -> list[int]:
        """The steps with which a resumed start of the run went on."""
        return sorted({int(step) for step in self.points(RESUMED)[1] if math.isfinite(step)})

    def points(self, column: str) -> tuple[list[int], list[float]]:
        """Steps and values of a column, where it has a value."""
        found = [(step, float(row[column])) for step, row in sorted(self.rows.items()) if column in row]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, column: str) -> float:
        """The last value of a column; NaN if it has none."""
        return next(reversed(self.points(column)[1]), math.nan)

    def best(self, column: str) -> tuple[int, float] | None:
        """Step and value of the highest finite value of a column."""
        pairs = [(value, step) for step, value in zip(*self.points(column), strict=True) if math.isfinite(value)]
        return max(pairs)[::-1] if pairs else None

    def pace(self) -> tuple[list[int], list[float]]:
        """Seconds a step by step: as logged, or, of a run of an earlier version, between two rows of the curve."""
        if _STEP_SECONDS in self.columns:
            return self.points(_STEP_SECONDS)
        steps, seconds = self.points("seconds")
        found = [
            (step, (now - before) / (step - former))
            for former, step, before, now in zip(steps, steps[1:], seconds, seconds[1:], strict=False)
        ]
        return [step for step, _ in found], [value for _, value in found]


def overlap_line(trained_on: Mapping[str, str], chains: int) -> str:
    """A line about scored chains that are training chains, or have the sequence of one. `trained_on`: they, each with that one;
    `chains`: the number of scored chains."""
    key, other = next(iter(trained_on.items()))
    such = key if key == other else f"{key}, whose sequence {other} has"
    return (
        f"{len(trained_on):,} of {chains:,} scored chains are trained on, such as {such}: their scores do not say what the "
        "model has learnt about other proteins"
    )


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of the folders. Each has the shortest end of its path that tells it from the others as its name.

    Raises UserError for a folder without a learning curve, for a damaged file, and for a folder that is given twice.
    """
    resolved = [folder.resolve() for folder in folders]
    for place, folder in enumerate(resolved):
        if folder in resolved[:place]:
            raise UserError(f"{folders[place]}: given twice; give each run once")
    return [_read(folder, name) for folder, name in zip(folders, _names(resolved), strict=True)]


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        what = "a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; give the --output folder of a run of 'evodsp fit'")
    path = folder / "curve.csv"
    rows = read_curve(path)
    if not rows:
        what = "has no rows yet" if path.is_file() else "is not there"
        raise UserError(
            f"{folder}: its curve.csv {what}; give the --output folder of a run that has taken its first steps"
        )
    for step, row in rows.items():
        for column, cell in row.items():
            try:
                float(cell)
            except ValueError as error:
                raise FileFormatError(path, f"{column} of step {step} is '{cell}', expected a number") from error
    return Run(name, rows, _settings(folder / "config.yaml"), *_baseline(folder / "baseline.json"))


def _names(paths: Sequence[Path]) -> list[str]:
    names = []
    for path in paths:
        others = [other for other in paths if other != path]
        lengths = range(1, len(path.parts) + 1)
        enough = next(n for n in lengths if all(other.parts[-n:] != path.parts[-n:] for other in others))
        names.append("/".join(path.parts[-enough:]))
    return names


def _settings(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise FileFormatError(path, "not a mapping of settings")
    return {name: value for name, value in _flat("", content).items() if name not in _OF_ONE_START}


def _baseline(path: Path) -> tuple[Baseline | None, str]:
    """The bar, and the line about validation chains that are trained on."""
    if not path.is_file():
        return None, ""
    fix = "remove the file; the run writes it again when it resumes"
    content = read_json(path, fix)
    try:
        chains = content["validation_chains"]
        if not isinstance(chains, int):
            raise TypeError(f"validation_chains is {shown(chains)}, expected a number")
        if trained_on := content.get("trained_on"):
            return None, overlap_line({str(key): str(other) for key, other in trained_on.items()}, chains)
        copies = {str(copy["chain"]): (str(copy["nearest"]), _score(copy["lddt_ca"])) for copy in content["copies"]}
        between = content.get("interface_lddt_ca")
        interface = None if between is None else _score(between)
        return Baseline(_score(content["lddt_ca"]), chains, copies, interface), ""
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError(path, f"not what copies of training chains score ({shown(error)}); {fix}") from error


def _score(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"lddt_ca is {shown(value)}, expected 0 to 1")
    return float(value)


def _flat(prefix: str, content: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(f"{prefix}{name}.", value)
        else:
            found[f"{prefix}{name}"] = "null" if value is None else str(value)
    return found


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings that differ, and their values in the order of the runs; `UNSET` where a run has none.

    A setting that another version of evodsp did not have is compared among the runs that have it.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return {
        name: [run.settings.get(name, UNSET) for run in runs]
        for name in names
        if len({run.settings[name] for run in runs if name in run.settings}) > 1
    }

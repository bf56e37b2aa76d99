"""The pictures that `evodsp predict --plots true` writes beside a target's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from evodsp.data.records import Alignment
from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.inference.pages.coverage import coverage
from evodsp.inference.prediction import Prediction, RankedStructure
from evodsp.inference.results import PredictionResult, stem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COVERAGE = "alignment_coverage.png"
_DOTS = 150
"""Per inch."""


def check_matplotlib() -> None:
    """Raise UserError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise UserError("--plots needs matplotlib, which is not installed; run: pip install 'evodsp[plots]'")


def confidence_name(one: RankedStructure) -> str:
    """The file of a structure's confidence."""
    return f"{stem(one.key)}_confidence.png"


def write_plots(result: PredictionResult, alignments: Callable[[], Sequence[Alignment]]) -> None:
    """Write the pictures of a finished result that are missing.

    `alignments`: reads those that it was predicted from. A single sequence has no picture of their coverage.
    """
    figures: dict[str, Callable[[], Figure | None]] = {
        confidence_name(one): one.plot for one in Prediction.of(result).ranked
    }
    figures[COVERAGE] = lambda: _coverage(result.name, alignments())
    for name, draw in figures.items():
        file = result.folder / name
        if not file.exists() and (figure := draw()) is not None:
            with whole_file(file) as partial:
                figure.savefig(partial, format="png", dpi=_DOTS, facecolor="white")


def _coverage(name: str, alignments: Sequence[Alignment]) -> Figure | None:
    from evodsp.inference.confidence_figure import coverage_figure

    if not alignments or (found := coverage(alignments)).sequences == 1:
        return None
    return coverage_figure(found, name)

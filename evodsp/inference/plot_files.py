"""The pictures that `evodsp predict --plots true` writes beside a target's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evodsp.data.records import Alignment
from evodsp.files import write_text
from evodsp.inference.pages.coverage import coverage
from evodsp.inference.pages.figures import Figure, coverage_figure
from evodsp.inference.prediction import Prediction, RankedStructure
from evodsp.inference.results import PredictionResult, stem

COVERAGE = "alignment_coverage.svg"


def confidence_name(one: RankedStructure) -> str:
    """The file of a structure's confidence."""
    return f"{stem(one.key)}_confidence.svg"


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
            write_text(file, figure)


def _coverage(name: str, alignments: Sequence[Alignment]) -> Figure | None:
    if not alignments or (found := coverage(alignments)).sequences == 1:
        return None
    return coverage_figure(found, name)

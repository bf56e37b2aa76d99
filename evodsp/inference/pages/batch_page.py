"""The page of a folder of predictions, <output>/index.html: every target with its scores and a link to its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.inference.failures import RecordFailure
from evodsp.inference.pages.residue_charts import named_bands, strip
from evodsp.inference.results import REPORT, read_plddt, read_with_ranking, result_folders
from evodsp.printing import counted
from evodsp.report.page import OURS, Page, histogram

INDEX, BESIDE = "index.html", "index_evodsp.html"
_STYLE = """
.strip { width: 190px; height: 14px; border-radius: 3px; display: block; }
.targets td { vertical-align: middle; } .targets th { position: sticky; top: 0; background: var(--back); }
a { color: var(--bar); } .bands { margin-bottom: 20px; }
"""
_STRIP = 60
"""Most pieces of the coloured strip of a target."""


def write_batch_page(output: Path, failures: Sequence[RecordFailure]) -> Path:
    """Write the page of all finished results below `output`, also of earlier runs, and of the records that failed now.

    An index.html that evodsp has not written is the user's: the page is then index_evodsp.html.
    """
    path, html = output / index_name(output), batch_page(output, failures).html()
    if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == html:
        return path  # a run that keeps everything changes nothing
    write_text(path, html)
    return path


def index_name(output: Path) -> str:
    """The name of the page of a folder of predictions, whether it is there yet or not."""
    path = output / INDEX
    return BESIDE if path.is_file() and OURS not in path.read_text(encoding="utf-8", errors="replace") else INDEX


def batch_page(output: Path, failures: Sequence[RecordFailure]) -> Page:
    """The page. Folders without a complete result are left out."""
    rows: list[dict[str, str]] = []
    means = []
    for folder in result_folders(output):
        try:
            result, ranking = read_with_ranking(folder)
            plddt = read_plddt(folder, result.best)
        except UserError:
            continue  # not a result of ours, or one that predict would refuse to keep
        means.append(result.mean_plddt[result.best])
        scores = {name: ranking["ranking"][0].get(key) for name, key in _SCORES.items()}
        rows.append(_row(folder, result.name, plddt, means[-1], scores, len(result.mean_plddt)))
    page = Page("Predictions", f"{counted(len(rows), 'target')}, best prediction of each")
    page.style(_STYLE)
    page.figures(
        {
            "targets": f"{len(rows):,}",
            "mean pLDDT": f"{np.mean(means):.1f}" if means else "–",
            "failed": f"{len(failures):,}",
        }
    )
    # Of models without a PAE head no target has a pTM, and no single chain has an ipTM.
    columns = {name: kind for name, kind in _HEADINGS.items() if name not in _SCORES or any(row[name] for row in rows)}
    page.template("inference/pages/targets.html.j2", columns=columns, rows=rows, bands=named_bands())
    counts, _ = np.histogram(means, bins=20, range=(0, 100))
    if len(means) > 4 and np.count_nonzero(counts) > 1:  # a chart of one bar says what the mean says
        page.charts({"Mean pLDDT": histogram([5.0 * n for n in range(21)], counts.tolist(), "mean pLDDT", "targets")})
    if failures:
        page.heading("Records that failed")
        page.table(["record", "reason"], [[failure.name, failure.reason] for failure in failures])
    return page


_ALONG = "pLDDT along the sequence"
_SCORES = {"pTM": "ptm", "ipTM": "iptm"}
"""Columns that may be empty, and their entries in ranking.json."""
_HEADINGS = {
    "target": False,
    "residues": True,
    "mean pLDDT": True,
    **dict.fromkeys(_SCORES, True),
    "predictions": True,
    _ALONG: False,
}
"""Headings of the columns, and whether their cells are numbers."""


def _row(
    folder: Path, name: str, plddt: np.ndarray, mean: float, scores: Mapping[str, float | None], seeds: int
) -> dict[str, str]:
    """The cells, by column, and the address of the target's page."""
    pieces = np.array([piece.mean() for piece in np.array_split(plddt, min(_STRIP, len(plddt)))])
    return {
        "target": name,
        "page": f"{quote(folder.name)}/{REPORT}" if (folder / REPORT).is_file() else "",
        "residues": f"{len(plddt):,}",
        "mean pLDDT": f"{mean:.1f}",
        **{column: "" if score is None else f"{score:.2f}" for column, score in scores.items()},
        "predictions": f"{seeds}",
        _ALONG: strip(pieces, f"pLDDT from {plddt.min():.0f} to {plddt.max():.0f}", kind="strip"),
    }

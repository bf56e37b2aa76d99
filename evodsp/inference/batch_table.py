"""The table of a folder of predictions, <output>/predictions.csv: a line for each prediction of each target, best first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.inference.results import read_plddt, read_with_ranking, result_folders
from evodsp.score_tables import csv_text

TABLE, BESIDE_TABLE = "predictions.csv", "predictions_evodsp.csv"
_COLUMNS = ("target", "rank", "model", "seed", "residues", "mean_plddt", "ptm", "iptm", "structure")


def write_batch_table(output: Path) -> Path:
    """Write the table of all finished results below `output`, also of earlier runs; returns its path.

    A predictions.csv that evodsp has not written is the user's: the table is then predictions_evodsp.csv.
    """
    path, text = output / TABLE, csv_text(_COLUMNS, _rows(output))
    if path.is_file():
        there = path.read_text(encoding="utf-8", errors="replace")
        if there == text:
            return path
        if there.partition("\n")[0] != text.partition("\n")[0]:
            path = output / BESIDE_TABLE
    write_text(path, text)
    return path


def _rows(output: Path) -> Iterator[dict[str, object]]:
    """The lines. Folders without a complete result are left out."""
    for folder in result_folders(output):
        try:
            result, ranking = read_with_ranking(folder)
            residues = len(read_plddt(folder, result.best))
        except UserError:
            continue  # not a result of ours, or one that predict would refuse to keep
        for rank, entry in enumerate(ranking["ranking"], start=1):
            known = {name: entry[name] for name in _COLUMNS if name in entry}
            structure = f"{folder.name}/{entry['structure']}"
            yield {**known, "target": result.name, "rank": rank, "residues": residues, "structure": structure}

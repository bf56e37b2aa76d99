"""Compare predictions with known structures: print a table, write scores.csv, calibration.png and one picture per chain.

python scripts/compare_predictions.py --predictions runs/demo/predictions --structures data/mmcif_files \\
    --train data/train.txt --held-out data/validation.txt --output runs/demo
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from evodsp.errors import UserError
from evodsp.inference.report import write_report


def keys(text: str) -> list[str]:
    """Chain keys of a text file with one on each line, or of a comma-separated list."""
    if Path(text).is_file():
        return Path(text).read_text(encoding="utf-8").split()
    return [key for key in text.split(",") if key]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare predictions with known structures.")
    parser.add_argument("--predictions", type=Path, required=True, help="output folder of `evodsp predict`")
    parser.add_argument("--structures", type=Path, required=True, help="folder of the true structures, <pdbid>.cif")
    parser.add_argument(
        "--train", type=keys, default=[], help="chains the model was trained on: a file, or <pdbid>_<chain>,…"
    )
    parser.add_argument("--held-out", type=keys, default=[], help="chains the model was not trained on, given likewise")
    parser.add_argument("--output", type=Path, required=True, help="folder for scores.csv and distances_<chain>.png")
    options = parser.parse_args(arguments)
    try:
        splits = {"train": options.train, "held-out": options.held_out}
        write_report(options.predictions, options.structures, splits, options.output)
    except UserError as error:
        print(f"compare_predictions: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

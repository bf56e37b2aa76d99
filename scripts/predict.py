"""Predict structures, as `evodsp predict`: scripts/predict.py --fasta … --alignments … --checkpoint … --output …"""

from __future__ import annotations

import sys

from evodsp.cli import main

if __name__ == "__main__":
    sys.exit(main(["predict", *sys.argv[1:]]))

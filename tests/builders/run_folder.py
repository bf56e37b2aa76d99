"""Folders of training runs as `evodsp report` reads them: a curve, settings, and what copies of training chains score."""

from __future__ import annotations

import json
from pathlib import Path

CURVE = """step,epoch,seconds,train/loss,train/lddt_ca,val/lddt_ca,val/lddt_ca/1abc_A
9,0,2.0,50.0,0.1,,
19,0,4.0,40.0,0.2,0.25,0.25
29,1,9.0,nan,0.3,0.35,0.35
"""


def make_run(folder: Path, curve: str = CURVE, **settings: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "curve.csv").write_text(curve)
    lines = "".join(f"{name}: {value}\n" for name, value in settings.items())
    (folder / "config.yaml").write_text(f"output: {folder}\nmodel:\n  optimizer: {{lr: 0.001}}\n{lines}")
    return folder


def write_bar(run: Path, lddt: float, chains: int = 1) -> None:
    copy = {"chain": "1abc_A", "nearest": "2abc_B", "identity": 0.5, "coverage": 1.0, "lddt_ca": lddt}
    (run / "baseline.json").write_text(
        json.dumps(
            {"lddt_ca": lddt, "validation_chains": chains, "training_chains": 9, "copies": [copy], "without": {}}
        )
    )

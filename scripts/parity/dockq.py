"""Compare DockQ of a predicted complex live with its program, version 2.

    .venv/bin/python -m scripts.parity.dockq --dockq .venv-parity/bin/python [--seed 0]

Both sides read the same files: a true complex of four chains, two of them identical, and a prediction that lacks residues and
whose identical chains are exchanged. The exit code is 1 if a difference is larger than allowed, and 2 if the other side could
not run. The program needs NumPy 1, so it has a place in the environment of DeepMind's code, and none in evodsp's.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np

from evodsp.data.formats.mmcif import read_assembly
from evodsp.data.records import Chain
from evodsp.errors import UserError
from evodsp.geometry.residues import RESTYPE_ATOM37_MASK, RESTYPES
from evodsp.inference.score.chain_mapping import ComplexComparison
from scripts.examples.synthetic.mmcif_writer import write_mmcif

from . import table
from .compare import other_side

KINDS = "AABC"
"""The sequence of each chain."""
LENGTHS = {"A": 60, "B": 40, "C": 17}
EXCHANGED = (1, 0, 2, 3)
"""The true chain of each predicted one."""
ALLOWED = {"dockq": 1e-5, "fnat": 0.0, "contacts": 0.0, "interface_rmsd": 1e-4, "ligand_rmsd": 1e-4, "mapping": 0.0}
"""Largest differences; RMSDs in Å. Files have positions of three decimals, and the program has float32."""


def write(seed: int, folder: Path) -> None:
    """Write `true.cif` and `predicted.cif`. No three residues in a row come twice in a chain, so that one alignment is best."""
    rng = np.random.default_rng(seed)
    letters = {
        kind: np.concatenate([rng.permutation(20) for _ in range(4)])[:length] for kind, length in LENGTHS.items()
    }
    true, predicted = [], []
    for number, kind in enumerate(KINDS):
        codes = letters[kind]
        trace = 2.2 * rng.standard_normal((len(codes), 1, 3)).cumsum(0) + 6 * rng.standard_normal(3)
        positions = trace + 1.2 * rng.standard_normal((len(codes), 37, 3))
        mask = RESTYPE_ATOM37_MASK[codes].astype(np.float32)
        mask[5:8] = 0
        true.append(_chain("WXYZ"[number], codes, positions, mask))
        moved = positions + rng.standard_normal(3) + 0.7 * rng.standard_normal(positions.shape)
        lacking = mask.copy()
        lacking[-4:] = 0
        predicted.append(_chain("?", codes, moved, lacking))
    write_mmcif(folder / "true.cif", true)
    chains = [predicted[n] for n in EXCHANGED]
    write_mmcif(
        folder / "predicted.cif",
        [dataclasses.replace(chain, chain_id=name) for name, chain in zip("ABCD", chains, strict=True)],
    )


def _chain(name: str, codes: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> Chain:
    return Chain(
        pdb_id="true",
        chain_id=name,
        sequence="".join(RESTYPES[code] for code in codes),
        residue_number=np.arange(1, len(codes) + 1, dtype=np.int32),
        insertion_code=("",) * len(codes),
        is_missing=mask.sum(-1) == 0,
        positions=(positions * mask[..., None]).astype(np.float32),
        mask=mask,
    )


def ours_of(folder: Path) -> table.Arrays:
    """The scores of each interface, [interfaces], and which predicted chain each true one is compared with."""
    truth, predicted = (read_assembly(folder / f"{name}.cif", None) for name in ("true", "predicted"))
    comparison = ComplexComparison(truth, predicted)
    mapping = comparison.mapping().chains
    scores = [comparison.score(pair, mapping) for pair in comparison.interfaces]
    names = ("dockq", "fnat", "contacts", "interface_rmsd", "ligand_rmsd")
    found = {name: np.array([getattr(score, name) for score in scores], np.float64) for name in names}
    return {**found, "mapping": np.array(mapping)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare DockQ of a predicted complex live with its program.")
    parser.add_argument("--dockq", type=Path, required=True, help="python with DockQ 2")
    parser.add_argument("--seed", type=int, default=0, help="seed of the complex")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="evodsp-parity-") as name:
            folder = Path(name)
            write(options.seed, folder)
            np.savez(folder / "subject.npz", folder=np.array(str(folder)))
            theirs = other_side(options.dockq, "dockq_side", folder / "subject.npz")
            ours = ours_of(folder)
        if theirs is None:
            raise UserError(f"{options.dockq}: has no package DockQ; `make parity` installs it in .venv-parity")
    except UserError as error:
        print(f"parity: error: {error}", file=sys.stderr)
        return 2
    rows = []
    for quantity, value in theirs.items():
        same = value.shape == ours[quantity].shape
        measured = float(np.abs(ours[quantity] - value).max()) if same else np.nan
        rows.append(table.Row(quantity, measured, ALLOWED[quantity], f"of {len(value)}, at most {value.max():.4f}"))
    print(table.text(rows))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

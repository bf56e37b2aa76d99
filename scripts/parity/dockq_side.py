"""The side of DockQ's program in the comparison of a complex, whose files lie in the folder that an .npz file names.

    .venv-parity/bin/python scripts/parity/dockq_side.py SUBJECT.npz RESULT.npz

Its command tries all mappings of chains with equal sequences, and takes that of the highest sum of DockQ. Here the same is done
with its functions, for four chains of which the first two are identical. The exit code is 3 if there is no package DockQ.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
from peer_calls import SKIPPED, serve  # type: ignore[import-not-found]

TRUE, PREDICTED = "WXYZ", "ABCD"


def run(folder: Path) -> dict[str, Any]:
    """The scores, under the names of `scripts.parity.dockq.ours_of`."""
    from DockQ.DockQ import load_PDB, run_on_all_native_interfaces  # type: ignore[import-not-found]

    model, native = (load_PDB(str(folder / f"{name}.cif")) for name in ("predicted", "true"))
    tried = [
        (run_on_all_native_interfaces(model, native, chain_map=dict(zip(TRUE, order))), order)  # noqa: B905  (one length)
        for order in (PREDICTED, "BACD")
    ]
    (scores, _), order = max(tried, key=lambda one: one[0][1])
    keys = {
        "dockq": "DockQ",
        "fnat": "fnat",
        "contacts": "nat_total",
        "interface_rmsd": "iRMSD",
        "ligand_rmsd": "LRMSD",
    }
    found = {name: np.array([float(one[key]) for one in scores.values()]) for name, key in keys.items()}
    return {**found, "mapping": np.array([PREDICTED.index(name) for name in order])}


if __name__ == "__main__":
    if importlib.util.find_spec("DockQ") is None:
        sys.exit(SKIPPED)
    serve(__file__, "DockQ", lambda arrays: run(Path(str(arrays["folder"]))))

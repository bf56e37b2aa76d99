"""Who may import whom: each floor is imported in a fresh interpreter, and what came with it is looked at."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TORCH_FREE = ("torch", "lightning", "jsonargparse")
FLOORS = {
    "evodsp.errors": ("torch", "numpy", "lightning"),
    "evodsp.rng": ("torch", "lightning"),
    "evodsp.config": ("torch", "numpy", "lightning", "jsonargparse"),
    "evodsp.geometry.alphabet": TORCH_FREE,
    "evodsp.geometry.residues": TORCH_FREE,
    "evodsp.geometry.rigid": ("lightning", "evodsp.data", "evodsp.model", "evodsp.parallel"),
    "evodsp.geometry.frames": ("lightning", "evodsp.data", "evodsp.model", "evodsp.parallel"),
    "evodsp.parallel.config": (*TORCH_FREE, "numpy"),
    "evodsp.parallel.exchange": (
        "lightning", "evodsp.geometry", "evodsp.data", "evodsp.model", "evodsp.losses", "evodsp.config",
    ),
    "evodsp.launch.consensus": ("lightning", "evodsp.geometry", "evodsp.data", "evodsp.model", "evodsp.config"),
    "evodsp.launch.launcher": ("lightning", "evodsp.geometry", "evodsp.data", "evodsp.model", "evodsp.config"),
    "evodsp.files": (*TORCH_FREE, "numpy"),
    "evodsp.synthetic": TORCH_FREE,
    "evodsp.data.records": TORCH_FREE,
    "evodsp.data.parsers": TORCH_FREE,
    "evodsp.data.mmcif": TORCH_FREE,
    "evodsp.data.mmcif_writer": TORCH_FREE,
    "evodsp.data.msa": TORCH_FREE,
    "evodsp.data.features": TORCH_FREE,
    "evodsp.data.crop": TORCH_FREE,
    "evodsp.data.store": TORCH_FREE,
    "evodsp.data.templates.source": TORCH_FREE,
    "evodsp.data.dataset": ("lightning", "evodsp.model", "evodsp.parallel", "evodsp.training", "evodsp.losses"),
    "evodsp.model.schedule": (*TORCH_FREE, "numpy"),
    "evodsp.model.alphafold": ("lightning", "evodsp.data", "evodsp.losses", "evodsp.training", "evodsp.inference"),
    "evodsp.losses.total": ("lightning", "evodsp.data", "evodsp.training", "evodsp.inference"),
    "evodsp.metrics": ("lightning", "evodsp.model", "evodsp.training", "evodsp.data"),
    "evodsp.weights.checkpoint": ("lightning", "evodsp.training", "evodsp.inference", "evodsp.data"),
    "evodsp.weights.config": TORCH_FREE,
    "evodsp.weights.names": TORCH_FREE,
    "evodsp.weights.openfold": ("lightning", "evodsp.training", "evodsp.inference", "evodsp.data"),
    "evodsp.weights.published": ("lightning", "evodsp.training", "evodsp.inference", "evodsp.data"),
    "evodsp.weights.command": ("lightning", "evodsp.training", "evodsp.inference", "evodsp.data"),
    "evodsp.inference.config": TORCH_FREE,
    "evodsp.inference.predict": ("lightning", "evodsp.training", "matplotlib"),
    "evodsp.training.config": TORCH_FREE,
    "evodsp.training.options": ("torch", "lightning"),
    "evodsp.argument_parser": ("torch", "lightning", "numpy"),
    "evodsp.cli": ("torch", "lightning", "numpy", "jsonargparse", "evodsp.model", "evodsp.training"),
}  # fmt: skip


@pytest.mark.parametrize("module", FLOORS)
def test_a_floor_imports_none_above_it(module: str) -> None:
    """An import that makes workers slow, help slow, or a lower floor depend on an upper one."""
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    loaded = set(done.stdout.split())
    assert module in loaded
    assert sorted(loaded & set(FLOORS[module])) == []


def test_every_package_is_on_a_floor() -> None:
    """A new package that nobody placed."""
    import pkgutil

    import evodsp

    packages = {name for _, name, is_package in pkgutil.iter_modules(evodsp.__path__) if is_package}
    assert packages <= {module.split(".")[1] for module in FLOORS}

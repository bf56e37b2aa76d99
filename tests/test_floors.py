"""Who may import whom: each floor is imported in a process of its own, and the modules loaded with it are checked."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

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
    "evodsp.download": (*TORCH_FREE, "numpy"),
    "evodsp.reading.answers": (*TORCH_FREE, "numpy", "evodsp.data"),
    "evodsp.reading.array_files": (*TORCH_FREE, "evodsp.data"),
    "evodsp.reading.recorded_pickle": (*TORCH_FREE, "evodsp.data"),
    "evodsp.reading.text_files": (*TORCH_FREE, "numpy", "evodsp.data"),
    "evodsp.reading.yaml_files": (*TORCH_FREE, "numpy", "evodsp.data"),
    "evodsp.data.records": TORCH_FREE,
    "evodsp.data.formats": TORCH_FREE,
    "evodsp.data.formats.mmcif": TORCH_FREE,
    "evodsp.data.sources.msa": TORCH_FREE,
    "evodsp.data.samples.feature_axes": TORCH_FREE,
    "evodsp.data.samples.crop": TORCH_FREE,
    "evodsp.data.sources.parsed_chain": TORCH_FREE,
    "evodsp.data.sources.chain_files": TORCH_FREE,
    "evodsp.data.index.chain_index": TORCH_FREE,
    "evodsp.data.pool": (*TORCH_FREE, "numpy"),
    "evodsp.data.index.scan": (*TORCH_FREE, "rich"),
    "evodsp.data.fetch": TORCH_FREE,
    "evodsp.data.fetch_config": (*TORCH_FREE, "numpy"),
    "evodsp.data.index.config": (*TORCH_FREE, "numpy"),
    "evodsp.data.doctor.diagnosis": (*TORCH_FREE, "rich"),
    "evodsp.data.doctor.config": (*TORCH_FREE, "numpy"),
    "evodsp.report.page": (*TORCH_FREE, "numpy", "evodsp.data"),
    "evodsp.report.charts": (*TORCH_FREE, "numpy", "evodsp.data"),
    "evodsp.report.run_command": (*TORCH_FREE, "numpy", "evodsp.data"),
    "evodsp.progress": (*TORCH_FREE, "numpy", "rich"),
    "evodsp.data.templates.source": TORCH_FREE,
    "evodsp.data.sources.feature_store": TORCH_FREE,
    "evodsp.data.building.parts": TORCH_FREE,
    "evodsp.data.building.config": (*TORCH_FREE, "numpy"),
    "evodsp.data.samples.dataset": ("lightning", "evodsp.model", "evodsp.parallel", "evodsp.training", "evodsp.losses"),
    "evodsp.features.batch": ("lightning", "evodsp.model", "evodsp.parallel", "evodsp.training", "evodsp.losses"),
    "evodsp.data.samples.raw_features": TORCH_FREE,
    "evodsp.model.schedule": (*TORCH_FREE, "numpy"),
    "evodsp.model.alphafold": ("lightning", "evodsp.data", "evodsp.losses", "evodsp.training", "evodsp.inference"),
    "evodsp.losses.total": ("lightning", "evodsp.data", "evodsp.training", "evodsp.inference"),
    "evodsp.metrics": ("lightning", "evodsp.model", "evodsp.training", "evodsp.data"),
    "evodsp.weights.checkpoint": ("lightning", "evodsp.training", "evodsp.inference", "evodsp.data"),
    "evodsp.weights.by_name": (*TORCH_FREE, "numpy"),
    "evodsp.weights.config": TORCH_FREE,
    "evodsp.weights.names": TORCH_FREE,
    "evodsp.weights.openfold": ("lightning", "evodsp.training", "evodsp.inference", "evodsp.data"),
    "evodsp.weights.published": ("lightning", "evodsp.training", "evodsp.inference", "evodsp.data"),
    "evodsp.weights.command": ("lightning", "evodsp.training", "evodsp.inference", "evodsp.data"),
    "evodsp.search.server": TORCH_FREE,
    "evodsp.search.programs": TORCH_FREE,
    "evodsp.inference.search_config": (*TORCH_FREE, "numpy"),
    "evodsp.inference.config": TORCH_FREE,
    "evodsp.inference.score_config": (*TORCH_FREE, "numpy"),
    "evodsp.inference.predict": ("lightning", "evodsp.training", "matplotlib"),
    "evodsp.packaged": (*TORCH_FREE, "numpy", "omegaconf"),
    "evodsp.run_config_file": (*TORCH_FREE, "numpy", "omegaconf"),
    "evodsp.planner.config": (*TORCH_FREE, "numpy"),
    "evodsp.planner.device": ("lightning", "evodsp.training", "evodsp.inference", "evodsp.launch", "triton"),
    "evodsp.planner.choose": ("lightning", "evodsp.training", "evodsp.inference", "evodsp.launch", "triton"),
    "evodsp.training.config": TORCH_FREE,
    "evodsp.training.options": ("torch", "lightning"),
    "evodsp.given_settings": (*TORCH_FREE, "numpy"),
    "evodsp.argument_parser": ("torch", "lightning", "numpy"),
    "evodsp.cli": ("torch", "lightning", "numpy", "jsonargparse", "evodsp.model", "evodsp.training"),
}  # fmt: skip


# Prints, for each module named, what is loaded after its import. Each is imported in a fork of a process that has loaded
# nothing but the first argument: starting Python and importing torch for each of them would take a minute.
PROGRAM = """
import importlib, os, sys
if sys.argv[1]:
    importlib.import_module(sys.argv[1])
for module in sys.argv[2:]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        importlib.import_module(module)
        print(*sys.modules, flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{module} cannot be imported")
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """By module of `FLOORS`: every module that is loaded after importing it."""
    found: dict[str, set[str]] = {}
    for first in ("", "torch"):
        modules = [module for module, forbidden in FLOORS.items() if ("torch" in forbidden) == (first == "")]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, first, *modules],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        found |= zip(modules, (set(line.split()) for line in done.stdout.splitlines()), strict=True)
    return found


@pytest.mark.parametrize("module", FLOORS)
def test_a_floor_imports_none_above_it(module: str, loaded: dict[str, set[str]]) -> None:
    """Catches an import that makes workers slow, help slow, or a lower floor depend on an upper one."""
    assert module in loaded[module]
    assert sorted(loaded[module] & set(FLOORS[module])) == []


def test_every_package_is_on_a_floor() -> None:
    """A new package that nobody placed."""
    import pkgutil

    import evodsp

    packages = {name for _, name, is_package in pkgutil.iter_modules(evodsp.__path__) if is_package}
    assert packages <= {module.split(".")[1] for module in FLOORS}


def test_no_test_module_imports_another() -> None:
    """Catches tests that cannot be moved or deleted by themselves. What they share lies in `tests/builders`."""
    folder = Path(__file__).parent
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            imported = [module, *names] if module.startswith("tests") else names
            if any(re.search(r"(^|\.)test_\w+$", name) for name in imported):
                found.append(f"{path.relative_to(folder.parent)}:{node.lineno}: {module} {', '.join(names)}")
    assert found == [], "\n".join(found)

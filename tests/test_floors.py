"""Who may import whom, computed from the import statements of all modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from evodsp.cli import COMMANDS, SettingsCommand
from tests.builders.pages import table

ROOT = Path(__file__).parents[1]

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "reading": (),
    "report": ("reading",),
    "geometry": (),
    "parallel": (),
    "launch": ("parallel", "reading"),
    "model": ("geometry", "parallel"),
    "data": ("geometry", "metrics", "reading", "report"),
    "metrics": ("geometry",),
    "losses": ("geometry", "metrics", "model", "parallel"),
    "weights": ("model", "reading", "report"),
    "search": ("data", "reading"),
    "features": ("data", "geometry"),
    "planner": ("data", "geometry", "losses", "model", "parallel", "reading", "report"),
    "training": (
        "data", "features", "geometry", "launch", "losses", "metrics", "model", "parallel", "planner", "reading", "report",
        "weights",
    ),
    "selftest": (
        "geometry", "launch", "losses", "model", "parallel", "planner", "reading", "report", "training", "weights",
    ),
    "inference": (
        "data", "features", "geometry", "launch", "losses", "metrics", "model", "parallel", "planner", "reading", "report",
        "search", "weights",
    ),
}  # fmt: skip
"""By room, a folder or `metrics`: the rooms that its modules may import, besides modules that lie beside the rooms."""
ROOMLESS = ("launch", "reading", "training")
"""The rooms that modules beside the rooms, such as `cli` and `errors`, may import."""

FAST = ("numpy", "torch", "lightning", "jsonargparse", "rich")
FREE = {
    "*": ("huggingface_hub", "matplotlib", "openmm"),
    "*config": FAST,
    "cli": FAST,
    "reading.*": FAST,
    "report.*": FAST,
    "search.*": ("torch", "lightning", "jsonargparse", "rich"),
    "data.*": ("torch", "lightning", "jsonargparse", "rich"),
    "data.pool": FAST,
    "geometry.residues": ("torch",),
    "model.schedule": FAST,
    "weights.by_name": FAST,
    "weights.names": FAST,
}
"""By pattern of modules (with `evodsp.` left out): the packages that they and all they import must not load."""
NOT_FREE = {
    "reading.array_files": ("numpy",),
    "data.samples.sample_records": ("torch",),
    "data.samples.dataset": ("torch",),
    "data.doctor.command": ("rich",),
}
"""Exceptions from `FREE`."""
TRAINING_ONLY = ("lightning",)


@cache
def modules() -> dict[str, Path]:
    """The files of all modules, by name."""
    files = (path.relative_to(ROOT) for path in sorted((ROOT / "evodsp").rglob("*.py")))
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__"): ROOT / file for file in files}


def statements(node: ast.AST, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is imported; with `lazy` those in functions, too. Never those for hints of types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from statements(ast.Module(child.orelse, []), lazy)
        elif lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from statements(child, lazy)


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


@cache
def imported(module: str, lazy: bool = False) -> frozenset[str]:
    """The modules that `module` imports: those of evodsp by their full names, others as they are written."""
    found = set()
    for statement in statements(tree(module), lazy):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
        assert not statement.level, f"{module}: a relative import"
        base = statement.module or ""
        names = {f"{base}.{alias.name}" for alias in statement.names}
        found |= {name if name in modules() else base for name in names}
    return frozenset(found)


@cache
def loaded(module: str) -> dict[str, str]:
    """The packages of others that are loaded with `module`, and the module of evodsp whose statement loads each."""
    found, seen, waiting = {}, set(), [module]
    while waiting:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        parts = here.split(".")
        waiting += [".".join(parts[:length]) for length in range(1, len(parts))]
        for name in imported(here):
            if name.partition(".")[0] == "evodsp":
                waiting.append(name)
            else:
                found.setdefault(name.partition(".")[0], here)
    return found


def room(module: str) -> str:
    """The room of a module; '' of one that lies beside the rooms."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""


def test_a_room_imports_only_those_below_it() -> None:
    """Catches a lower room that depends on an upper one, and a room that nobody placed. Imports in functions count."""
    wrong = []
    for module in modules():
        allowed = {*MAY_IMPORT.get(room(module), ROOMLESS), room(module), ""}
        for name in imported(module, lazy=True):
            if name.partition(".")[0] == "evodsp" and room(name) not in allowed:
                wrong.append(f"{module} imports {name}")
    packages = {name.split(".")[1] for name, path in modules().items() if path.name == "__init__.py" and "." in name}
    assert sorted(packages - set(MAY_IMPORT)) == []
    assert wrong == []


def test_the_rooms_make_no_circle() -> None:
    """Catches a table of rooms that allows two of them to import each other, directly or by way of others."""
    placed: set[str] = set()
    while ready := {name for name, below in MAY_IMPORT.items() if set(below) <= placed} - placed:
        placed |= ready
    assert placed == set(MAY_IMPORT)


def test_modules_that_start_fast_load_nothing_slow() -> None:
    """Catches an import that makes workers or help slow, and a package that is needed though it is an extra's."""
    wrong = []
    for module in modules():
        name = module.removeprefix("evodsp.")
        forbidden = {package for pattern, packages in FREE.items() if fnmatch(name, pattern) for package in packages}
        if room(module) != "training":
            forbidden |= set(TRAINING_ONLY)
        for pattern, packages in NOT_FREE.items():
            if fnmatch(name, pattern):
                forbidden -= set(packages)
        wrong += [f"{module} loads {found} by {by}" for found, by in loaded(module).items() if found in forbidden]
    assert wrong == []


def test_only_the_kernels_import_triton() -> None:
    """Catches a module that does not load where Triton is not installed: `triton_kernels/__init__.py` has a stand-in."""
    folder = "evodsp.model.kernels.triton_kernels"
    importing = {
        module for module in modules() for name in imported(module, lazy=True) if name.partition(".")[0] == "triton"
    }
    assert importing == {folder, f"{folder}.launch"}


def test_help_loads_nothing_slow() -> None:
    """Catches what the statements do not show: a package that is loaded by its name, or by a package of others."""
    names = ["evodsp.cli", *(c.settings.partition(":")[0] for c in COMMANDS.values() if isinstance(c, SettingsCommand))]
    program = f"import importlib, sys; [importlib.import_module(name) for name in {names}]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert (
        sorted({"torch", "lightning", "jsonargparse", "numpy", "evodsp.model.alphafold"} & set(done.stdout.split()))
        == []
    )


def test_rooms_keep_to_their_budgets() -> None:
    """Catches a room that grows unseen, and a module in no room. CONTRIBUTING.md has the budgets."""
    left = {path.relative_to(ROOT / "evodsp").as_posix(): path for path in modules().values()}
    over = []
    # The files beside the rooms come last: those that no other row has taken.
    for _, cell, *most, _ in sorted(table("| floor |"), key=lambda row: "evodsp/" in row[1]):
        name = re.findall(r"`(.+?)`", cell)[0]
        inside = [file for file in left if file.startswith(name) or (name == "evodsp/" and "/" not in file)]
        lines = sum(len(left.pop(file).read_text().splitlines()) for file in inside)
        if len(inside) > int(most[0]) or lines > int(most[1]):
            over.append(f"{name}: {len(inside)} files and {lines} lines, but at most {most[0]} and {most[1]}")
    assert over == []
    assert list(left) == []


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


def test_a_name_of_a_class_stands_once() -> None:
    """Catches a second class of one name, which a search for the name, a message or a traceback cannot tell from the first."""
    places: dict[str, list[str]] = {}
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1}

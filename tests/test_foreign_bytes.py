"""No module turns bytes that came from elsewhere into code: what can unpickle is used in named places only.

Read from the sources, so that a new place is found without a test that reaches it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

UNPICKLERS = (
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml.load", "yaml.load_all",
    "yaml.full_load", "yaml.unsafe_load", "pandas.read_pickle", "torch.package", "torch.jit.load", "torch.hub", "eval", "exec",
    "multiprocessing.managers", "multiprocessing.connection.Listener", "multiprocessing.connection.Client",
)  # fmt: skip
"""Modules and functions that make any object, or run any code, of the bytes that they are given."""
OBJECT_COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name in (
        "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
        "recv_object_list",
    )
)  # fmt: skip

ALLOWED = {
    # The standard library's unpickler, behind a list of harmless instructions and with a `find_class` that calls nothing.
    "evodsp/reading/array_files.py": {"pickle"},
    # Pipes to processes that the same process started, which nobody else can open.
    "evodsp/data/pool.py": {"recv()"},
    "scripts/fuzz/__main__.py": {"recv()"},
    # Arguments and results of processes that the same process started, in a folder that the user alone can open.
    "evodsp/parallel/testing.py": {"pickle"},
    # Between ranks whose process group is connected. docs/training.md says which networks these messages may cross.
    "evodsp/launch/consensus.py": {
        "broadcast_object_list", "all_gather_object", "send_object_list", "recv_object_list",
    },
    "evodsp/training/trainer.py": {"broadcast_object_list"},
}  # fmt: skip
"""By file: what it may use, and why that is safe."""


def found(source: str) -> set[str]:
    """What a module uses of the above, by the last part of its name. A name counts wherever it stands, called or not."""
    tree = ast.parse(source)
    names = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return set(_uses(tree, names))


def _uses(tree: ast.AST, names: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        used: list[str] = []
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Name | ast.Attribute):
            used = [_dotted(node, names)]
        for name in used:
            if any(name == one or name.startswith(f"{one}.") for one in UNPICKLERS):
                yield name.split(".")[0] if name.startswith("pickle.") else name
            if name in OBJECT_COLLECTIVES or name.replace("distributed_c10d.", "") in OBJECT_COLLECTIVES:
                yield name.split(".")[-1]
        if isinstance(node, ast.Call):
            yield from _unsafe_call(node, names)


def _unsafe_call(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    options = {option.arg: option.value for option in call.keywords}
    name = _dotted(call.func, names)
    if name in ("torch.load", "torch.serialization.load") and not _is(options.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if "allow_pickle" in options and name.endswith(".load") and not _is(options["allow_pickle"], False):
        yield "numpy.load with allow_pickle"
    if (
        isinstance(call.func, ast.Attribute) and call.func.attr == "recv" and not call.args
    ):  # a socket's has an argument
        yield "recv()"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The full name of what stands here, such as torch.distributed.all_gather_object for dist.all_gather_object."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    return f"{_dotted(node.value, names)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


@pytest.mark.parametrize("folder", ["evodsp", "scripts"])
def test_bytes_from_elsewhere_are_not_unpickled(folder: str) -> None:
    """Catches a store, a socket or a shared file whose content is unpickled: its writer would choose what runs here."""
    files = sorted(path for path in (ROOT / folder).rglob("*.py") if "tests" not in path.parts)
    assert files
    uses = {path.relative_to(ROOT).as_posix(): found(path.read_text(encoding="utf-8")) for path in files}
    allowed = {name: what for name, what in ALLOWED.items() if name.startswith(f"{folder}/")}
    assert {name: what for name, what in uses.items() if what} == allowed


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle\n", {"pickle"}),
        ("from pickle import loads as read\nread(b'')", {"pickle"}),
        ("import torch as t\nt.load('a')", {"torch.load without weights_only=True"}),
        ("from torch import load\nload('a', weights_only=False)", {"torch.load without weights_only=True"}),
        ("import torch\ntorch.load('a', weights_only=True)", set()),
        ("import numpy as np\nnp.load('a', allow_pickle=True)", {"numpy.load with allow_pickle"}),
        ("import numpy as np\nnp.load('a', allow_pickle=False)", set()),
        ("pipe.recv()", {"recv()"}),
        ("socket.recv(4)", set()),
        ("from multiprocessing.connection import Listener", {"multiprocessing.connection.Listener"}),
        ("import torch.distributed as dist\ndist.all_gather_object", {"all_gather_object"}),
        ("import torch\ntorch.distributed.distributed_c10d.gather_object", {"gather_object"}),
        ("import yaml\nyaml.load", {"yaml.load"}),
        ("eval('1')", {"eval"}),
        ("model.eval()", set()),
    ],
)
def test_every_way_is_found(source: str, what: set[str]) -> None:
    """Catches a search that finds nothing."""
    assert found(source) == what

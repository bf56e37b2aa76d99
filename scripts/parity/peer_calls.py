"""What every other side of a comparison does, and whether its program still takes the calls that it makes.

The calls are read from the side's source, the parameters from the functions of the program that is installed: a call that no
longer fits is named before anything is compared.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SKIPPED = 3
"""Exit code of a side whose package is not installed, or lacks the model."""


def serve(script: str, package: str, run: Callable[[dict[str, np.ndarray]], Mapping[str, Any]]) -> None:
    """Run a side on the arrays of one .npz file, and write what it returns to another: the two arguments of the command.

    Ends as `check_calls` does.
    """
    check_calls(script, package)
    subject, result = map(Path, sys.argv[1:])
    with np.load(subject) as file:
        found = run({key: file[key] for key in file.files})
    np.savez(result, **{name: np.asarray(value) for name, value in found.items()})  # type: ignore[arg-type]  # none is named 'allow_pickle'


def check_calls(script: str, package: str) -> None:
    """End with a line for each call of a function of `package` in a script that the function does not take any more."""
    if changed := list(changed_calls(Path(script), package)):
        raise SystemExit("\n".join(changed))


def changed_calls(script: Path, package: str) -> Iterator[str]:
    """These lines. Methods are compared of objects that a name stands for (`name = module.Class(…)`). Calls with * or **, and
    of functions without a signature, are not compared."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package
        for alias in node.names
    }
    made = {
        node.targets[0].id: _dotted(node.value.func, imported)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)
    }
    classes = {name: known for name, known in made.items() if known and inspect.isclass(_found(known))}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        of_object = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in classes
        name = _dotted(call.func, classes if of_object else imported)
        if name and (problem := _problem(name, call, of_object)):
            yield f"{script.name}, line {call.lineno}: {name} has changed: {problem}; adapt the call"


def _dotted(function: ast.expr, known: Mapping[str, str]) -> str | None:
    """The whole dotted name of a function whose first name is a known one; None for others."""
    first, dot, rest = ast.unparse(function).partition(".")
    is_name = first in known and all(part.isidentifier() for part in rest.split(".") if dot)
    return f"{known[first]}{dot}{rest}" if is_name else None


def _problem(name: str, call: ast.Call, of_object: bool) -> str | None:
    """Why the function of that name does not take a call; None if it does, or if nothing can be said."""
    function = _found(name)
    if function is None:
        return "it is not there"
    if inspect.isabstract(function):
        return "it is abstract"
    if any(isinstance(given, ast.Starred) for given in call.args) or any(word.arg is None for word in call.keywords):
        return None
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a wrapper may take less than what it wraps
    except (TypeError, ValueError):  # compiled code
        return None
    try:
        own = ["self"] if of_object else []
        signature.bind(*own, *call.args, **{str(word.arg): word.value for word in call.keywords})
    except TypeError as error:
        return f"{error}, it takes {signature}"
    return None


def _found(name: str) -> Any:
    """The object of a dotted name; None if there is none."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        if not hasattr(found, part) and inspect.ismodule(found):
            try:
                importlib.import_module(".".join(parts[:place]))
            except ModuleNotFoundError:
                return None
        found = getattr(found, part, None)
    return found

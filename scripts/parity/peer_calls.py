"""Whether another program still takes the calls that a side of a comparison makes.

The calls are read from the side's source, the parameters from the functions of the program that is installed: a call that no
longer fits is named before anything is compared.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def check_calls(script: str, package: str) -> None:
    """End with a line for each call of a function of `package` in a script that the function does not take any more."""
    if changed := list(changed_calls(Path(script), package)):
        raise SystemExit("\n".join(changed))


def changed_calls(script: Path, package: str) -> Iterator[str]:
    """These lines. Calls with * or **, of methods, and of functions without a signature are not compared."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package
        for alias in node.names
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        first, _, rest = ast.unparse(call.func).partition(".")
        if first not in imported or not all(part.isidentifier() for part in rest.split(".") if rest):
            continue
        name = f"{imported[first]}.{rest}".rstrip(".")
        if problem := _problem(name, call):
            yield f"{script.name}, line {call.lineno}: {name} has changed: {problem}; adapt the call"


def _problem(name: str, call: ast.Call) -> str | None:
    """Why the function of that name does not take a call; None if it does, or if nothing can be said."""
    try:
        function = _found(name)
    except AttributeError:
        return "it is not there"
    if any(isinstance(given, ast.Starred) for given in call.args) or any(word.arg is None for word in call.keywords):
        return None
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a wrapper may take less than what it wraps
    except (TypeError, ValueError):  # compiled code
        return None
    try:
        signature.bind(*call.args, **{str(word.arg): word.value for word in call.keywords})
    except TypeError as error:
        return f"{error}, it takes {signature}"
    return None


def _found(name: str) -> Any:
    """The object of a dotted name. Raises AttributeError if there is none."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        if not hasattr(found, part) and inspect.ismodule(found):
            try:
                importlib.import_module(".".join(parts[:place]))
            except ModuleNotFoundError as error:
                raise AttributeError(name) from error
        found = getattr(found, part)
    return found

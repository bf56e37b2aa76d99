"""Checks of types and shapes in signatures that name arrays, for modules that are imported after `install`.

mypy reads the others. jaxtyping's own hook checks every call, which takes two thirds of the time of a short run, and makes the
checks of a function while its module is imported. Here they are made at its first call, and a call is not checked again whose
arguments and result are of types, dtypes and shapes that have passed: a check sees nothing else. Where a size is computed from
an argument, jaxtyping checks every call.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import islice
from typing import Any, get_args, get_type_hints

import jaxtyping

CHECKED = "_checked_by_tests"
"""The decorator's name in a module."""


class ShapeError(TypeError):
    """An argument or a result is not what the signature says."""


def install(modules: Sequence[str]) -> None:
    """Check the functions of these modules, and of those below them, that are imported from now on."""
    sys.meta_path.insert(0, _Finder(modules))


class _Finder(MetaPathFinder):
    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(name == module or name.startswith(module + ".") for module in self.modules):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        """The module's code with `checked` at each function and class. No file keeps it, so that none can be stale."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in _definitions(tree.body):
            decorator = ast.Name(CHECKED, ast.Load(), **{name: getattr(node, name) for name in node._attributes})
            # A class after `dataclass` has made its `__init__`; a function before others, which may not keep the signature.
            node.decorator_list.insert(0 if isinstance(node, ast.ClassDef) else len(node.decorator_list), decorator)
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        setattr(module, CHECKED, checked)
        outer = len(_unread)
        super().exec_module(module)
        for hints in _unread[outer:]:  # now: later a test may have put something else in the place of a class
            hints()
        del _unread[outer:]


def _definitions(body: Sequence[ast.AST]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """The functions and classes among these statements and within them, but those that want no checks."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if any(isinstance(word, ast.Name) and word.id == "no_type_check" for word in node.decorator_list):
                continue
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, ())
            if isinstance(inner, list):
                yield from _definitions(inner)


def checked(of: Any) -> Any:
    """A function that checks its arguments and its result, or a dataclass that checks its fields when it is made."""
    if inspect.isclass(of):
        if is_dataclass(of) and "__init__" in vars(of) and not hasattr(of.__init__, "__wrapped__"):
            of.__init__ = _checked(of.__init__, partial(get_type_hints, of, include_extras=True))
        return of
    return _checked(of, partial(_hints, of))


_unread: list[Callable[[], dict[str, Any]]] = []
"""Hints of functions of modules that are being imported, which may name what comes later in the module."""


def _checked(of: Callable[..., Any], read: Callable[[], dict[str, Any]]) -> Callable[..., Any]:
    hints = cache(read)
    if "<locals>" not in of.__qualname__:
        _unread.append(hints)
    passed: dict[Any, set[Any]] = {}  # kinds of results by kinds of arguments
    checks: _Checks | None = None

    @wraps(of)
    def function(*arguments: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checks
        if checks is None:
            checks = _Checks(of, hints())
        if checks.unchecked:
            return checks.unchecked(*arguments, **named)
        given = tuple([kind if (kind := type(value)) in _plain else _kind(value) for value in arguments])
        if named:
            given = (given, tuple([(name, _kind(value)) for name, value in named.items()]))
        results = passed.get(given)
        if results is None:
            checks.check(arguments, named)
            results = passed[given] = set()
        result = of(*arguments, **named)
        kind = _kind(result)
        if kind not in results:
            checks.check(arguments, named, result)
            results.add(kind)
        return result

    return function


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    hints = {}
    for name, hint in function.__annotations__.items():
        with suppress(NameError):  # of a module that cannot be imported there, because it imports this one
            hints[name] = eval(hint, function.__globals__) if isinstance(hint, str) else hint
    return hints


def _kind(value: Any) -> Any:
    """All that a check sees of a value. Of a list or a dict that is one item, as for beartype."""
    kind = type(value)
    if kind in _plain:
        return kind
    if _has_shape(kind):
        return kind, value.dtype, value.shape
    if kind is tuple:
        return kind, *map(_kind, value)
    if kind is list:
        return kind, *map(_kind, value[:1])
    if kind is dict:
        return kind, *((_kind(key), _kind(one)) for key, one in islice(value.items(), 1))
    if kind is type:
        return value
    _plain.add(kind)
    return kind


_plain: set[type] = set()
"""Types of which a check sees nothing but the type."""


def _names_arrays(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_names_arrays, get_args(hint)))


@cache
def _has_shape(kind: type) -> bool:
    return hasattr(kind, "dtype") and hasattr(kind, "shape")


class _Checks:
    """What the signature of a function says."""

    def __init__(self, function: Callable[..., Any], hints: dict[str, Any]) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.signature = inspect.signature(function)
        self.hints = hints
        self.unchecked: Callable[..., Any] | None = None if any(map(_names_arrays, hints.values())) else function
        if any("{" in repr(hint) for hint in hints.values()):
            import beartype

            self.unchecked = jaxtyping.jaxtyped(function, typechecker=beartype.beartype)

    def check(self, arguments: Sequence[Any], named: dict[str, Any], *result: Any) -> None:
        """Raise ShapeError unless these are as the signature says, and their shapes agree with each other."""
        __tracebackhide__ = True
        bound = self.signature.bind(*arguments, **named).arguments
        with jaxtyping.jaxtyped("context"):
            for name, value in bound.items():
                kind = self.signature.parameters[name].kind
                if kind is inspect.Parameter.VAR_POSITIONAL:
                    self._check(name, *value)
                elif kind is inspect.Parameter.VAR_KEYWORD:
                    self._check(name, *value.values())
                else:
                    self._check(name, value)
            self._check("return", *result)

    def _check(self, name: str, *values: Any) -> None:
        __tracebackhide__ = True
        for value in values:
            if name in self.hints and not _is(value, self.hints[name]):
                raise ShapeError(f"{self.name}: {name} is {_kind(value)}, not {self.hints[name]}")


def _is(value: Any, hint: Any) -> bool:
    if hint is None or hint is Any:
        return hint is Any or value is None
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and not getattr(hint, "_is_protocol", False):
        return isinstance(value, hint)
    from beartype.door import is_bearable

    return is_bearable(value, hint)

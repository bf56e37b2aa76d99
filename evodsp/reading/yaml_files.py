"""Reading YAML: the only place that calls PyYAML, which raises any exception at all, and gives a few lines all memory.

Aliases are counted as often as they are written out, and nesting is limited, before anything is made of a file. A date is a
text, as for OmegaConf and jsonargparse, which read the same files after `check_yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from evodsp.errors import FileFormatError, UserError
from evodsp.reading.quoting import LONGEST_REASON, quoted

_MOST_NODES = 200_000
"""Values of a file, aliases written out. A run's config has some hundred."""
_DEEPEST = 100
_LONGEST_TEXT = 100_000
_REFERENCE = re.compile(r"\$\{[^{}]*?([^.{}\[\]]+)\]?\}")
"""A reference to another value, and the last part of its name."""
_LARGEST_NUMBER = 1 << 1024
"""Python neither prints nor reads whole numbers of some thousand digits."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, whose errors are its own and name their line."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth, self._nodes = self._depth + 1, self._nodes + 1
        if self._depth > _DEEPEST:
            raise _error(f"nested more than {_DEEPEST} deep", self.peek_event().start_mark)
        if self._nodes > _MOST_NODES:
            raise _error(f"more than {_MOST_NODES:,} values", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # of a number, a base64 text or a key
            raise _error(quoted(error), node.start_mark) from error
        if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise _error("a number of too many digits", node.start_mark)
        return value


def read_yaml(path: Path | Any) -> Any:
    """The content of a YAML file. `path`: may be a packaged resource.

    Raises UserError if it cannot be read, FileFormatError if it is not YAML in UTF-8, or would be too large when written out.
    """
    return parse_yaml(_text(path), path)


def parse_yaml(text: str, source: Path | Any) -> Any:
    """The content of a text. `source` names it in messages."""
    with _one_line(source):
        loader = _Loader(text)
        node = _checked(loader.get_single_node(), source)
        return None if node is None else loader.construct_document(node)


def compose_yaml(path: Path) -> yaml.Node | None:
    """The nodes of a YAML file, with their lines; None if it is empty. Raises as `read_yaml` does for the same reasons, and
    FileFormatError for references (${name}) that OmegaConf would write out to a long text.
    """
    text = _text(path)
    parse_yaml(
        text, path
    )  # the values too: the library that reads the file next would fail on a number of 5,000 digits
    with _one_line(path):
        node = _checked(_Loader(text).get_single_node(), path)
        if node is not None:
            _check_references(node, path)
        return node


def check_yaml(path: Path) -> None:
    """Raise as `compose_yaml` does. For files that another library reads afterwards."""
    compose_yaml(path)


def _check_references(node: yaml.Node, source: Path) -> None:
    """Raise FileFormatError if a value is long once the values that it refers to, as ${model.size}, stand in their places.

    A reference counts as the longest value of its last name, wherever that stands.
    """
    named: dict[str, list[yaml.Node]] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        waiting += _parts(one)
        for key, value in one.value if isinstance(one, yaml.MappingNode) else ():
            named.setdefault(str(key.value), []).append(value)
    known: dict[str, int] = {}

    def length(one: yaml.Node) -> int:
        if not isinstance(one, yaml.ScalarNode):
            return 1 + sum(length(part) for part in _parts(one))
        found = len(one.value) + sum(length_of(name) for name in _REFERENCE.findall(one.value))
        if found > _LONGEST_TEXT:
            message = f"more than {_LONGEST_TEXT:,} characters when references are written out"
            raise FileFormatError(source, message, one.start_mark.line + 1)
        return found

    def length_of(name: str) -> int:
        if name not in known:
            known[name] = 0  # of a circle, which OmegaConf names
            known[name] = max(map(length, named.get(name, [])), default=0)
        return known[name]

    length(node)


def _text(path: Path | Any) -> str:
    try:
        text: str = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(path, f"not a text in UTF-8 (byte {error.start + 1}); save it as UTF-8") from error
    return text


@contextmanager
def _one_line(source: Any) -> Iterator[None]:
    """Turn whatever is raised inside into a FileFormatError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        mark = getattr(error, "problem_mark", None)
        reason = quoted(getattr(error, "problem", None) or error, LONGEST_REASON)
        line = None if mark is None else mark.line + 1
        raise FileFormatError(source, f"not YAML that evodsp reads ({reason}); correct it", line) from error


def _error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def _checked(node: yaml.Node | None, source: Any) -> yaml.Node | None:
    """`node`, if it is small when its aliases are written out, and none contains itself."""
    if node is not None:
        _measure(node, source, {}, 0)
    return node


def _measure(node: yaml.Node, source: Any, known: dict[int, tuple[int, int] | None], level: int) -> tuple[int, int]:
    """How deep a node is and how many values it has. `known`: of others, by their addresses; None: of those around it."""
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            message = "what is marked with & contains itself; write it out"
            raise FileFormatError(source, message, node.start_mark.line + 1)
        return found
    if level > _DEEPEST:
        raise _error(f"nested more than {_DEEPEST} deep", node.start_mark)
    known[id(node)] = None
    depth, size = 0, 1
    for part in _parts(node):
        inner, more = _measure(part, source, known, level + 1)
        depth, size = max(depth, inner), size + more
    if depth >= _DEEPEST:
        raise _error(f"nested more than {_DEEPEST} deep", node.start_mark)
    if size > _MOST_NODES:
        raise _error(f"more than {_MOST_NODES:,} values when aliases are written out", node.start_mark)
    known[id(node)] = depth + 1, size
    return depth + 1, size


def _parts(node: yaml.Node) -> Iterator[yaml.Node]:
    for item in node.value if isinstance(node, yaml.CollectionNode) else ():
        yield from item if isinstance(item, tuple) else (item,)

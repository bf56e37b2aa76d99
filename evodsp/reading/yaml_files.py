"""Reading YAML: the only place that calls PyYAML, which raises any exception at all.

A date is a text, as for OmegaConf and jsonargparse, which read the same files after `compose_yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from evodsp.errors import FileFormatError, UserError
from evodsp.reading.quoting import LONGEST_REASON, quoted

_LARGEST_NUMBER = 1 << 1024
"""Python neither prints nor reads whole numbers of some thousand digits."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, whose errors are its own and name their line."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

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

    Raises UserError if it cannot be read, FileFormatError if it is not YAML in UTF-8.
    """
    return parse_yaml(_text(path), path)


def parse_yaml(text: str, source: Path | Any) -> Any:
    """The content of a text. `source` names it in messages."""
    with _one_line(source):
        return _Loader(text).get_single_data()


def compose_yaml(path: Path) -> yaml.Node | None:
    """The nodes of a YAML file, with their lines; None if it is empty. Raises as `read_yaml` does for the same reasons."""
    text = _text(path)
    # The values too: the library that reads the file next would fail on a number of 5,000 digits.
    parse_yaml(text, path)
    with _one_line(path):
        return yaml.compose(text, _Loader)


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

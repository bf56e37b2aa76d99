"""The command line's parser: jsonargparse whose errors are one line that says where and what was probably meant.

Typed dataclasses become options (`--model.evoformer.blocks 8`), their attribute docstrings the help. No torch here, so that
help is quick. `OneLineErrors` is a mixin because Lightning's command line wants its own parser class underneath.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from evodsp.errors import UserError, nearest

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class OneLineErrors(ArgumentParser):
    """Raises UserError, in one line, where jsonargparse prints its usage and exits."""

    config_files: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": HelpFormatter, **kwargs})

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        for action in self._actions:
            if getattr(action, "_typehint", None) is bool:  # `--raw` alone is `--raw true`
                action.nargs, action.const = "?", True
        words = with_underscores(list(args or []))
        self.config_files, self.words = tuple(_values_of("--config", words) + _values_of("-c", words)), tuple(words)
        return super().parse_args(words, *rest, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(self.explain(message)) from ex

    def known_keys(self) -> list[str]:
        """The names of all options, without their dashes."""
        return [name[2:] for action in self._actions for name in action.option_strings if name.startswith("--")]

    def explain(self, message: str) -> str:
        """jsonargparse's message in one line, with the config file's line and the nearest valid name where they help."""
        message = " ".join(message.split())
        if found := re.match(r"unrecognized arguments: (.*)", message):
            words = found[1].split()
            word = next((w for w in words if w.startswith("--")), words[0])
            name = word.removeprefix("--").partition("=")[0]
            close = nearest(name, self.known_keys()).replace("'", "'--", 1) if word.startswith("--") else ""
            return f"unknown argument '{word.partition('=')[0]}'.{close} See '{self.prog} --help'"
        if found := re.search(r"(?:Group '([^']*)' does not accept o|O)ption '([^']*)'", message):
            key = ".".join(filter(None, found.groups()))
            return f"{self.where(key)}unknown config key '{key}'.{nearest(key, self.known_keys())} See '{self.prog} --help'"
        if found := re.search(r"File does not exist: '([^']*)'", message):
            return f"{found[1]}: no such file; check --config"
        if found := re.search(r'Parser key "([^"]*)": ?(.*)', message):
            return f"{self.where(found[1])}{found[1]}: {_what_was_expected(found[2])}"
        if message.startswith(("Problems parsing config", "Unexpected config")):
            name = self.config_files[-1] if self.config_files else "config"
            return f"{name}: not a YAML mapping of options: {message.partition(':')[2].strip() or 'it is empty'}"
        if found := re.match(r"the following arguments are required: (.*)", message):
            options = ", ".join(f"--{name}" for name in found[1].split(", "))
            return f"{self.prog} needs {options}. See '{self.prog} --help'"
        return message

    def where(self, key: str) -> str:
        """'file:line: ' of the config file that sets `key`, or nothing if none does or the command line has the last word."""
        if any(word.partition("=")[0] == f"--{key}" for word in self.words):
            return ""
        for name in reversed(self.config_files):
            if (line := line_of_key(Path(name), key)) is not None:
                return f"{name}:{line}: "
        return ""


class HelpFormatter(DefaultHelpFormatter):
    """Help that starts with the descriptions: one usage line, and no entries for whole groups given as files."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_help_position": 44, "width": 120, **kwargs})

    def add_argument(self, action: argparse.Action) -> None:
        if action.metavar != "CONFIG" or action.dest == "config":
            super().add_argument(action)


def with_underscores(words: list[str]) -> list[str]:
    """`--extra-msa` and `--extra_msa` are the same option."""
    return [
        name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word
        for word in words
        for name, equals, value in [word.partition("=")]
    ]


def check_nested(settings: Any, where: str = "") -> None:
    """Raise UserError where a group of options was overwritten by a single value (`evoformer: 3`)."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, hint, key = getattr(settings, field.name), hints[field.name], f"{where}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(hint):
            if not dataclasses.is_dataclass(value):
                names = ", ".join(f.name for f in dataclasses.fields(hint))
                raise UserError(f"config key '{key}' is {value!r}, but is a group of options: {names}")
            check_nested(value, key)


def line_of_key(path: Path, key: str) -> int | None:
    """The line of a YAML file (from 1) on which the dotted `key` is set; None if it is not, or the file cannot be read."""
    try:
        node = yaml.compose(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    line = None
    for part in key.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        match = next(((name, value) for name, value in pairs if name.value == part), None)
        if match is None:
            return line
        line, node = match[0].start_mark.line + 1, match[1]
    return line


def _what_was_expected(detail: str) -> str:
    """'expected int or null, found x' from jsonargparse's account of a value of the wrong type."""
    plain = re.sub(r"<class '(\w+)'>|typing\.(?=\w)", lambda m: m[1] or "", detail).replace("NoneType", "null")
    if found := re.search(r"Subtypes: \[(.*?)\] Errors:.*Given value: (.*)$", plain):
        return f"expected {found[1].replace(', ', ' or ')}, found {found[2]}"
    if found := re.search(r"Expected an? (.*?)\.? Got value: (.*)$", plain):
        return f"expected {found[1]}, found {found[2]}"
    return plain


def _values_of(option: str, words: list[str]) -> list[str]:
    following = [after for word, after in itertools.pairwise(words) if word == option]
    return following + [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]

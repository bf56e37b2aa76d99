"""The command line's parser: jsonargparse, with option names checked before parsing, and errors of one line.

Typed dataclasses become options (`--model.evoformer.blocks 8`) and their attribute docstrings the help. This module does
not import torch, so that help is quick. `OneLineErrors` can be mixed into Lightning's parser class.

Option names are checked before jsonargparse sees them (`given_settings.py`). Its later errors keep its own words, behind
the place of the setting that they quote; for settings of a plain type the message is evodsp's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml  # type: ignore[import-untyped]
from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from evodsp.errors import SettingError, UserError, nearest
from evodsp.given_settings import Given, Names, config_files, given_settings, values_of, with_options, with_underscores

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class OneLineErrors(ArgumentParser):
    """Raises UserError with one line where jsonargparse would print its usage and exit."""

    given: tuple[Given, ...] = ()
    alone: Mapping[str, str] = MappingProxyType({})
    """Values of options that are given without a value, by their names without dashes."""
    aliases: Mapping[str, str] = MappingProxyType({})
    """Other names of options, with the option that each stands for: other commands' names of the same thing."""
    several: frozenset[str] = frozenset()
    """See `Names`."""
    former: Mapping[str, str] = MappingProxyType({})
    """See `Names`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": HelpFormatter, **kwargs})

    @property
    def names(self) -> Names:
        options = {option for action in self._actions for option in (action.option_strings or [f"--{action.dest}"])}
        known = frozenset(option[2:] for option in options if option.startswith("--"))
        from_files = any(isinstance(action, ActionConfigFile) for action in self._actions)
        return Names(self.prog, known, from_files, self.several, former=self.former, aliases=self.aliases)

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        for action in self._actions:
            if getattr(action, "_typehint", None) is bool:  # `--raw` alone means `--raw true`
                action.nargs, action.const = "?", True
            elif action.dest in self.alone:
                action.nargs, action.const = "?", self.alone[action.dest]
        self._add_aliases()
        words = with_options(with_underscores(list(args or [])), self.aliases)
        self.given = tuple(given_settings(words, self.names))
        self._check_lists()
        self._check_environment()
        for option in self.several:
            words = _as_list(f"--{option}", words)
        try:
            return super().parse_args(words, *rest, **kwargs)
        except _omegaconf_errors() as error:
            file = (config_files(words) or [self.prog])[-1]
            raise UserError(
                f"{file}: {(str(error).splitlines() or [''])[0]}; check what is between ${{ and }}"
            ) from error

    def _add_aliases(self) -> None:
        """Show the other names in the help, and let jsonargparse take them from files. On the command line they are replaced
        before it sees them (`with_options`)."""
        for name, option in self.aliases.items():
            (action,) = (action for action in self._actions if action.dest == option)
            if f"--{name}" not in action.option_strings:
                action.option_strings = [*action.option_strings, f"--{name}"]

    def instantiate_settings(self, config: Any) -> Any:
        """The typed settings of a parsed `config`. Raises UserError with the config file's line for a value out of range,
        and for an object, such as a logger, that cannot be made.
        """
        with self.located():
            try:
                return self.instantiate(config)
            except ValueError as error:
                if _about_class(str(error)) == str(error):
                    raise
                raise UserError(self.explain(str(error))) from error

    @contextmanager
    def located(self) -> Iterator[None]:
        """Put the place of a setting (the config file's line, or the option's dashes) before the message of a SettingError."""
        try:
            yield
        except SettingError as error:
            raise UserError(f"{self.where(error.key)}{error}") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(self.explain(message)) from ex

    def explain(self, message: str) -> str:
        """jsonargparse's message as one line, behind the place of the first setting that it quotes. For a setting of a
        plain type the message says what was expected and what was found."""
        quoted, names = re.findall(r"""["']([\w.+]+)["']""", message), self.names
        message = " ".join(_about_class(message).split())
        key = next((name for name in quoted if name in names.known), None)
        see = f"see '{self.prog} --help'"
        if key is None:
            close = next((close for name in quoted if (close := nearest(name, names.known))), "")
            return f"{message}.{close} S{see[1:]}"
        place = self.where(key, message)
        value = os.environ.get(place.partition(":")[0]) or {one.key: one.value for one in self.given}.get(key)
        hint = next((getattr(action, "_typehint", None) for action in self._actions if action.dest == key), None)
        if is_plain(hint) and isinstance(value, str | yaml.ScalarNode):
            return f"{place}{key}: expected {type_words(hint)}, found '{getattr(value, 'value', value)}'; {see}"
        return f"{f'--{key}: ' if place == '--' else place}{message}; {see}"

    def where(self, key: str, detail: str = "") -> str:
        """The prefix of `key` in messages: '--' if the command line sets it, 'file:line: ' if a config file does,
        'VARIABLE: ' if an environment variable does and counts, else the prefix of its group, or nothing.

        `detail`: jsonargparse's account of a wrong value. jsonargparse reads all variables, also those that do not count.
        """
        variable = self._variable(key)
        value = os.environ.get(variable) if self.default_env else None
        places = {one.key: one.place for one in self.given}
        if value and (key not in places or value in detail.split()):
            return f"{variable}: "
        while key and key not in places:
            key = key.rpartition(".")[0]
        return places.get(key, "")

    def _variable(self, key: str) -> str:
        """Name of the environment variable of an option."""
        return f"{self.env_prefix}_{key.replace('.', '__')}".upper()

    def _check_environment(self) -> None:
        """Raise UserError for an environment variable that is named like an option of a group but is none, because it would
        be ignored.
        """
        names = self.names
        known = {self._variable(key): key for key in names.known} if self.default_env else {}
        for name, value in os.environ.items():
            parts = name.split("__")
            if not known or not name.startswith(f"{self.env_prefix}_"):
                continue
            if name in known:
                names.check(known[name], f"{name}: ", "setting", value)
            elif len(parts) > 1 and not any("__".join(parts[:n]) in known for n in range(2, len(parts))):
                close = nearest(name, known)
                raise UserError(f"environment variable {name}: no such setting.{close} See '{self.prog} --help'")

    def _check_lists(self) -> None:
        """Raise UserError if a config file gives a positional argument other than as a list of words. jsonargparse's
        message names neither the file nor the expected value, and it fails on a mapping."""
        unnamed = {action.dest for action in self._actions if not action.option_strings}
        for key, place, value in ((one.key, one.place, one.value) for one in self.given if one.key in unnamed):
            items = value.value if isinstance(value, yaml.SequenceNode) else [None]
            if isinstance(value, yaml.Node) and not all(getattr(x, "tag", "").endswith(":str") for x in items):
                found = value.value if isinstance(value, yaml.ScalarNode) else yaml.serialize(value).strip()
                fix = f"; write {key}: [{found}]" if value.tag.endswith(":str") else ""
                raise UserError(f"{place}{key}: expected a list of words, found '{found}'{fix}")


def _about_class(message: str) -> str:
    """From jsonargparse's account of all types that it tried, the part about the class that a setting names; else all of
    it. For arguments of a class, a parser of this module has already written one line."""
    lines = message.splitlines()
    if ours := next((line for line in lines if line.endswith("--help'")), None):
        return ours.lstrip(" -").rpartition(" See '")[0].rstrip(".")
    depth = [len(line) - len(line.lstrip()) for line in lines]
    for at, line in enumerate(lines):
        if line.lstrip().startswith("- ") and re.search(r"'\w+\.[\w.]+'", line):
            end = next((n for n in range(at + 1, len(lines)) if depth[n] <= depth[at]), len(lines))
            return " ".join([line.lstrip(" -"), *lines[at + 1 : end]])
    return message


class HelpFormatter(DefaultHelpFormatter):
    """A help formatter without entries for groups of options given as files, and wide enough for one-line usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_help_position": 44, "width": 120, **kwargs})

    def _get_type_str(self, action: argparse.Action) -> str | None:
        """The type as a user would write it, such as str | list[str] | null; empty if the choices are listed already."""
        hint = getattr(action, "_typehint", None) or action.type
        return None if hint is None or get_origin(hint) is Literal else type_words(hint, " | ")

    def _expand_help(self, action: argparse.Action) -> str:
        """The help without a docstring's indentation, which --print_config=comments would keep."""
        return re.sub(r"\n +", "\n", super()._expand_help(action))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Keep the line breaks of a text; indented lines (examples) are not wrapped."""
        lines = text.splitlines()
        return "\n".join(
            x if x.startswith("  ") else super(HelpFormatter, self)._fill_text(x, width, indent) for x in lines
        )

    def start_section(self, heading: str | None) -> None:
        """A heading without what a class's docstring says of errors, which is for programs."""
        super().start_section(None if heading is None else re.sub(r"\.?\s*Raises .*", "", heading, flags=re.DOTALL))

    def add_argument(self, action: argparse.Action) -> None:
        if action.metavar != "CONFIG" or action.dest == "config":
            super().add_argument(action)


def type_words(hint: Any, between: str = " or ") -> str:
    """A type in the words of a user, such as: int or null, 'one' or 'two', path."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return between.join(type_words(one, between) for one in arguments)
    if origin is Literal:
        return between.join(map(repr, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(type_words(one, ' | ') for one in arguments)}]"
    return {NoneType: "null", Path: "path"}.get(hint) or str(getattr(hint, "__name__", hint))


def is_plain(hint: Any) -> bool:
    """Whether the values of a type are numbers, texts and lists of them, instead of objects of a class that a setting
    names.
    """
    if get_origin(hint) is Literal or hint in (bool, int, float, str, Path, NoneType, dict, list):
        return True
    return get_origin(hint) in (Union, UnionType, list, dict, tuple) and all(map(is_plain, get_args(hint)))


def _omegaconf_errors() -> tuple[type[Exception], ...]:
    """The exceptions of OmegaConf; none if it is not loaded. Loading it would slow down the help."""
    omegaconf = sys.modules.get("omegaconf")
    return () if omegaconf is None else (omegaconf.errors.OmegaConfBaseException,)


def _as_list(option: str, words: list[str]) -> list[str]:
    """`words` in which repetitions of `option` are replaced by one list of all its values."""
    values = values_of(option, words)
    if len(values) < 2:
        return words
    rest: list[str] = []
    skipped = False
    for before, word in itertools.pairwise(["", *words]):
        skipped = before == option and not skipped
        if not skipped and word != option and not word.startswith(f"{option}="):
            rest.append(word)
    return [*rest, f"{option}={json.dumps(values)}"]

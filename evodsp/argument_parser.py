"""The command line's parser: jsonargparse with one-line errors that name the place and the nearest valid option.

Typed dataclasses become options (`--model.evoformer.blocks 8`) and their attribute docstrings the help. No torch is imported
here, so that help is quick. `OneLineErrors` can be mixed into Lightning's parser class.

jsonargparse reports errors as English sentences only. `OneLineErrors.explain` recognises them by regular expression, which is
why pyproject.toml limits jsonargparse's version; `tests/test_argument_parser.py` fails when a sentence changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

from evodsp.errors import SettingError, UserError, nearest
from evodsp.reading.yaml_files import compose_yaml, read_yaml

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class OneLineErrors(ArgumentParser):
    """Raises UserError with one line where jsonargparse would print its usage and exit."""

    config_files: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    alone: Mapping[str, str] = MappingProxyType({})
    """What options mean that are given without a value, by their names without dashes."""
    several: frozenset[str] = frozenset()
    """Options that may be given once more for each of several values, by their names without dashes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": HelpFormatter, **kwargs})

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        for action in self._actions:
            if getattr(action, "_typehint", None) is bool:  # `--raw` alone means `--raw true`
                action.nargs, action.const = "?", True
            elif action.dest in self.alone:
                action.nargs, action.const = "?", self.alone[action.dest]
        words = with_underscores(list(args or []))
        self.config_files = tuple(_values_of("--config", words) + _values_of("-c", words))
        self.words = tuple(words)
        self._refuse_repetition()
        self._refuse_empty()
        self._check_files()
        for option in self.several:
            words = _as_list(f"--{option}", words)
        self._check_environment()
        self._check_lists()
        try:
            config = super().parse_args(words, *rest, **kwargs)
        except _omegaconf_errors() as error:
            file = self.config_files[-1] if self.config_files else self.prog
            raise UserError(
                f"{file}: {(str(error).splitlines() or [''])[0]}; check what is between ${{ and }}"
            ) from error
        self._check_groups(config)
        return config

    def instantiate_settings(self, config: Any) -> Any:
        """The typed settings of a parsed `config`. A value out of range is a UserError with the config file's line; so is an
        object, such as a logger, that cannot be made.
        """
        with self.located():
            try:
                return self.instantiate(config)
            except ValueError as error:  # of a class that a setting names jsonargparse reports all types that it tried
                if (line := _not_made(str(error))) is None:
                    raise
                raise UserError(line) from error

    @contextmanager
    def located(self) -> Iterator[None]:
        """Put the place of a setting (the config file's line, or the option's dashes) before the message of a SettingError."""
        try:
            yield
        except SettingError as error:
            raise UserError(f"{self.where(error.key)}{error}") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(self.explain(message)) from ex

    def known_keys(self) -> list[str]:
        """The names of all options, without their dashes."""
        return [name[2:] for action in self._actions for name in action.option_strings if name.startswith("--")]

    def explain(self, message: str) -> str:
        """jsonargparse's message as one line, with the config file's line and the nearest valid name where they help."""
        message = " ".join(message.split())
        if found := re.match(r"unrecognized arguments: (.*)", message):
            words = found[1].split()
            word = next((w for w in words if w.startswith("--")), words[0])
            name = word.removeprefix("--").partition("=")[0]
            if name == "seed_everything" and "seed" in self.known_keys():
                return "unknown argument '--seed_everything': Lightning's name; use --seed"
            close = nearest(name, self.known_keys()).replace("'", "'--", 1) if word.startswith("--") else ""
            return f"unknown argument '{word.partition('=')[0]}'.{close} See '{self.prog} --help'"
        if found := re.search(r"(?:Group '([^']*)' does not accept o|O)ption '([^']*)'", message):
            key = ".".join(filter(None, found.groups()))
            place = self.where(key).removeprefix("--")
            return f"{place}unknown config key '{key}'.{nearest(key, self.known_keys())} See '{self.prog} --help'"
        if found := re.search(r"(File does not exist|Path is not a file): '([^']*)'", message):
            return f"{found[2]}: {'no such file' if found[1].startswith('File') else 'not a file'}; check --config"
        if found := re.search(r'Parser key "([^"]*)": ?(.*)', message):
            return (
                f"{self.where(*found.groups())}{found[1]}: {self._expected(*found.groups())}; see '{self.prog} --help'"
            )
        if message.startswith(("Problems parsing config", "Unexpected config")):
            name = self.config_files[-1] if self.config_files else "config"
            return f"{name}: not a YAML mapping of options: {message.partition(':')[2].strip() or 'it is empty'}"
        if found := re.match(r"the following arguments are required: (.*)", message):
            missing = ", ".join(self._as_given(name) for name in found[1].split(", "))
            return f"{self.prog} needs {missing}. See '{self.prog} --help'"
        if found := re.match(r"argument (?:-\w/)?(--\S+): expected one argument", message):
            return f"{found[1]} needs a value. See '{self.prog} --help'"
        return message

    def _as_given(self, key: str) -> str:
        """How a command line gives `key`: as an option, or, of an argument without a name, as the usage line shows it."""
        unnamed = {action.dest: action.metavar or action.dest for action in self._actions if not action.option_strings}
        return str(unnamed.get(key, f"--{key}"))

    def where(self, key: str, detail: str = "") -> str:
        """What to write before `key`: '--' if the command line sets it, 'file:line: ' if a config file does, 'VARIABLE: ' if an
        environment variable does and counts, else nothing.

        `detail`: jsonargparse's account of a wrong value. It reads all variables, also those that do not count.
        """
        variable = self._variable(key)
        value = os.environ.get(variable) if self.default_env else None
        if value and (f"value: {value}" in detail or f"'{value}'" in detail):
            return f"{variable}: "
        if any(word.partition("=")[0] == f"--{key}" for word in self.words):
            return "--"
        files = [Path(name) for name in reversed(self.config_files)]
        if value and not any(line_of_key(path, key, exactly=True) for path in files):
            return f"{variable}: "
        for path in files:
            if (line := line_of_key(path, key)) is not None:
                return f"{path}:{line}: "
        return ""

    def _variable(self, key: str) -> str:
        """The environment variable of an option."""
        return f"{self.env_prefix}_{key.replace('.', '__')}".upper()

    def _check_environment(self) -> None:
        """Raise UserError for a variable that is named like an option of a group, and is none: nobody would read it."""
        known = {self._variable(key): key for key in self.known_keys()} if self.default_env else {}
        for name in os.environ:
            parts = name.split("__")
            if not known or len(parts) < 2 or not name.startswith(f"{self.env_prefix}_"):
                continue
            if not any("__".join(parts[:length]) in known for length in range(2, len(parts) + 1)):
                close = nearest(name, known)
                raise UserError(f"environment variable {name}: no such setting.{close} See '{self.prog} --help'")

    def _refuse_repetition(self) -> None:
        """Raise UserError if an option that takes one value is given twice; the first value would be lost without a word."""
        single = {f"--{key}" for key in self.known_keys()} - {"--config", *(f"--{key}" for key in self.several)}
        given = [option for word in self.words if (option := word.partition("=")[0]) in single]
        if repeated := [option for option in given if given.count(option) > 1]:
            raise UserError(f"{repeated[0]} is given more than once; give it once")

    def _refuse_empty(self) -> None:
        """Raise UserError for an option whose value has no text: a shell's variable that is not set, for instance. As a path it
        would be the current folder."""
        options = {f"--{key}" for key in self.known_keys()}
        for word, after in itertools.pairwise([*self.words, "--"]):
            option, equals, value = word.partition("=")
            if option in options and not value and (equals or not after):
                raise UserError(f"{option} is empty; give a value, or leave it out")

    def _check_files(self) -> None:
        """Raise UserError for a config file that is no text, that sets something twice (the first would be lost without a
        word), that contains itself, or in which a group of options is empty."""
        groups = {key.partition(".")[0] for key in self.known_keys() if "." in key}
        for file in self.config_files:
            if not Path(file).is_file():
                continue  # said when it is parsed
            top = compose_yaml(Path(file))
            _refuse_repeated_keys(file, top)
            self._refuse_other_names(file, top, "")
            for name, value in top.value if isinstance(top, yaml.MappingNode) else []:
                if name.value in groups and value.tag == "tag:yaml.org,2002:null":
                    line = name.start_mark.line + 1
                    raise UserError(
                        f"{file}:{line}: '{name.value}' is empty; give some of its options, or remove the line"
                    )

    def _refuse_other_names(self, file: str, node: Any, prefix: str) -> None:
        """Raise UserError for a name of an option that is no text, such as `1: 2`. `prefix`: of the options in `node`."""
        for name, value in node.value if isinstance(node, yaml.MappingNode) else []:
            if name.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                line = name.start_mark.line + 1
                raise UserError(
                    f"{file}:{line}: the name of an option is a text; write it in quotes, or remove the line"
                )
            group = f"{prefix}{name.value}."
            if any(key.startswith(group) for key in self.known_keys()):
                self._refuse_other_names(file, value, group)

    def _check_lists(self) -> None:
        """Raise UserError if a config file gives an argument without a name other than as a list of words: jsonargparse's
        message names neither the file nor what is expected, and it fails on a mapping."""
        unnamed = [action.dest for action in self._actions if not action.option_strings]
        for file in self.config_files:
            if not Path(file).is_file():
                continue  # said when it is parsed
            content = read_yaml(Path(file))
            for key in unnamed:
                value = content.get(key) if isinstance(content, dict) else None
                if value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value)):
                    continue
                fix = f"; write {key}: [{value}]" if isinstance(value, str) else ""
                raise UserError(
                    f"{file}:{line_of_key(Path(file), key)}: {key}: expected a list of words, found '{value}'{fix}"
                )

    def _check_groups(self, config: Any) -> None:
        """Raise UserError if a group of options was given a single value (`evoformer: 3`), which jsonargparse lets pass."""
        for action in self._actions:
            if action.metavar == "CONFIG" and action.dest != "config":
                value = config.get(action.dest)
                if value is not None and not isinstance(value, Mapping | Namespace):
                    place = self.where(action.dest, f"'{value}'")
                    raise UserError(
                        f"{place}{action.dest}: expected {self._group(action.dest)}, found '{value}'; see '{self.prog} --help'"
                    )

    def _group(self, key: str) -> str:
        """'a group of options (a, b, …)', with the options of the group `key`; empty if there are none."""
        names = {
            name.removeprefix(f"{key}.").split(".")[0].removesuffix("+")
            for name in self.known_keys()
            if name.startswith(f"{key}.")
        }
        return f"a group of options ({', '.join(sorted(names))})" if names else ""

    def _expected(self, key: str, detail: str) -> str:
        """'expected int or null, found x' from jsonargparse's account of a value of the wrong type."""
        plain = re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.(?=\w)", lambda m: m[1] or "", detail)
        for pattern, word in ((r"\bNoneType\b", "null"), (r"\bPath\b(?! is)", "path"), (r"Literal\[(.*?)\]", r"\1")):
            plain = re.sub(pattern, word, plain)
        if found := re.search(r"Problem with given class_path '([^']*)': (.*?)(?: - |$)", plain):
            return f"class '{found[1]}': {found[2]}"
        if found := re.search(r" - (unknown config key '[^']*'\.(?: Did you mean '[^']*'\?)?)", plain):
            return found[1].removesuffix(".")
        if found := re.search(r" - \S+ needs --(\w+)\. See .*class_path='([^']*)'", plain):
            return f"class '{found[2]}' needs '{found[1]}' in init_args"
        if found := re.search(r"Subtypes: \[(.*?)\] Errors:.*Given value: (.*)$", plain):
            return f"expected {found[1].replace(', ', ' or ')}, found '{found[2]}'"
        if found := re.search(r"Expected an? (.*?)\.? Got value: (.*)$", plain):
            return f"expected {found[1].replace(', ', ' or ')}, found '{found[2]}'"
        if (group := self._group(key)) and (found := re.search(r"Unable to load config '([^']*)'", plain)):
            return f"expected {group}, found '{found[1]}'"
        return plain


class HelpFormatter(DefaultHelpFormatter):
    """Help without entries for whole groups of options given as files; wide enough for one-line usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_help_position": 44, "width": 120, **kwargs})

    def _expand_help(self, action: argparse.Action) -> str:
        """Types as a user would write them: path, str | list[str] | null; none where the choices are listed already."""
        text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", lambda found: found[1].lower(), super()._expand_help(action))
        text = re.sub(r"\n +", "\n", text)  # a docstring's indentation, which --print_config=comments would keep
        text = re.sub(r"type: Literal\[[^\]]*\], ", "", text)
        return re.sub(r"Union\[((?:[^\[\]]|\[[^\[\]]*\])*)\]", lambda found: found[1].replace(", ", " | "), text)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Keep the lines of a text; indented ones (examples) are not wrapped."""
        lines = text.splitlines()
        return "\n".join(
            x if x.startswith("  ") else super(HelpFormatter, self)._fill_text(x, width, indent) for x in lines
        )

    def add_argument(self, action: argparse.Action) -> None:
        if action.metavar != "CONFIG" or action.dest == "config":
            super().add_argument(action)


def _not_made(message: str) -> str | None:
    """One line of why an object that a setting names, alone or in a list, could not be made, from jsonargparse's message; None
    if the message is of something else."""
    found = re.search(r"Problem with given class_path '([^']*)':(.*?)(?=\n\s*- |\nGiven value|$)", message, re.DOTALL)
    if found is None:
        return None
    name, reason = found[1], " ".join(found[2].split())
    if package := re.search(r"Requirement '(([\w.-]+)[^']*)' not met|Module not found: '(([\w.-]+))'", reason):
        needed, alone = (group for group in package.groups() if group)
        return f"{name} needs {needed}, which is not installed; pip install {alone} --upgrade, or leave it out"
    return f"{name}: {reason}; check its init_args and what it needs"


def with_underscores(words: list[str]) -> list[str]:
    """`--extra-msa` and `--extra_msa` are the same option."""
    return [
        name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word
        for word in words
        for name, equals, value in [word.partition("=")]
    ]


def _omegaconf_errors() -> tuple[type[Exception], ...]:
    """What OmegaConf raises; nothing if it is not loaded, which help would wait for."""
    omegaconf = sys.modules.get("omegaconf")
    return () if omegaconf is None else (omegaconf.errors.OmegaConfBaseException,)


def _refuse_repeated_keys(file: str, node: Any) -> None:
    """Raise UserError for the first mapping in a YAML `node` with two equal keys."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(file, item)
    if isinstance(node, yaml.MappingNode):
        lines: dict[Any, int] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if isinstance(name, yaml.ScalarNode) and lines.setdefault(name.value, line) != line:
                raise UserError(
                    f"{file}:{line}: '{name.value}' is here and on line {lines[name.value]}; write it once, with all that "
                    "belongs to it"
                )
            _refuse_repeated_keys(file, value)


def line_of_key(path: Path, key: str, exactly: bool = False) -> int | None:
    """The line of a YAML file (from 1) that sets the dotted `key`, or, unless `exactly`, the innermost group of it that is
    there; None if there is none, or if the file cannot be read."""
    try:
        node = compose_yaml(path)
    except UserError:
        return None
    line = None
    for part in key.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        match = next(((name, value) for name, value in pairs if name.value == part), None)
        if match is None:
            return None if exactly else line
        line, node = match[0].start_mark.line + 1, match[1]
    return line


def leaves(settings: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of all single settings of nested dataclasses."""
    for item in dataclasses.fields(settings):
        value, key = getattr(settings, item.name), f"{where}.{item.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, key)
        else:
            yield key, value


def _as_list(option: str, words: list[str]) -> list[str]:
    """`words` with one list of all values in the place of an `option` that is given several times."""
    values = _values_of(option, words)
    if len(values) < 2:
        return words
    rest: list[str] = []
    skipped = False
    for before, word in itertools.pairwise(["", *words]):
        skipped = before == option and not skipped
        if not skipped and word != option and not word.startswith(f"{option}="):
            rest.append(word)
    return [*rest, f"{option}={json.dumps(values)}"]


def _values_of(option: str, words: list[str]) -> list[str]:
    values = [after for word, after in itertools.pairwise(words) if word == option]
    return values + [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]

"""Reads the names of the settings that a command line and its YAML files give, before a parser exists.

A name that is no option is refused here, with the file's line and the nearest name. So a mistyped option of `evodsp fit` is
reported before Lightning is imported, and no parser's message has to be understood.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from evodsp.errors import UserError, nearest
from evodsp.reading.yaml_files import compose_yaml


@dataclass(frozen=True)
class Given:
    """A setting, or a group of them, that the command line or a config file gives."""

    key: str
    place: str
    """Prefix of the key in messages: '--', or 'file:line: '."""
    value: str | yaml.Node | None


@dataclass(frozen=True)
class Names:
    """The names that a command line and its config files may use."""

    prog: str
    known: frozenset[str]
    """Names of options, without dashes, and of positional arguments. jsonargparse checks the names below one of them."""
    from_files: bool = True
    """Whether --config names files of these options, and not a file of another command."""
    several: frozenset[str] = frozenset()
    """Names of options that may be repeated, once for each value."""
    former: Mapping[str, str] = field(default_factory=dict)
    """For each setting of an earlier version, the message for those who still use it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of options, each with its option."""

    def group(self, key: str) -> str:
        """'a group of options (a, b, …)', with the options of the group `key`; empty if there are none."""
        names = {name.removeprefix(f"{key}.").split(".")[0].removesuffix("+") for name in self.below(key)}
        return f"a group of options ({', '.join(sorted(names))})" if names else ""

    def below(self, key: str) -> list[str]:
        """The options of the group `key`. The help of an option's classes (`--logger.help`) makes it no group."""
        return [name for name in self.known if name.startswith(f"{key}.") and name != f"{key}.help"]

    def has(self, key: str) -> bool:
        """Whether `key` is an option or a group, or a part of an option's value (`logger.init_args.name`)."""
        parts = key.removesuffix("+").split(".")
        upper = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        if upper[-1] in self.known or self.below(upper[-1]):
            return True
        return any(x in self.known and not self.below(x) for x in upper)

    def check(self, key: str, place: str, kind: str, value: str | None) -> None:
        """Raise UserError if `key` is unknown, or if it is a group whose value is not the name of an existing file."""
        if key in self.former:
            raise UserError(f"{place.removeprefix('--')}{key} {self.former[key]}")
        if not self.has(key):
            dashes = "--" if place == "--" else ""
            groups = {name.rpartition(".")[0] for name in self.known} - {""}
            close = nearest(key, self.known | groups).replace("'", f"'{dashes}", 1)
            where = place.removeprefix("--")
            raise UserError(f"{where}unknown {kind} '{dashes}{key}'.{close} See '{self.prog} --help'")
        if value is not None and "${" not in value and (group := self.group(key)) and not Path(value).is_file():
            raise UserError(f"{place}{key}: expected {group}, found '{value}'; see '{self.prog} --help'")


def given_settings(words: list[str], names: Names) -> list[Given]:
    """The settings of the config files, then those of the command line. Raises UserError for an unknown name, for a setting
    that is given twice (one value would be lost silently) or empty (an unset shell variable, for instance), and for a
    config file that is no mapping of options."""
    options: list[Given] = []
    _refuse_bare_names(words, names)
    for word, after in itertools.pairwise([*words, "--"]):
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            continue
        text = value if equals else None if after.startswith("--") else after
        names.check(key, "--", "argument", text)
        if text == "":
            raise UserError(f"--{key} is empty; give a value, or leave it out")
        if key not in (*names.several, "config") and not key.endswith("+") and key in {one.key for one in options}:
            raise UserError(f"--{key} is given more than once; give it once")
        options.append(Given(key, "--", text))
    return [*(one for file in config_files(words) for one in _settings_of_file(file, names)), *options]


def _refuse_bare_names(words: list[str], names: Names) -> None:
    """Raise UserError for an option without its dashes, key=value, as programs that use Hydra take it."""
    for before, word in itertools.pairwise(["", *words]):
        key, equals, value = word.lstrip("+~").partition("=")
        is_value = before.startswith("--") and "=" not in before
        if equals and not is_value and names.has(key) and not Path(word).exists():
            raise UserError(f"{word}: an option begins with two dashes; write --{key} {value}")


def _settings_of_file(file: str, names: Names) -> Iterator[Given]:
    is_file = Path(file).is_file()
    if not names.from_files and not is_file:
        return  # the command reports the files that it cannot read
    if not is_file:
        raise UserError(f"{file}: {'not a file' if Path(file).exists() else 'no such file'}; check --config")
    top = compose_yaml(Path(file))
    if names.from_files and not isinstance(top, yaml.MappingNode):
        found = "it is empty" if top is None else Path(file).read_text("utf-8-sig").strip()
        raise UserError(f"{file}: not a YAML mapping of options: {found}")
    _refuse_repeated_keys(file, top)
    _refuse_both_names(file, top, names.aliases)
    yield from _settings_below(file, top, "", names if names.from_files else None)


def _settings_below(file: str, node: yaml.Node | None, above: str, names: Names | None) -> Iterator[Given]:
    """The settings in a YAML `node`; their names begin with `above`. `names`: the allowed names; None for the file of
    another command.
    """
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        place = f"{file}:{name.start_mark.line + 1}: "
        if name.tag == "tag:yaml.org,2002:merge":
            for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _settings_below(file, part, above, names)
            continue
        key = f"{above}{name.value}"
        if names is not None:
            _check_name(key, name, value, place, names)
            key = names.aliases.get(key, key)
        yield Given(key, place, value)
        if names is None or names.below(key):
            yield from _settings_below(file, value, f"{key}.", names)


def _check_name(key: str, name: yaml.Node, value: yaml.Node, place: str, names: Names) -> None:
    """Raise UserError if a file's `name`, in full `key`, is not that of an option, or is that of a group without options."""
    if name.tag != "tag:yaml.org,2002:str":
        raise UserError(f"{place}the name of an option is a text; write it in quotes, or remove the line")
    empty = value.tag == "tag:yaml.org,2002:null"
    if empty and names.below(key):
        raise UserError(f"{place}'{key}' is empty; give some of its options, or remove the line")
    text = value.value if isinstance(value, yaml.ScalarNode) and not empty else None
    while not names.has(key) and isinstance(value, yaml.MappingNode) and value.value:
        key, value = f"{key}.{value.value[0][0].value}", value.value[0][1]
    names.check(key, place, "config key", text)


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


def _refuse_both_names(file: str, top: yaml.Node | None, aliases: Mapping[str, str]) -> None:
    """Raise UserError for an option that a file gives under two names: one value would be lost silently."""
    pairs = top.value if isinstance(top, yaml.MappingNode) else ()
    lines = {name.value: name.start_mark.line + 1 for name, _ in pairs if isinstance(name, yaml.ScalarNode)}
    for name, option in aliases.items():
        if name in lines and option in lines:
            raise UserError(
                f"{file}:{lines[name]}: '{name}' is another name of '{option}' on line {lines[option]}; write one of them"
            )


def with_underscores(words: list[str]) -> list[str]:
    """The word with underscores in an option's name: `--extra-msa` and `--extra_msa` are the same option."""
    return [
        name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word
        for word in words
        for name, equals, value in [word.partition("=")]
    ]


def with_options(words: list[str], aliases: Mapping[str, str]) -> list[str]:
    """The words with options in the place of their other names. `aliases`: for each other name its option, without dashes."""
    return [
        f"--{aliases[name[2:]]}{equals}{value}" if name.startswith("--") and name[2:] in aliases else word
        for word in words
        for name, equals, value in [word.partition("=")]
    ]


def config_files(words: list[str]) -> list[str]:
    """The config files that a command line names."""
    return [file for option in ("--config", "-c") for file in values_of(option, words)]


def values_of(option: str, words: list[str]) -> list[str]:
    """All values that a command line gives an option."""
    values = [after for word, after in itertools.pairwise(words) if word == option]
    return values + [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]

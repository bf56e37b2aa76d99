"""The command line's parser: jsonargparse, with option names checked before parsing, and errors of one line.

Typed dataclasses become options (`--model.evoformer.blocks 8`) and their attribute docstrings the help. This module does
not import torch, so that help is quick. `OneLineErrors` can be mixed into Lightning's parser class.

A name that is no option, on the command line or in its YAML files, is refused before a parser sees it, with the file's line and
the nearest name (`given_settings`). So a mistyped option of `evodsp fit` is reported before Lightning is imported, and no
parser's message has to be understood. jsonargparse's later errors keep its own words, behind the place of the setting that they
quote; for settings of a plain type the message is evodsp's.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin

import yaml  # type: ignore[import-untyped]
from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from evodsp.errors import SettingError, UserError, nearest
from evodsp.reading.text_files import compose_yaml

set_parsing_settings(docstring_parse_attribute_docstrings=True)


OF_OTHERS = {
    name: option
    for option, names in {
        "--output": "o out_dir output_dir",
        "--relax best": "amber models_to_relax num_relax",
        "--device": "accelerator use_gpu_relax",
        "--weights": "model_order model_type model_names",
        "--weights all_ptm (of complexes all_multimer_v3)": "num_models",
        "--msa_server": "use_msa_server msa_server_url host_url",
        "--msa_server (mmseqs2); without it and --alignments the sequence is predicted alone": "msa_mode",
        "--recycles": "num_recycle num_recycles recycling_steps",
        "--seeds": "num_seeds diffusion_samples num_multimer_predictions_per_model",
        "--first_seed": "random_seed",
        "--stop_tolerance": "recycle_early_stop_tolerance",
        "--templates": "custom_template_path template_mmcif_dir",
        "--msa_server_templates": "use_templates",
        "--msa_server_pairing": "pair_strategy pairing_strategy msa_pairing_strategy",
        "--msa_clusters and --extra_msa": "max_msa max_seq max_extra_seq max_msa_seqs",
    }.items()
    for name in names.split()
}
"""Names of ColabFold's, Boltz's and AlphaFold's options, each with ours for the same thing."""
FLAGS_OF_OTHERS = {"templates": "--msa_server_templates"}
"""Options that take no value in ColabFold and one here, each with ours for the same thing."""


F = TypeVar("F", bound=Callable[..., Any])


def checks_names(aliases: Mapping[str, str] = MappingProxyType({}), also: Iterable[str] = ()) -> Callable[[F], F]:
    """A decorator: an argument whose name the function does not have is a UserError with the nearest name, or with ours for
    another program's name and those of `aliases`. `also`: names that the function takes without a parameter of their own.
    """

    def of(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        known = {*also, *(one.name for one in parameters if one.kind is not one.VAR_KEYWORD)}

        @wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            for name in options.keys() - known:
                ours = aliases.get(name) or OF_OTHERS.get(name, "").replace("--", "")
                is_ours = ours.partition(" ")[0] in known
                close = f" evodsp calls it {ours}." if is_ours else nearest(name, known)
                where = f"evodsp.{function.__name__}"
                raise UserError(f"{where}: no option '{name}'.{close} See help({where})")
            return function(*args, **options)

        return cast(F, checked)

    return of


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

    prog: str = ""
    known: frozenset[str] = frozenset()
    """Names of options, without dashes, and of positional arguments. jsonargparse checks the names below one of them."""
    from_files: bool = True
    """Whether --config names files of these options, and not a file of another command."""
    several: frozenset[str] = frozenset()
    """Names of options that may be repeated, once for each value."""
    former: Mapping[str, str] = field(default_factory=dict)
    """Messages for settings of earlier versions, by the setting."""
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
            close = nearest(key.replace("-", "_"), self.known | groups).replace("'", f"'{dashes}", 1)
            where, ours = place.removeprefix("--"), OF_OTHERS.get(key.replace("-", "_"), "")
            if ours and self.has(ours.split()[0][2:]):
                close, dashes = f" evodsp calls it {ours}.", dashes[: len(key)]
            raise UserError(f"{where}unknown {kind} '{dashes}{key}'.{close} See '{self.prog} --help'")
        if value is not None and "${" not in value and (group := self.group(key)) and not Path(value).is_file():
            raise UserError(f"{place}{key}: expected {group}, found '{value}'; see '{self.prog} --help'")


class OneLineErrors(ArgumentParser):
    """Raises UserError with one line where jsonargparse would print its usage and exit."""

    rules: Names = Names()
    """Names in `names` beside the options of this parser."""
    alone: Mapping[str, str] = MappingProxyType({})
    """Values of options that are given without a value, by their names without dashes."""
    given: Sequence[Given] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": HelpFormatter, **kwargs})

    @property
    def names(self) -> Names:
        options = {option for action in self._actions for option in (action.option_strings or [f"--{action.dest}"])}
        known = frozenset(option[2:] for option in options if option.startswith("--"))
        from_files = any(isinstance(action, ActionConfigFile) for action in self._actions)
        return replace(self.rules, prog=self.prog, known=known, from_files=from_files)

    @property
    def places(self) -> dict[str, str]:
        """Place of each setting that is given, where it counts, as `Given` has it."""
        return {one.key: one.place for one in self.given}

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        for action in self._actions:
            if getattr(action, "_typehint", None) is bool:  # `--raw` alone means `--raw true`
                action.nargs, action.const = "?", True
            elif action.dest in self.alone:
                action.nargs, action.const = "?", self.alone[action.dest]
            # Other names are shown in the help, and taken from files. On the command line, `plain_words` has replaced them.
            others = {f"--{name}" for name, option in self.rules.aliases.items() if option == action.dest}
            action.option_strings = [*action.option_strings, *sorted(others - {*action.option_strings})]
        names = self.names
        words = plain_words(list(args or []), self.rules.aliases, names.has)
        self.given = given_settings(words, names)
        self._check_lists()
        self._check_environment()
        try:
            return super().parse_args(_as_lists(words, self.rules.several), *rest, **kwargs)
        except _omegaconf_errors() as error:
            file = next((one.value for one in reversed(self.given) if one.key == "config"), self.prog)
            raise UserError(
                f"{file}: {(str(error).splitlines() or [''])[0]}; check what is between ${{ and }}"
            ) from error

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
        see = f"see '{self.prog} --help'"
        if without := re.match(r"argument --([\w.]+)\S*: expected one argument", message):
            ours = FLAGS_OF_OTHERS.get(without[1])
            close = f", or write {ours}, which is what ColabFold means by it" if ours else ""
            return f"--{without[1]}: no value behind it; give one{close}; {see}"
        key = next((name for name in quoted if name in names.known), None)
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
        places = self.places
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


def plain_words(words: list[str], aliases: Mapping[str, str], known: Callable[[str], bool]) -> list[str]:
    """The words with the names of options as the parser has them: with underscores (`--extra-msa` is `--extra_msa`), and with
    options in the place of their other names (`aliases`). A name that is not `known` stays as it was typed."""
    found: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            key = name[2:].replace("-", "_")
            if known(key := aliases.get(key, key)):
                name = f"--{key}"
        found.append(f"{'--config' if name == '-c' else name}{equals}{value}")
    return found


def _as_lists(words: list[str], several: frozenset[str]) -> list[str]:
    """The words with repetitions of an option of `several` in one list of all its values, behind the others: argparse takes
    arguments without a name only if they stand together."""
    for option in (f"--{name}" for name in several):
        values: list[str] = []
        rest: list[str] = []
        for before, word in itertools.pairwise(["", *words]):
            name, equals, value = word.partition("=")
            if before == option:
                values.append(word)
            elif name == option and equals:
                values.append(value)
            elif word != option:
                rest.append(word)
        if len(values) > 1:
            words = [*rest, f"{option}={json.dumps(values)}"]
    return words


def given_settings(words: list[str], names: Names) -> list[Given]:
    """The settings of the config files, then those of the command line `words` (`plain_words`). Raises UserError for an unknown
    name, for a setting that is given twice (one value would be lost silently) or empty (an unset shell variable, for instance),
    and for a config file that is no mapping of options."""
    options: list[Given] = []
    _refuse_bare_names(words, names)
    for word, after in itertools.pairwise([*words, "--"]):
        if word[:1] == "-" and word[1:] in OF_OTHERS:
            names.check(word[1:], "--", "argument", None)
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
    files = [one.value for one in options if one.key == "config" and isinstance(one.value, str)]
    return [*(one for file in files for one in _settings_of_file(file, names)), *options]


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
    _refuse_repeated_keys(file, top, names.aliases)
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


def _refuse_repeated_keys(file: str, node: Any, aliases: Mapping[str, str]) -> None:
    """Raise UserError for the first mapping in a YAML `node` with two equal keys, or with two names (`aliases`) of one option:
    one value would be lost silently."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(file, item, {})
    if isinstance(node, yaml.MappingNode):
        earlier: dict[str, yaml.ScalarNode] = {}
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode):
                first = earlier.setdefault(aliases.get(name.value, name.value), name)
                line, other = name.start_mark.line + 1, first.start_mark.line + 1
                if first.value != name.value:
                    same = f"is another name of '{first.value}' on line {other}; write one of them"
                    raise UserError(f"{file}:{line}: '{name.value}' {same}")
                if first is not name:
                    same = f"is here and on line {other}; write it once, with all that belongs to it"
                    raise UserError(f"{file}:{line}: '{name.value}' {same}")
            _refuse_repeated_keys(file, value, {})

"""The parser of `evodsp fit`, `validate` and `test`, made once a process: hundreds of tests give command lines, and making the
parser and looking its options up take half the time of a short run. A program that gives one command line makes its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_parsers: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {}
"""By the program's name: the parser, the defaults of its options, and those that were set apart from its options."""


@contextmanager
def kept_parsers() -> Iterator[None]:
    """Within it, `TrainingCLI` takes the parser that an earlier one of the same command has made, with its first defaults."""
    from jsonargparse import _core, _subcommands
    from lightning.pytorch.cli import LightningCLI

    make, look_up = LightningCLI.setup_parser, _subcommands.find_action_and_subcommand
    found: dict[tuple[Any, ...], Any] = {}

    def setup_parser(cli: LightningCLI, add: bool, words: dict[str, Any], of_subcommands: dict[str, Any]) -> None:
        name = words["prog"]
        if name not in _parsers:
            make(cli, add, words, of_subcommands)
            _parsers[name] = (
                cli.parser,
                [action.default for action in cli.parser._actions],
                dict(cli.parser._defaults),
            )
        cli.parser, defaults, others = _parsers[name]
        for action, default in zip(cli.parser._actions, defaults, strict=False):  # jsonargparse adds one that has none
            action.default = default
        cli.parser._defaults = dict(others)

    def find_action_and_subcommand(parser: Any, dest: str, exclude: Any = None) -> Any:
        if not any(parser is kept for kept, *_ in _parsers.values()):
            return look_up(parser, dest, exclude)
        key = (id(parser), len(parser._actions), dest, exclude)
        if key not in found:
            found[key] = look_up(parser, dest, exclude)
        return found[key]

    with (
        mock.patch.object(LightningCLI, "setup_parser", setup_parser),
        mock.patch.object(_subcommands, "find_action_and_subcommand", find_action_and_subcommand),
        mock.patch.object(_core, "find_action_and_subcommand", find_action_and_subcommand),
    ):
        yield

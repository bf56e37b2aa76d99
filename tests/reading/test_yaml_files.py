"""YAML, and curves of runs: whatever a file makes a reader raise is one line, of YAML with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evodsp.argument_parser import OneLineErrors
from evodsp.config import ModelConfig
from evodsp.errors import FileFormatError, UserError
from evodsp.packaged import read_run_config
from evodsp.planner.device import load_device
from evodsp.reading.text_files import compose_yaml, parse_yaml, read_yaml
from evodsp.report.runs import read_curve, read_runs

HOSTILE = {
    "deep lists": ("a: " + "[" * 20_000, "maximum recursion depth exceeded"),
    "a long number": ("a: 1\nb: " + "9" * 5000, r":2: .*4300 digits"),
    "a long number in base 16": ("a: 0x" + "f" * 5000, r":1: .*a number of too many digits"),
    "a list as a key": ("? [a, b]\n: c", r":1: .*unhashable key"),
    "an empty number": ("a: !!int ''", r":1: .*string index out of range"),
    "a command": ("a: !!python/object/apply:os.system [ls]", r":1: .*could not determine a constructor"),
    "an unknown alias": ("a: *b", r":1: .*undefined alias 'b'"),
    "two documents": ("--- 1\n--- 2\n", r":2: .*another document"),
    "a control character": ("a: \x07", "special characters are not allowed"),
    "broken": ("a: [", "not YAML that evodsp reads"),
}


@pytest.mark.verify
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_one_line(name: str, tmp_path: Path) -> None:
    """Catches a RecursionError, a ValueError of a number, and an AttributeError of PyYAML."""
    text, message = HOSTILE[name]
    (path := tmp_path / "x.yaml").write_text(text)
    for read in (read_yaml, read_run_config, compose_yaml):
        with pytest.raises(
            UserError, match=rf"x\.yaml{message}" if message[0] == ":" else rf"x\.yaml.*{message}"
        ) as error:
            read(path)
        assert "\n" not in str(error.value)


def test_references_may_be_used(tmp_path: Path) -> None:
    """Catches references to other values that are not written out, and a circle that is no line."""
    (path := tmp_path / "x.yaml").write_text("base: /data\nsets: {train: '${base}/train', all: '${.train}:${base}'}\n")
    assert read_run_config(path)["sets"] == {"train": "/data/train", "all": "/data/train:/data"}
    path.write_text("a: ${b}\nb: ${a}\n")
    with pytest.raises(UserError, match=r"check what is between \$\{ and \}"):
        read_run_config(path)


def parser() -> OneLineErrors:
    made = OneLineErrors(prog="x")
    made.add_argument("--config", action="config")
    made.add_argument("--model", type=ModelConfig, default=ModelConfig())
    return made


def test_every_reader_uses_it(tmp_path: Path) -> None:
    """Catches a reader of YAML of its own: a run's page, a device, and the options of any command."""
    (path := tmp_path / "config.yaml").write_text("a:\n  b: " + "9" * 5000)
    (tmp_path / "curve.csv").write_text("step,epoch,seconds,train/loss\n1,0,1,1\n")

    def device(path: Path) -> Any:
        return load_device(str(path))

    def options(path: Path) -> Any:
        return parser().parse_args(["--config", str(path)])

    def run(path: Path) -> Any:
        return read_runs([path.parent])

    for read in (run, device, options, compose_yaml):
        with pytest.raises(UserError, match=r"config\.yaml:2: .*4300 digits"):
            read(path)


def test_good_files(tmp_path: Path) -> None:
    """Catches a byte-order mark, aliases, merged keys, or a date that is no longer a text, refused or read wrong."""
    (path := tmp_path / "x.yaml").write_text(
        "a: &a {b: 1e3, c: 2020-02-31}\nd: {<<: *a, e: 0x10}\n", encoding="utf-8-sig"
    )
    assert read_yaml(path) == {"a": {"b": "1e3", "c": "2020-02-31"}, "d": {"b": "1e3", "c": "2020-02-31", "e": 16}}
    assert parse_yaml("", "x") is None
    top = compose_yaml(path)
    assert top is not None
    assert top.value[1][0].start_mark.line == 1
    path.write_text("")
    assert compose_yaml(path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"x\.yaml: cannot be read \(No such file or directory\)"),
        (b"a: \xff", r"x\.yaml: not a text in UTF-8 \(byte 4\); save it as UTF-8"),
    ],
)
def test_files_that_are_no_text(content: bytes | None, message: str, tmp_path: Path) -> None:
    """Catches an OSError or a UnicodeDecodeError that reaches the user."""
    if content is not None:
        (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_yaml(tmp_path / "x.yaml")


@pytest.mark.parametrize("text", ["1: 2", "? 3.5\n: c", "model: {null: 2}", "model:\n  channels: {1: 2}", "true: 2"])
def test_names_of_options_are_texts(text: str, tmp_path: Path) -> None:
    """Catches the AttributeError of jsonargparse for a number as the name of an option, at the top or in a group."""
    (path := tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=r"x\.yaml:\d: the name of an option is a text"):
        parser().parse_args(["--config", str(path)])


def test_options_may_be_merged(tmp_path: Path) -> None:
    """Catches `<<` refused as the name of an option."""
    (path := tmp_path / "x.yaml").write_text("model:\n  channels: &c {msa: 7}\n  templates:\n    <<: {blocks: 9}\n")
    assert parser().parse_args(["--config", str(path)]).model.templates.blocks == 9


@pytest.mark.parametrize("text", ["name: 1", "[1]", "1", "1: 2"])
def test_a_device_of_other_types(text: str, tmp_path: Path) -> None:
    """Catches the TypeError of an edited device file."""
    (path := tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=r"device .*x\.yaml: (missing or unknown keys|a value of another type)"):
        load_device(str(path))


def test_a_curve_that_another_program_has_saved(tmp_path: Path) -> None:
    """Catches a byte-order mark, which spreadsheets write, taken for a part of the first column's name."""
    (tmp_path / "curve.csv").write_bytes(b"\xef\xbb\xbfstep,train/loss\n7,0.5\n")
    assert read_curve(tmp_path / "curve.csv") == {7: {"step": "7", "train/loss": "0.5"}}


@pytest.mark.parametrize(
    "content",
    [
        "step,loss\n1,2\n".encode("utf-16"),
        "step,größe\n1,2\n".encode("latin-1"),
        b"step,loss\n" + b"9" * 5000 + b",1\n",
    ],
    ids=["utf16", "latin1", "long_number"],
)
def test_a_curve_that_is_none(content: bytes, tmp_path: Path) -> None:
    """Catches tracebacks of the decoder and of a number of thousands of digits."""
    (tmp_path / "curve.csv").write_bytes(content)
    with pytest.raises(FileFormatError, match="no learning curve"):
        read_curve(tmp_path / "curve.csv")

"""What `OneLineErrors` says of a wrong setting: its place, its nearest name, what was expected.

What only jsonargparse can say is compared by the names in it: its words may change with its version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest
from jsonargparse import ActionConfigFile, Namespace

from evodsp.argument_parser import Names, OneLineErrors, plain_words
from evodsp.cli import COMMANDS, SettingsCommand, main
from evodsp.errors import SettingError, UserError
from evodsp.inference.config import PredictConfig


@dataclass(frozen=True)
class Inner:
    """A group."""

    blocks: int = 1
    """Blocks."""
    rate: float | None = None
    """Rate."""

    def __post_init__(self) -> None:
        if self.blocks < 0:
            raise SettingError("inner.blocks", self.blocks, "at least 0")


@dataclass(frozen=True)
class Outer:
    """Options."""

    output: Path
    """Output."""
    kind: Literal["one", "two"] = "one"
    """Kind."""
    raw: bool = False
    """Raw."""
    inner: Inner = field(default_factory=Inner)
    """Inner."""


def parser() -> OneLineErrors:
    made = OneLineErrors(prog="evodsp try", parser_mode="omegaconf+")
    made.add_argument("-c", "--config", action=ActionConfigFile)
    made.add_class_arguments(Outer)
    return made


def refused(*words: str) -> str:
    made = parser()
    with pytest.raises(UserError) as caught:
        made.instantiate_settings(made.parse_args(["--output", "x", *words]))
    return str(caught.value)


SEE = "see 'evodsp try --help'"
GROUP = "expected a group of options (blocks, rate)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inner.blocks=3"], "inner.blocks=3: an option begins with two dashes; write --inner.blocks 3"),
        (["+inner.blocks=3"], "+inner.blocks=3: an option begins with two dashes; write --inner.blocks 3"),
        (["--inner.block", "3"], "unknown argument '--inner.block'. Did you mean '--inner.blocks'? See 'evodsp try --help'"),
        (["--inner.blocks", "many"], f"--inner.blocks: expected int, found 'many'; {SEE}"),
        (["--inner.rate=fast"], f"--inner.rate: expected float or null, found 'fast'; {SEE}"),
        (["--kind", "three"], f"--kind: expected 'one' or 'two', found 'three'; {SEE}"),
        (["--raw", "maybe"], f"--raw: expected bool, found 'maybe'; {SEE}"),
        (["--inner", "3"], f"--inner: {GROUP}, found '3'; {SEE}"),
        (["--inner.blocks", "1", "--inner.blocks=2"], "--inner.blocks is given more than once; give it once"),
        (["--output", "y"], "--output is given more than once; give it once"),
        (["--kind="], "--kind is empty; give a value, or leave it out"),
        (["--kind", ""], "--kind is empty; give a value, or leave it out"),
        (["--kind"], f"--kind: no value behind it; give one; {SEE}"),
        (["--inner.blocks", "-1"], "--inner.blocks is -1, but must be at least 0"),
    ],
)  # fmt: skip
def test_a_message_about_an_option(words: list[str], said: str) -> None:
    assert refused(*words) == said


@pytest.mark.parametrize(("words", "named"), [([], "output"), (["--output=x", "stray"], "stray")])
def test_what_jsonargparse_says_is_one_line_with_the_name(words: list[str], named: str) -> None:
    """Catches a usage of twenty lines, and an error that ends the process. Missing, and stray."""
    with pytest.raises(UserError) as caught:
        parser().parse_args(words)
    assert named in str(caught.value)
    assert str(caught.value).endswith("See 'evodsp try --help'")


def test_a_sentence_of_jsonargparse_stands_behind_the_place(tmp_path: Path) -> None:
    """Catches a parser that knows jsonargparse's sentences: another version's are others, and the line must stay."""
    (path := tmp_path / "a.yaml").write_text("raw: true\ninner:\n  blocks: 3\n")
    made = parser()
    made.parse_args(["--output=x", "--config", str(path)])
    assert made.explain("so nicht: 'inner'\n ist falsch") == f"{path}:2: so nicht: 'inner' ist falsch; {SEE}"
    assert made.explain('"output": nein') == f"--output: expected path, found 'x'; {SEE}"
    assert made.explain("nein: 'blcks'") == "nein: 'blcks'. Did you mean 'inner.blocks'? See 'evodsp try --help'"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("inner: {block: 3}", "FILE:1: unknown config key 'inner.block'. Did you mean 'inner.blocks'? See 'evodsp try --help'"),
        ("iner: {blocks: 3}", "FILE:1: unknown config key 'iner.blocks'. Did you mean 'inner.blocks'? See 'evodsp try --help'"),
        ("iner: 3", "FILE:1: unknown config key 'iner'. Did you mean 'inner'? See 'evodsp try --help'"),
        ("raw: true\ninner:\n  blocks: many", "FILE:3: inner.blocks: expected int, found 'many'; SEE"),
        ("raw: true\ninner:\n  blocks: -1", "FILE:3: inner.blocks is -1, but must be at least 0"),
        ("raw: true\ninner: 3", f"FILE:2: inner: {GROUP}, found '3'; SEE"),
        ("- a", "FILE: not a YAML mapping of options: - a"),
        ("", "FILE: not a YAML mapping of options: it is empty"),
        ("inner: {rate: 1}\ninner: {}", "FILE:2: 'inner' is here and on line 1; write it once, with all that belongs to it"),
        ("inner:\n  rate: 1\n  rate: 2", "FILE:3: 'rate' is here and on line 2; write it once, with all that belongs to it"),
        ("raw: true\ninner:\n", "FILE:2: 'inner' is empty; give some of its options, or remove the line"),
        ("raw: true\n1: 2", "FILE:2: the name of an option is a text; write it in quotes, or remove the line"),
        ("kind: ${nope}", "FILE: Interpolation key 'nope' not found; check what is between ${ and }"),
    ],
)  # fmt: skip
def test_a_message_about_a_config_file(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert refused("--config", str(path)) == said.replace("FILE", str(path)).replace("SEE", SEE)


def test_config_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "wide.yaml").write_text("raw: true", encoding="utf-16")
    assert (
        refused("--config", str(tmp_path / "wide.yaml"))
        == f"{tmp_path}/wide.yaml: not a text in UTF-8 (byte 1); save it as UTF-8"
    )
    assert refused("--config", str(tmp_path / "absent.yaml")) == f"{tmp_path}/absent.yaml: no such file; check --config"
    assert refused("--config", str(tmp_path)) == f"{tmp_path}: not a file; check --config"
    assert refused("--config", str(tmp_path / "broken.yaml")).startswith(
        f"{tmp_path}/broken.yaml:2: not YAML that evodsp reads"
    )


def test_config_files_may_be_repeated_and_the_last_wins(tmp_path: Path) -> None:
    """Refusing every repetition would refuse this one too."""
    for name, blocks in (("a", 2), ("b", 3)):
        (tmp_path / f"{name}.yaml").write_text(f"inner: {{blocks: {blocks}}}")
    words = ["--output=x", "--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    assert parser().parse_args(words).inner.blocks == 3


def test_a_config_of_another_command_is_not_checked_by_its_names(tmp_path: Path) -> None:
    """Catches a run's config that another command (`data doctor --config`) refuses because it has other options; and one whose
    line is lost, or in which the first of two equal keys is."""
    made = OneLineErrors(prog="evodsp try")
    made.add_argument("--config", type=str)
    (path := tmp_path / "run.yaml").write_text("seed: 3\nmodel:\n  preset: small\n")
    assert made.parse_args(["--config", str(path)]).config == str(path)
    assert made.where("model.preset") == f"{path}:3: "
    assert made.parse_args(["--config", "quickstart"]).config == "quickstart"
    path.write_text("seed: 3\nseed: 4\n")
    with pytest.raises(UserError, match="'seed' is here and on line 1"):
        made.parse_args(["--config", str(path)])


def test_help_names_types_plainly() -> None:
    """`<class 'Path'>` in the help of every command with a path."""
    text = parser().format_help()
    assert "(required, type: path)" in text
    assert "<class" not in text
    assert "Literal[" not in text


def test_dashes_and_underscores_are_the_same() -> None:
    """Catches an option with dashes that is unknown, and a word that is none and is changed."""
    words = ["--extra-msa", "3", "--msa-clusters=a-b", "x-y", "-x", "--", "--data.batch-size"]
    found = ["--extra_msa", "3", "--msa_clusters=a-b", "x-y", "-x", "--", "--data.batch_size"]
    assert plain_words(words, {}, lambda key: True) == found


class Recorder:
    """What a setting may name by its class."""

    def __init__(self, needs: str) -> None:
        raise ModuleNotFoundError(
            f"Requirement '{needs}>=3.4.1' not met. HINT: Try running `pip install -U '{needs}>=3.4.1'`"
        )


@pytest.mark.parametrize("form", ["{}", "[{}]"])
def test_a_package_that_is_not_installed(form: str) -> None:
    """Catches a traceback of the parser's types, whose last lines name the package that a logger in a list needs."""
    made = OneLineErrors(prog="evodsp try")
    made.add_argument("--logger", type=Recorder | list[Recorder] | bool | None)
    name = f"{__name__}.Recorder"
    words = ["--logger", form.format(f"{{class_path: {name}, init_args: {{needs: comet-ml}}}}")]
    with pytest.raises(UserError) as caught:
        made.instantiate_settings(made.parse_args(words))
    assert str(caught.value).count("comet-ml>=3.4.1' not met") == 1
    assert name in str(caught.value)
    assert "NoneType" not in str(caught.value), "the account of all types that were tried"


def test_another_name_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a name that another command has for the same thing refused, dropped, given twice unseen, or not in the help."""
    for words in (["--place", "x"], ["--place=x"]):
        made = parser()
        made.rules = Names(aliases={"place": "output"})
        assert made.instantiate_settings(made.parse_args(words)).output == Path("x")
    with pytest.raises(UserError, match=r"^--output is given more than once"):
        made.parse_args(["--output", "x", "--place", "y"])
    with pytest.raises(SystemExit):
        made.parse_args(["--help"])
    # From Python 3.13 on, argparse prints the metavar once.
    assert re.search(r"--output( OUTPUT)?, --place OUTPUT", capsys.readouterr().out)


def test_another_name_in_a_file(tmp_path: Path) -> None:
    """Catches an option that cannot be copied from the command line into a file, a value that a second name hides, and an
    error that does not say where the value is."""
    made = OneLineErrors(prog="evodsp predict")
    made.add_argument("--config", action=ActionConfigFile)
    made.add_class_arguments(PredictConfig)
    made.rules = Names(aliases=PredictConfig.OTHER_NAMES)
    file, other = tmp_path / "a.yaml", tmp_path / "b.yaml"

    def read(text: str, *words: str) -> Namespace:
        file.write_text(text)
        return made.parse_args(["--config", str(file), "--output", "out", *words])

    found = read("alignment_dir: x\ntemplate_structure_dir: y\n")
    assert (found.alignments, found.templates) == (Path("x"), Path("y"))
    assert read("alignment_dir: x\n", "--alignments", "z").alignments == Path("z")
    other.write_text("alignments: z\n")
    assert read("alignment_dir: x\n", "--config", str(other)).alignments == Path("z"), "the last file counts"
    with pytest.raises(
        UserError, match=rf"^{file}:3: 'alignment_dir' is another name of 'alignments' on line 2; write"
    ):
        read("seeds: 2\nalignments: z\nalignment_dir: x\n")
    with pytest.raises(UserError, match=rf"^{file}:2: .*alignments"):
        read("seeds: 2\nalignment_dir: [x, y]\n")


@pytest.mark.parametrize("command", ["predict", "estimate", "data doctor"])
def test_other_names_are_no_options(command: str) -> None:
    """Catches an alias of no option, or one that hides an option."""
    made = COMMANDS[command]
    assert isinstance(made, SettingsCommand)
    module, _, name = made.settings.partition(":")
    settings = getattr(import_module(module), name)
    options = {one.name for one in fields(settings)}
    assert settings.OTHER_NAMES
    assert set(settings.OTHER_NAMES.values()) <= options
    assert not set(settings.OTHER_NAMES) & options


def test_a_heading_says_nothing_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches 'Raises UserError …' of a docstring in the help."""
    assert main(["selftest", "--help"]) == 0
    said = capsys.readouterr().out
    assert "Devices and limits of a check of a machine.:" not in said
    assert "Devices and limits of a check of a machine" in said
    assert "Raises" not in said

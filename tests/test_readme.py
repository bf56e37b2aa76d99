"""Documentation that runs: every command and every Python block of README.md is executed as it stands there.

Commands run in a folder that looks like the repository's root (its `data` and `configs`), in the README's order, so that a
later one finds what an earlier one left. Options that make them small are appended; nothing else is changed. A command that
no rule below knows fails, so that a new one cannot go untested.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from evodsp.cli import main
from evodsp.training.csv_logger import read_curve
from tests.conftest import SHARED

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()

STEPS = 2
FEW_ROWS = [
    f"--data.{part}.{rows}={n}"
    for part in ("train", "validation")
    for rows, n in (("msa_clusters", 4), ("extra_msa", 4))
]
SMALL = [
    *FEW_ROWS,
    "--data.train.crop_size=16",
    "--data.train.recycles=0",
    "--data.validation.recycles=0",
    f"--data.samples_per_epoch={STEPS}",
    "--model.structure_module.iterations=1",
]
BUNDLED = ["--data.train_chains=[s001_A]", "--data.validation_chains=[s005_A]"]


@dataclass(frozen=True)
class Block:
    """A fenced block of the README: its language, its text, and the line (from 1) of its fence."""

    language: str
    text: str
    line: int

    def commands(self) -> list[str]:
        """Its lines, those that end with a backslash joined with the next."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [line.strip() for line in joined.splitlines() if line.strip()]


def blocks() -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [Block(match[1], match[2], README.count("\n", 0, match.start()) + 1) for match in found]


def commands() -> list[tuple[int, str]]:
    """(line of the block, command) of every block that holds commands."""
    return [(block.line, command) for block in blocks() if block.language == "" for command in block.commands()]


# ---- One rule for every kind of command: it runs or checks the command, and raises if the README is wrong. ----


def run(words: list[str]) -> None:
    """`evodsp` in this process."""
    assert main(words) == 0


def run_fit(words: list[str]) -> None:
    """A resumed run must have something left to do; one on DIR is given folders that are there."""
    steps = 2 * STEPS if "--ckpt_path" in words else STEPS
    small = [*SMALL, f"--trainer.max_steps={steps}"]
    if "--trainer.max_steps" in words:  # an option may be given once only
        at = words.index("--trainer.max_steps")
        words = words[:at] + words[at + 2 :]
    if "DIR" not in words:
        run([*words, *small])
        return
    for name, folder, chains in (("bundled", Path("data"), BUNDLED), ("real", SHARED / "data", [])):
        if folder.is_dir():
            with_folders = list(words)
            for option, sub in (("--data.alignment_dir", "alignments"), ("--data.structure_dir", "mmcif_files")):
                with_folders[words.index(option) + 1] = str(folder / sub)
            assert "DIR" not in with_folders
            run([*with_folders, *small, *chains, f"--output=runs/{name}"])


def run_validate(words: list[str]) -> None:
    run([*words, *FEW_ROWS, "--data.validation.recycles=0"])


def run_synthesize(words: list[str]) -> None:
    small = ["--families=1", "--members=1", "--held_out=0", "--max_length=48", "--sequences=4"]
    run([*words, *small])
    output = Path(words[words.index("--output") + 1])
    assert {"mmcif_files", "alignments", "fasta", "train.txt"} <= {path.name for path in output.iterdir()}


def run_predict(words: list[str]) -> None:
    """By the installed program, in a process of its own. All files that the README's table names must be there."""
    program = Path(sys.executable).with_name("evodsp")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    small = ["--recycles=0", "--msa_clusters=4", "--extra_msa=4", "--device=cpu"]
    done = subprocess.run([program, *words, *small], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert Path(words[words.index("--output") + 1]) == Path("predictions"), "the README's table names another folder"
    name = Path(words[words.index("--fasta") + 1]).stem
    listed = re.findall(r"^\| `(predictions/[^`]*)`", README, re.MULTILINE)
    assert len(listed) >= 4
    for path in listed:
        for seed in range(int(words[words.index("--seeds") + 1])):
            assert Path(path.replace("<name>", name).replace("<k>", str(seed))).is_file(), path


def run_export(words: list[str]) -> None:
    run(words)
    assert Path(words[words.index("--output") + 1]).stat().st_size > 0


EVODSP: dict[str, Callable[[list[str]], None]] = {
    "fit": run_fit,
    "validate": run_validate,
    "data synthesize": run_synthesize,
    "predict": run_predict,
    "weights export": run_export,
    "weights import": run_export,
}


def check_make(words: list[str]) -> None:
    """A target that the Makefile does not have."""
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    assert words
    settings = {word.partition("=")[0] for word in words if "=" in word}
    assert settings <= set(re.findall(r"^(\w+)\s*\?=", makefile, re.MULTILINE)), (
        f"the Makefile does not take {settings}"
    )
    assert {word for word in words if "=" not in word} <= set(targets), f"make {words}: the targets are {targets}"


def check_pip(words: list[str]) -> None:
    """Extras and files that are not there."""
    assert words[0] == "install"
    assert set(re.findall(r"[\w-]+", words[-1].partition("[")[2])) <= extras()
    for option, value in itertools.pairwise(words):
        if option == "--constraint":
            assert (ROOT / value).is_file()


def check_activate(words: list[str]) -> None:
    assert words == [".venv/bin/activate"]


def run_torchrun(words: list[str]) -> None:
    """The installed torchrun, really."""
    program = Path(sys.executable).with_name("torchrun")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [program, *words, *SMALL, f"--trainer.max_steps={STEPS}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert (Path(words[words.index("--output") + 1]) / "checkpoints" / "last.ckpt").is_file()


def check_venv(words: list[str]) -> None:
    assert words[:2] == ["-m", "venv"]


OTHERS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "python3": check_venv,
    "source": check_activate,
    ".venv/bin/pip": check_pip,
    "torchrun": run_torchrun,
}


def follow(command: str) -> None:
    """Apply the rule of a command. Fails on one that has none."""
    if re.match(r"<\w+>/", command):  # a picture of a folder, not a command
        return
    words = shlex.split(command)
    if words[0] in OTHERS:
        OTHERS[words[0]](words[1:])
        return
    if words[0] == "evodsp":
        for length in (2, 1):
            name = " ".join(words[1 : 1 + length])
            if name in EVODSP:
                EVODSP[name](words[1:])
                return
    pytest.fail(f"no rule tests this command: {command}")


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


# ---- Tests ----


@pytest.fixture
def like_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with the repository's data and configs."""
    for name in ("data", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_and_python_block_runs(like_the_root: Path) -> None:
    """An option that was renamed, a line that the one before it spoils, a result that is elsewhere, an import that moved."""
    for block in blocks():
        if block.language == "python":
            run_python(block)
        if block.language:  # `text` is output, shown
            continue
        for command in block.commands():
            try:
                follow(command)
            except BaseException as error:
                error.add_note(f"README.md:{block.line}: {command}")
                raise
    run_folder = {path.relative_to("runs/quickstart").as_posix() for path in Path("runs/quickstart").rglob("*")}
    assert {"checkpoints/last.ckpt", "checkpoints/best.ckpt", "curve.csv", "tensorboard", "config.yaml"} <= run_folder
    assert list(read_curve(Path("runs/quickstart/curve.csv"))) == [STEPS - 1, 2 * STEPS - 1], "the run was not resumed"
    assert set(os.listdir(like_the_root)) == {"data", "configs", "runs", "families", "predictions"}


def run_python(block: Block) -> None:
    """The block, and what its comments offer instead ("# or ...")."""
    torch.manual_seed(0)
    for text in (block.text, re.sub(r"= .*# or ", "= ", block.text)):
        exec(compile(text, f"README.md:{block.line}", "exec"), {"__name__": "readme"})


def test_the_readme_has_the_commands_that_a_newcomer_needs() -> None:
    """The pattern that finds blocks finding none, and everything passing."""
    found = [command for _, command in commands()]
    for start in ("make demo", "evodsp fit", "evodsp predict", "evodsp validate", "evodsp data synthesize"):
        assert any(command.startswith(start) for command in found), start
    assert any(block.language == "python" for block in blocks())
    assert README.count("```") == 2 * len(blocks())


@pytest.mark.parametrize("command", ["evodsp fti --config x", "evodsp", "git clone x", "make nothing"])
def test_a_command_without_a_rule_fails(command: str) -> None:
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        follow(command)


def test_commands_in_the_prose() -> None:
    """`make …` and `evodsp … --help` between backticks."""
    spans = re.findall(r"`([^`\n]+)`", README)
    for span in spans:
        words = span.split()
        if words[0] == "make":
            check_make(words[1:])
        if words[0] == "evodsp" and len(words) > 1:
            assert words[-1] == "--help", f"no rule tests `{span}`"
            run(words[1:])
    assert any(span.startswith("make test") for span in spans)


def test_links_and_files_named_in_the_prose_exist() -> None:
    linked = re.findall(r"\[[^\]]*\]\((?!https?:)([^)#]+)\)", README)
    named = re.findall(r"`([\w./-]+\.(?:md|yaml|py|txt))`", README)
    written = {"config.yaml"}  # by a run
    missing = [name for name in (*linked, *named) if name not in written and not (ROOT / name).exists()]
    assert not missing


def test_the_extras_are_those_of_the_package() -> None:
    sentence = README[README.index("Extras:") :].partition(".\n")[0]
    assert set(re.findall(r"`([\w-]+)`", sentence)) == extras()

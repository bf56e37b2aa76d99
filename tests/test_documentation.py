"""The documentation runs: every command and every code block of README.md and docs/ is executed, or listed here with a reason.

Commands run in a folder that looks like the repository's root (its `data`, `configs` and `scripts`), in the order of `PAGES`,
so that a later one finds what an earlier one left. Options that make them small are appended; nothing else is changed, except
that ranks are started in the verify tier only: starting them takes seconds. A command without a rule fails, so that a new one
cannot go untested.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import os
import pkgutil
import re
import runpy
import shlex
import socket
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

import evodsp
from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.model.evoformer import MSAStack, PairStack
from evodsp.training.csv_logger import read_curve
from tests.builders.command_lines import last_options
from tests.conftest import SHARED

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("index", "quickstart", "training", "weights", "prediction", "data", "dsp")),
    *("docs/measured.md", "docs/migration.md", "docs/contributing.md", "docs/changelog.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "api").glob("*.md")),
]
INCLUDED = ["CONTRIBUTING.md", "CHANGELOG.md"]  # by docs/contributing.md and docs/changelog.md

NOT_RUN = {
    "make demo": "10 to 15 minutes; tests/test_demo.py runs its steps in the verify tier",
    "make test": "this very suite",
    "make verify": "the verify tier",
    "make lint": "CI runs it before the tests",
    "python3 -m venv": "makes an environment; its arguments are checked",
    "source": "the environment's activation",
    ".venv/bin/pip install": "installs from a package index; the extras and files it names are checked",
    "pip install": "likewise",
    "evodsp data synthesize": "takes ten seconds a family; tests/synthetic writes families, here the options are checked",
    "torchrun": "runs in the verify tier; otherwise its options of evodsp are checked",
}
"""Commands that are not executed here, by how they begin, and why."""

NOT_YET: dict[str, str] = {}
"""YAML blocks that must still fail, and why. An entry that passes has to go."""

OPTIONS_OF_OTHERS = {
    "--trainer.help",
    "--help",
    "--max-restarts",
    "--cpu",
    "--print_config",
    "--nproc-per-node",
    "--standalone",
}
"""Options of torchrun and of scripts, and those that `--help` does not show."""

ELSEWHERE = {"config.yaml", "train.txt", "space_time.py", "train_monomer_demo_bp.sh", "fastfold/distributed/comm.py"}
"""Files that a run or the reader writes, and files of other programs."""

STEPS = 2
FEW_ROWS = [
    f"--data.{part}.{rows}={n}"
    for part in ("train", "validation")
    for rows, n in (("msa_clusters", 4), ("extra_msa", 4))
]
STRUCTURE = ["--model.structure_module.iterations=1"]
SMALL = [
    *FEW_ROWS,
    "--data.train.crop_size=16",
    "--data.validation.crop_size=16",
    "--data.train.recycles=0",
    "--data.validation.recycles=0",
    f"--data.samples_per_epoch={STEPS}",
    *STRUCTURE,
    "--trainer.enable_progress_bar=false",
    "--data.validation_chains=[s005_A]",
]
BUNDLED = ["--data.train_chains=[s001_A]"]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, and the line (from 1) of its fence."""

    page: str
    language: str
    text: str
    line: int

    @property
    def place(self) -> str:
        """Such as 'docs/data.md:12'."""
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Its lines, those that end with a backslash joined with the next."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [line.strip() for line in joined.splitlines() if line.strip()]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    text = text_of(page)
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, match[1], match[2], text.count("\n", 0, match.start()) + 1) for match in found]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def spans(page: str) -> list[str]:
    """What stands between backticks in the prose."""
    return re.findall(r"`([^`\n]+)`", prose(page))


# ---- One rule for every kind of command: it runs or checks the command, and raises if the page is wrong. ----


class Reader:
    """Follows the pages as a reader would, in the current folder."""

    def __init__(self, start_ranks: bool = False) -> None:
        self.page = ""
        self.trained: set[str] = set()
        self.one_rank = [] if start_ranks else ["--parallel.sequence=1"]

    def follow(self, page: str, command: str) -> None:
        """Apply the rule of a command. Fails on one that has none."""
        if page != self.page:
            self.page, self.trained = page, set()
        words = shlex.split(command)
        for program, rule in (("evodsp", self.evodsp), ("python", self.python), ("torchrun", self.torchrun)):
            if words[0] == program:
                rule(words[1:])
                return
        assert any(command.startswith(start) for start in NOT_RUN), f"no rule tests this command: {command}"
        CHECKS[words[0]](words[1:])

    def evodsp(self, words: list[str]) -> None:
        rules: dict[str, Callable[[list[str]], None]] = {
            "fit": self.fit,
            "validate": self.validate,
            "predict": self.predict,
            "data synthesize": self.synthesize,
            "weights export": self.convert,
            "weights import": self.convert,
        }
        for length in (2, 1):
            if (name := " ".join(words[:length])) in rules:
                rules[name](words)
                return
        pytest.fail(f"no rule tests this command: evodsp {' '.join(words)}")

    def fit(self, words: list[str]) -> None:
        """A page starts with no run; a resumed run must have something left to do; DIR is replaced by folders."""
        output = option(words, "--output") or "runs/quickstart"
        small = [*SMALL, f"--trainer.max_steps={2 * STEPS if '--ckpt_path' in words else STEPS}"]
        if "DIR" in words:
            for name, folder, chains in (
                ("bundled", Path("data"), BUNDLED),
                ("real", SHARED / "data", ["--data.validation_chains=null"]),
            ):
                if folder.is_dir():
                    run([*with_folders(words, folder), *small, *chains, f"--output=runs/{name}"])
            return
        if output not in self.trained and "--ckpt_path" not in words:
            small.append("--overwrite=true")
        self.trained.add(output)
        run([*words, *small, *self.one_rank])
        assert (Path(output) / "checkpoints" / "last.ckpt").is_file()

    def validate(self, words: list[str]) -> None:
        run([*words, *FEW_ROWS, "--data.validation.recycles=0", *STRUCTURE])

    def predict(self, words: list[str]) -> None:
        """All files that the page's table names must be there."""
        small = ["--recycles=0", "--msa_clusters=4", "--extra_msa=4", "--device=cpu", "--overwrite=true"]
        run([*words, *small, *self.one_rank])
        output = option(words, "--output")
        assert output == "predictions", "the table of docs/prediction.md names another folder"
        listed = re.findall(r"^\| `(predictions/[^`]*)`", text_of("docs/prediction.md"), re.MULTILINE)
        assert len(listed) >= 4
        name = Path(option(words, "--fasta") or "").stem
        for path, seed in itertools.product(listed, range(int(option(words, "--seeds") or 1))):
            assert Path(path.replace("<name>", name).replace("<k>", str(seed))).is_file(), path

    def synthesize(self, words: list[str]) -> None:
        """Its options only, see NOT_RUN: they are read before the number of members is refused."""
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert main(last_options([*words, "--members=0"])) == 2
        assert "members is 0" in said.getvalue()

    def convert(self, words: list[str]) -> None:
        run(words)
        assert Path(option(words, "--output") or "").stat().st_size > 0

    def python(self, words: list[str]) -> None:
        """A script of the repository, in this process."""
        assert runpy.run_path(str(ROOT / words[0]))["main"](words[1:]) == 0

    def torchrun(self, words: list[str]) -> None:
        """Of one rank: only the options of evodsp behind `-m evodsp`."""
        at = words.index("evodsp")
        assert words[at - 1] == "-m"
        assert run_quietly([*words[at + 1 :], "--print_config"])
        if not self.one_rank:
            command = [sys.executable, "-m", "torch.distributed.run", *words, *SMALL, f"--trainer.max_steps={STEPS}"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def run(words: list[str]) -> None:
    """`evodsp` in this process. If the page and the test both set an option, the last one counts."""
    words = last_options(words)
    assert main(words) == 0, f"evodsp {' '.join(words)}"


def run_quietly(words: list[str]) -> str:
    """`evodsp` in this process; what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            code = main(words)
        except SystemExit as end:  # --help and --print_config
            code = end.code
    assert code in (0, None), f"evodsp {' '.join(words)}"
    return printed.getvalue()


def option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def with_folders(words: list[str], folder: Path) -> list[str]:
    replaced = list(words)
    for name, sub in (("--data.alignment_dir", "alignments"), ("--data.structure_dir", "mmcif_files")):
        replaced[words.index(name) + 1] = str(folder / sub)
    assert "DIR" not in replaced
    return replaced


def check_make(words: list[str]) -> None:
    """A target that the Makefile does not have, or a setting."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    settings = set(re.findall(r"^(\w+)\s*\?=", makefile, re.MULTILINE))
    assert words
    assert {word for word in words if "=" not in word} <= targets, f"make {words}: the targets are {targets}"
    assert {word.partition("=")[0] for word in words if "=" in word} <= settings


def check_pip(words: list[str]) -> None:
    """Extras and files that are not there; `dist/` is what `make wheel` fills."""
    assert words[0] == "install"
    assert words[-1].startswith((".", "dist/evodsp-*.whl"))
    assert set(re.findall(r"[\w-]+", words[-1].partition("[")[2])) <= extras()
    if (constraint := option(words, "--constraint")) is not None:
        assert (ROOT / constraint).is_file()


def check_words(expected: str) -> Callable[[list[str]], None]:
    def check(words: list[str]) -> None:
        assert " ".join(words) == expected

    return check


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "pip": check_pip,
    ".venv/bin/pip": check_pip,
    "python3": check_words("-m venv .venv"),
    "source": check_words(".venv/bin/activate"),
}


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


# ---- Tests ----


@pytest.fixture
def like_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the repository's data, configs and scripts; a process group may be made in it."""
    for name in ("data", "configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("start_ranks", [False, pytest.param(True, marks=pytest.mark.verify)])
def test_every_command_and_block_runs(start_ranks: bool, like_the_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed option or import, a command that the one before it spoils, a result that is elsewhere, wrong YAML."""
    reader = Reader(start_ranks)
    for block in (block for page in PAGES for block in blocks(page)):
        try:
            if block.language == "python":
                run_python(block, monkeypatch)
            elif block.language == "yaml":
                run_yaml(block, like_the_root)
            elif block.language == "bash":
                for command in block.commands():
                    reader.follow(block.page, command)
            else:
                assert block.language in ("text", ""), f"no rule for a block of {block.language}"
                assert block.language or block.page in INCLUDED, "name the block's language"
        except BaseException as error:
            error.add_note(f"{block.place}:\n{block.text}")
            raise
    files = {path.relative_to("runs/quickstart").as_posix() for path in Path("runs/quickstart").rglob("*")}
    assert {"checkpoints/last.ckpt", "checkpoints/best.ckpt", "curve.csv", "tensorboard", "config.yaml"} <= files
    assert list(read_curve(Path("runs/quickstart/curve.csv"))) == [STEPS - 1, 2 * STEPS - 1], "the run was not resumed"
    assert {path.name for path in like_the_root.iterdir()} - {"block.yaml"} == {
        *("data", "configs", "scripts", "runs", "predictions"),
    }


def run_python(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block; one that makes a process group has it to itself, as torchrun's only rank."""
    torch.manual_seed(0)
    with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if "init_process_group" in block.text:
            for name, value in values.items():
                patch.setenv(name, value)
        exec(compile(block.text, block.place, "exec"), {"__name__": "page"})
    assert printed.getvalue() or "init_process_group" in block.text


def run_yaml(block: Block, folder: Path) -> None:
    """The block on top of the quickstart's configuration: unknown fields and wrong types."""
    (folder / "block.yaml").write_text(block.text)
    words = ["fit", "--config", "configs/quickstart.yaml", "--config", "block.yaml", "--print_config"]
    if block.text in NOT_YET:
        with pytest.raises((AssertionError, UserError)):
            run_quietly(words)
    else:
        shown = yaml.safe_load(run_quietly(words))
        assert subset(yaml.safe_load(block.text), shown)


def subset(part: object, whole: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            name in whole and subset(value, whole[name]) for name, value in part.items()
        )
    return part == whole


def test_the_readme_has_the_commands_that_a_newcomer_needs() -> None:
    """The pattern that finds blocks finding none, and everything passing."""
    found = [command for block in blocks("README.md") if block.language == "bash" for command in block.commands()]
    for start in ("make demo", "pip install .", "pip install dist/", "evodsp fit", "evodsp predict"):
        assert any(command.startswith(start) for command in found), start
    [python] = [block for block in blocks("README.md") if block.language == "python"]
    assert len([line for line in python.text.splitlines() if line]) <= 5
    assert "predictions.png" in text_of("README.md")
    for page in PAGES:
        assert text_of(page).count("```") == 2 * len(blocks(page)), page


@pytest.mark.parametrize(
    "command",
    ["evodsp fti --config x", "evodsp", "git clone x", "make nothing", "pip install '.[nothing]'", "pip install x"],
)
def test_a_command_without_a_rule_fails(command: str) -> None:
    with pytest.raises((pytest.fail.Exception, AssertionError, KeyError)):
        Reader().follow("README.md", command)


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    """`--help` of every command."""
    names = ("fit", "validate", "predict", "data synthesize", "weights import", "weights export")
    return {name: run_quietly([*name.split(), "--help"]) for name in names}


@pytest.mark.parametrize("page", [*PAGES, *INCLUDED])
def test_names_in_the_prose_exist(page: str, help_texts: dict[str, str]) -> None:
    """Commands, options, settings, make targets and modules between backticks: a name that was changed or never was."""
    everything = "".join(help_texts.values())
    options = set(re.findall(r"--[\w.]+", everything)) | OPTIONS_OF_OTHERS
    for span in spans(page):
        words = span.split()
        if words[0] == "make":
            check_make([word for word in words[1:] if "…" not in word])
        if words[0] == "evodsp" and len(words) > 1:
            name = " ".join(words[1:3]) if words[1] in ("data", "weights") else words[1]
            assert name in {*help_texts, "test"}, f"no command `{span}`"
        for word in re.findall(r"(?<![\w-])--[A-Za-z][\w.-]*", span):
            assert word in options, f"`{span}`: no command has the option {word}"
        if setting := re.fullmatch(r"((?:model|data|parallel|plan|trainer)\.[a-z_]\w*(?:\.\w+)*)(?::.*)?", span):
            assert f"--{setting[1]}" in options, f"no setting `{span}`"
        if re.fullmatch(r"evodsp(\.\w+)+", span) and page not in ("docs/migration.md", "CHANGELOG.md"):
            assert resolves(span), f"`{span}` cannot be imported"


def test_the_new_names_of_the_migration_page_exist() -> None:
    rows = [row.split("|")[1:3] for row in text_of("docs/migration.md").splitlines() if row.startswith("| `")]
    assert len(rows) > 20
    for old, new in rows:
        for name in re.findall(r"`(evodsp(?:\.\w+)+)`", new):
            assert resolves(name), f"{name}, the new name of {old.strip()}"
        for name in re.findall(r"`(evodsp(?:\.\w+)+)`", old):
            assert name in new or not resolves(name), f"{name} is still there"


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", [*PAGES, *INCLUDED])
def test_links_and_files_named_in_the_prose_exist(page: str) -> None:
    """Relative links with their anchors; files and folders between backticks that a run does not write."""
    here = (ROOT / page).parent
    package_files = {path.name for path in (ROOT / "evodsp").rglob("*.py")}
    for link in re.findall(r"\[[^\]]*\]\((?!https?:)([^)\s]+)\)", prose(page)):
        name, _, anchor = link.partition("#")
        target = here / name if name else ROOT / page
        assert target.exists(), f"{page}: the link to {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {name} has no heading #{anchor}"
    for name in spans(page):
        if re.fullmatch(r"[\w./-]+\.(?:md|yaml|py|txt|sh|sbatch|ipynb|cff|css)", name) and name not in ELSEWHERE:
            places = (ROOT, here, ROOT / "evodsp", ROOT / "evodsp" / "parallel")
            found = any((folder / name).exists() for folder in places) or ("/" not in name and name in package_files)
            assert found, f"{page}: `{name}`"
        if re.match(r"(?:evodsp|scripts|tests|notebooks|configs|data)/", name) and not set(name) & set("*<> …"):
            assert (ROOT / name).exists() or (ROOT / "evodsp" / name).exists(), f"{page}: `{name}`"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_site_has_all_pages_and_each_says_what_it_is_for() -> None:
    """A page outside the navigation, a page that these tests do not read, an API page of a module that moved."""

    def files(entries: object) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        return [
            file
            for entry in entries
            for file in files(next(iter(entry.values())) if isinstance(entry, dict) else entry)
        ]

    pages = {f"docs/{name}" for name in files(yaml.safe_load(text_of("mkdocs.yml"))["nav"])}
    assert (
        pages
        == {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
        == set(PAGES) - {"README.md"}
    )
    for page in pages:
        title, opening = [line for line in text_of(page).splitlines() if line][:2]
        assert title.startswith("# ")
        assert opening.startswith("*After this page you "), page
        for module in re.findall(r"^::: ([\w.]+)$", text_of(page), re.MULTILINE):
            assert find_spec(module), f"{page}: {module}"


def test_versions_agree() -> None:
    """A bump that forgot one of the places."""
    citation = yaml.safe_load(text_of("CITATION.cff"))
    newest = re.search(r"^## (\S+) - (\S+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert newest
    assert (citation["version"], str(citation["date-released"])) == newest.groups()
    assert newest[1] == evodsp.__version__


def test_the_extras_are_those_of_the_package() -> None:
    sentence = text_of("README.md").partition("Extras:")[2].partition(".\n")[0]
    assert set(re.findall(r"`([\w-]+)`", sentence)) == extras()


def test_documentation_packages_are_pinned_and_not_part_of_the_demo() -> None:
    """`make demo` installs the extra `dev`; the site's packages come with `make docs` only."""
    wanted = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    pinned = {line.partition("==")[0].lower() for line in text_of("constraints.txt").splitlines()}
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in wanted["docs"]}
    assert names <= pinned
    assert not {name for name in names if name.startswith("mkdocs")} & {
        re.split(r"[\[<>=]", requirement)[0] for requirement in wanted["dev"]
    }


@pytest.mark.verify
def test_the_site_builds_without_warnings_and_asks_no_network(tmp_path: Path) -> None:
    """Needs the extra `docs` (`make docs` installs it)."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed; `make docs` installs it")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        fetched = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert not fetched, f"{page}: {fetched}"


@pytest.mark.verify
def test_the_wheel_holds_the_package(tmp_path: Path) -> None:
    """A module or a table that is left out, a version that is another; as `make wheel` builds it."""
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in (name for name in tracked if name.startswith("evodsp/") or "/" not in name):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name == f"evodsp-{evodsp.__version__}-py3-none-any.whl"
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in tracked if name.startswith("evodsp/")} <= held


@pytest.mark.parametrize("stack", [MSAStack, PairStack])
def test_the_lines_of_a_block_are_the_programs(stack: type) -> None:
    """A page that shows another order of sub-layers or other axes than the program has."""
    body = inspect.getsource(stack.forward).split('"""')[2]
    assert textwrap.dedent(body.lstrip("\n")).strip() in text_of("docs/dsp.md")

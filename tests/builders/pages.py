"""The pages of the documentation: which there are, their fenced blocks, and what their prose names."""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from evodsp.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "index",
            "quickstart",
            "training",
            "own_input",
            "weights",
            "prediction",
            "data",
            "planning",
            "cluster",
            "dsp",
        )
    ),
    *("docs/algorithms.md", "docs/layers.md", "docs/security.md", "docs/parallelize.md", "docs/frameworks.md"),
    *(
        "docs/measured.md",
        "docs/paper.md",
        "docs/migration.md",
        "docs/contributing.md",
        "docs/development.md",
        "docs/releasing.md",
        "docs/changelog.md",
    ),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "api").glob("*.md")),
]
INCLUDED = ["CONTRIBUTING.md", "CHANGELOG.md"]  # by docs/contributing.md and docs/changelog.md
UNLISTED = ["AGENTS.md", ".github/SECURITY.md"]  # which no page shows


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

    @property
    def included(self) -> str | None:
        """The file that the block shows, if it consists of one. (`ruff format` would rewrite `--8<-- "FILE"` on one line.)"""
        found = re.fullmatch(r"--8<--\n(.+)\n--8<--\n", self.text)
        return found[1] if found else None

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


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def table(heading: str) -> list[list[str]]:
    """The cells of the rows below the line that begins with `heading`, without blanks around them."""
    rows = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n{heading}")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def last_options(words: list[str]) -> list[str]:
    """The words without options that a later word sets again; evodsp refuses repeated options. `--config` may repeat."""
    kept: list[str] = []
    for place, word in enumerate(words):
        name = word.partition("=")[0]
        later = {other.partition("=")[0] for other in words[place + 1 :]}
        if word.startswith("--"):
            dropped = name != "--config" and name in later
        else:
            before = words[place - 1] if place else ""
            dropped = before.startswith("--") and "=" not in before and before != "--config" and before in later
        if not dropped:
            kept.append(word)
    return kept

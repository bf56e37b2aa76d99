"""Write the version and the addresses of evodsp/version.py, and the pages of mkdocs.yml, into the files that repeat them.

    python -m scripts.release

An address that is empty is written nowhere: its line stays as a comment. docs/releasing.md says when to run this.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from evodsp import version

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = "notebooks/train_on_your_family.ipynb"
_COLAB = "https://colab.research.google.com"


def lines(repository: str, documentation: str, number: str, date: str) -> dict[str, dict[str, str]]:
    """By file: how the lines begin that are written, and what follows; '' where that is not known yet."""
    contact = f"[{{name: Documentation, url: '{documentation}', about: 'Guides, and the meaning of every setting'}}]"
    return {
        "pyproject.toml": {
            "Repository = ": repository and f'"{repository}"',
            "Documentation = ": documentation and f'"{documentation}"',
            "Issues = ": repository and f'"{repository}/issues"',
        },
        "CITATION.cff": {
            "version: ": number, "date-released: ": date, "repository-code: ": repository, "url: ": documentation,
        },
        "mkdocs.yml": {
            "site_url: ": documentation,
            "copyright: ": repository and f"<a href=\"{repository}\">Sources and issues</a>",
        },
        "conda/recipe.yaml": {
            "  version: ": f'"{number}"', "  repository: ": repository, "  documentation: ": documentation,
        },
        ".github/ISSUE_TEMPLATE/config.yml": {"contact_links: ": documentation and contact},
    }  # fmt: skip


def with_lines(text: str, values: dict[str, str]) -> str:
    """The text with `values`, by how their lines begin. Raises ValueError unless each of these lines is there once."""
    for begin, value in values.items():
        line = begin + value if value else f"# {begin.rstrip()}"
        found = [*re.finditer(rf"^(?:# )?{re.escape(begin.rstrip())}(?: .*)?$", text, re.MULTILINE)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} lines begin with '{begin}'; expected 1")
        text = text[: found[0].start()] + line + text[found[0].end() :]
    return text


def notebook(text: str, repository: str, number: str) -> str:
    """The notebook with a badge that opens it in Colab, and with the address from which it installs evodsp there."""
    content = json.loads(text)
    title = [line for line in content["cells"][0]["source"] if not line.startswith("[![")]
    if repository:
        place = repository.removeprefix("https://github.com/")
        badge = (
            f"[![Open in Colab]({_COLAB}/assets/colab-badge.svg)]({_COLAB}/github/{place}/blob/v{number}/{NOTEBOOK})\n"
        )
        title.insert(1, badge)
    content["cells"][0]["source"] = title
    source = f'evodsp_source = "{f"git+{repository}@v{number}" if repository else ""}"'
    for cell in content["cells"]:
        cell["source"] = [re.sub(r'^evodsp_source = ".*"', source, line) for line in cell["source"]]
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def llms(pages: list[dict[str, Any]], description: str, documentation: str) -> str:
    """The index of the pages for programs (llmstxt.org), by section of the navigation; links are addresses, or else files."""
    sections: dict[str, list[str]] = {"Overview": []}
    for page in pages:
        ((section, inside),) = page.items()
        within = [page] if isinstance(inside, str) else inside
        for title, name in (item for entry in within for item in entry.items()):
            text = (ROOT / "docs" / name).read_text(encoding="utf-8")
            opening = re.search(r"^\*After this page (you .*?)\*", text, re.MULTILINE | re.DOTALL)
            if opening is None:
                raise ValueError(f"docs/{name}: no line begins with '*After this page you '")
            link = f"{documentation}/{name.removesuffix('.md')}.html" if documentation else name
            about = " ".join(opening[1].split())
            sections.setdefault("Overview" if within == [page] else section, []).append(f"- [{title}]({link}): {about}")
    parts = [f"## {title}\n\n" + "\n".join(entries) for title, entries in sections.items()]
    return "\n\n".join(["# evodsp", f"> {description}.", "Each line says what you know after the page.", *parts]) + "\n"


def written(repository: str, documentation: str, number: str) -> dict[str, str]:
    """The contents of all files that this program writes, by their names."""

    def text(name: str) -> str:
        return (ROOT / name).read_text(encoding="utf-8")

    dated = re.search(rf"^## {re.escape(number)} - (\S+)$", text("CHANGELOG.md"), re.MULTILINE)
    if dated is None:
        raise ValueError(f"CHANGELOG.md: no heading '## {number} - YEAR-MONTH-DAY'")
    known = lines(repository, documentation, number, dated[1])
    found = {name: with_lines(text(name), values) for name, values in known.items()}
    found[NOTEBOOK] = notebook(text(NOTEBOOK), repository, number)
    site = yaml.safe_load(text("mkdocs.yml"))
    found["docs/llms.txt"] = llms(site["nav"], site["site_description"], documentation)
    return found


def main() -> None:
    for name, text in written(version.REPOSITORY, version.DOCUMENTATION, version.__version__).items():
        (ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

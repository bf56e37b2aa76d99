"""The tables of CONTRIBUTING.md that say how large things may become."""

from __future__ import annotations

from tests.builders.pages import ROOT


def table(heading: str) -> list[list[str]]:
    """The cells of the rows below the line that begins with `heading`, without blanks around them."""
    rows = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n{heading}")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]

"""The docs page "The paper, measured" against the committed results."""

from __future__ import annotations

import pytest

from scripts.paper import page, reproduce, timing
from scripts.paper.part import Tables

pytestmark = pytest.mark.verify


@pytest.fixture(scope="module")
def tables() -> Tables:
    return reproduce.tables_in(reproduce.RESULTS)


def test_the_pages_tables_are_those_of_the_results(tables: Tables) -> None:
    """Catches a number in the page that no run gave, and results that were committed without the page."""
    text = reproduce.PAGE.read_text(encoding="utf-8")
    assert page.updated(text, tables) == text, "run: python -m scripts.paper.reproduce --only page"
    assert {match[2] for match in page.MARKED.finditer(text)} == set(page.WRITERS)
    assert text.count("<!-- table:") == text.count("<!-- end -->") == len(page.WRITERS)


def test_the_results_agree_with_the_papers_formulas(tables: Tables) -> None:
    """Catches results that were committed although a count was wrong, and parts of different sizes than the command's."""
    assert not any(row["differs"] for row in tables["volumes"])
    made = {row["part"]: row for row in tables["runs"]}
    for part in reproduce.parts(quick=False):
        assert part.wrong(tables) == []
        assert made[part.name]["settings"] == part.settings


def test_what_the_prose_says_of_the_results(tables: Tables) -> None:
    """Catches a sentence that newer results contradict."""
    smallest = {(row["model"], row["tokens"], row["method"]): row for row in tables["memory_smallest"]}
    for (model, tokens, _), row in smallest.items():
        if row["paper_ranks"] and (model, tokens) != ("3b", 2**22):
            assert row["ranks"] == row["paper_ranks"], row
    for row in tables["memory_weak"]:
        if row["method"] == "dsp":
            sizes = [row[name] for name in ("model", "time", "ranks")]
            others = [r for r in tables["memory_weak"] if [r[n] for n in ("model", "time", "ranks")] == sizes]
            # The page says 0.3 %.
            assert all(row["peak_bytes"] <= 1.003 * other["peak_bytes"] for other in others if not other["refused"])
    alone = tables["time_collectives"]
    for ranks in (2, 4):
        medians = {m: page.Spread.of(timing.ratios(alone, ranks, m)).median for m in page.CLAIMS}
        assert min(medians, key=medians.__getitem__) == "dsp"
        assert 1.5 < medians["ulysses"] < 3
    assert round(timing.TABLE_9_MS["ulysses"] / timing.TABLE_9_MS["dsp"], 1) == 6.4
    assert sum(row["seconds"] for row in tables["runs"]) < 30 * 60

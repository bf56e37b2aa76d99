"""Pages on a telephone, 400 pixels wide: nothing is cut."""

from __future__ import annotations

from pathlib import Path

from evodsp.report.page import Level, Page, Series, histogram, lines, stacked, timeline
from evodsp.report.run_command import page
from evodsp.report.runs import read_runs
from tests.builders.browser import NEEDS_CHROMIUM, cut
from tests.builders.run_folder import make_run, write_bar


def every_part() -> Page:
    """Each kind of part, with long names and many columns, as plans have them."""
    made = Page("Plan for 512 x H100 SXM", "128 x 768, extra MSA 1024, 10,000,000,000 samples in batches of 128")
    made.verdict("take --parallel.sequence 8 --model.evoformer.checkpoint 4 --data.train.max_templates 4", good=True)
    made.figures({"GPU-hours": "28,160,173", "of a pass is exposed communication": "6%", "steps": "1,000,000,000"})
    made.table([f"column {n}" for n in range(11)], [["28,160,173"] * 11], [f"column {n}" for n in range(11)])
    meshes, x = [f"{512 >> n} x {1 << n}" for n in range(10)], [2**n for n in range(10)]
    memory = {part: [0.3 * 3**part] * 10 for part in range(6)}
    made.charts(
        {
            "Memory": stacked(
                meshes, {f"part {part}": values for part, values in memory.items()}, Level("usable", 73.6)
            ),
            "Efficiency": lines([Series("efficiency", x, [1 / n for n in x])], "ranks of a sample", "efficiency"),
            "Mean pLDDT": histogram(
                [5.0 * n for n in range(21)], [n * 1000 for n in range(20)], "mean pLDDT", "targets"
            ),
        }
    )
    made.legend([f"a_run_with_a_name_that_is_{n}_times_as_long_as_any" for n in range(3)])
    made.wide_chart(
        "Time line", timeline({"device": [(0.0, 1e-3, "compute")], "link": [(0.0, 5e-4, "all-to-all")]}, "block")
    )
    return made


@NEEDS_CHROMIUM
def test_nothing_is_cut_in_a_narrow_window(tmp_path: Path) -> None:
    """Catches a table without a box that scrolls, charts wider than the window, and labels that are cut or on one another."""
    runs = [make_run(tmp_path / f"a_run_with_a_name_that_is_{n}_times_as_long_as_any", seed=n) for n in (1, 2)]
    for chains, run in enumerate(runs, start=1):
        write_bar(run, 0.7484, chains)
    pages = {"report": page(read_runs(runs)), "parts": every_part()}
    assert not cut({name: one.html() for name, one in pages.items()}, 400, tmp_path)

"""The page of a target: its numbers are those of the files, no text becomes markup, and in a browser it draws and answers."""

from __future__ import annotations

import base64
import json
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evodsp.data.records import Alignment
from evodsp.errors import UserError
from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import CA, GAP
from evodsp.inference.pages.residue_charts import (
    PeptideBonds,
    View,
    coverage,
    coverage_chart,
    peptide_bonds,
    plddt_chart,
)
from evodsp.inference.pages.target_page import batch_page, write_batch_page, write_target_page
from evodsp.inference.results import TIMINGS, RecordFailure, write_json, write_results
from evodsp.inference.structure_files import AlignedError, Origin, PredictedStructure, structure_text
from tests.builders.browser import NEEDS_CHROMIUM, answer_of, cut
from tests.builders.prediction import read_json

NAME = "x</script><b>&"
RESIDUES = 60


def helix(seed: int) -> PredictedStructure:
    """A helix of alanines, turned and moved for each seed: the shape is the same."""
    number = np.arange(RESIDUES)
    positions = np.zeros((RESIDUES, 37, 3), np.float32)
    # radius (Å), phase (degrees) and height (Å) of N, CA, C and O of an ideal helix
    for atom, radius, phase, height in ((0, 1.55, -27.5, -0.9), (1, 2.28, 0, 0), (2, 1.66, 26, 1.1), (4, 2.0, 20, 2.3)):
        angle = np.radians(100 * number + phase + 70 * seed)
        positions[:, atom] = np.stack([radius * np.cos(angle), radius * np.sin(angle), 1.5 * number + height], 1)
    mask = np.zeros((RESIDUES, 37), np.float32)
    mask[:, [0, 1, 2, 4]] = 1
    mask[7] = 0  # a residue without atoms
    pae = np.abs(number[:, None] - 2.0 * number[None]).astype(np.float32) % 31
    plddt = (95 - number - 5 * seed).astype(np.float32)
    aatype = np.where(number == 7, 20, 0)
    positions = (positions + 20 * seed) * mask[..., None]
    return PredictedStructure(NAME, aatype, positions, mask, plddt, aligned_error=AlignedError(pae, 31.75, 0.8))


STRETCHED = replace(helix(2), positions=1.6 * helix(2).positions)
"""No residue is bonded to the next, and neighbours' CA atoms are 6 Å apart."""


def alignment() -> Alignment:
    """The query, a half and a stranger."""
    residues = np.zeros((3, RESIDUES), np.int8)
    residues[1, 30:] = GAP
    residues[2] = 1
    return Alignment("x.a3m", ("query", "half", "stranger"), residues, np.zeros_like(residues, np.int32))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished target with two seeds and a third that is stretched, its page and the page of the batch."""
    root = tmp_path_factory.mktemp("predictions")
    folder = root / "x"
    folder.mkdir()
    write_results(folder, {0: helix(0), 1: helix(1), 2: STRETCHED}, "cif", {"templates": ["<i>1abc"]}, NAME)
    write_json(folder / TIMINGS, {"name": NAME, "features_seconds": 1.0, "model_seconds": 3.25})
    write_target_page(folder, [alignment()])
    write_batch_page(root, [RecordFailure("<u>bad", "no <u>letters")])
    return root


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="prediction">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_no_text_becomes_markup(output: Path) -> None:
    """Catches a header that ends a script or adds an element to the page, and addresses that need a network."""
    for path in (output / "x" / "report.html", output / "index.html"):
        page = path.read_text()
        assert NAME not in page
        assert not {"<b>&", "<i>1abc", "<u>"} & set(re.findall(r"<b>&|<i>1abc|<u>", page))
        assert NAME in unescape(page)
        assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
        assert page.count("<script") == page.count("</script>")


def test_data_is_that_of_the_files(output: Path) -> None:
    """Catches coordinates in another order or scale, seeds that are exchanged, and a transposed matrix of errors."""
    data = embedded((output / "x" / "report.html").read_text())
    first, second, _ = data["seeds"]
    assert (first["seed"], second["seed"]) == (0, 1)
    residue = np.frombuffer(base64.b64decode(data["atom_residue"]), "<i4")
    atom = np.frombuffer(base64.b64decode(data["atom_type"]), "u1")
    assert 7 not in residue
    xyz = np.frombuffer(base64.b64decode(first["shapes"]["predicted"]["coordinates"]), "<i4").reshape(-1, 3) / 1000
    expected = helix(0).positions
    np.testing.assert_allclose(xyz, expected[residue, atom], atol=1e-3)
    moved = np.frombuffer(base64.b64decode(second["shapes"]["predicted"]["coordinates"]), "<i4").reshape(-1, 3) / 1000
    carbons = atom == CA
    np.testing.assert_allclose(moved[carbons], xyz[carbons], atol=5e-3, err_msg="seeds do not lie on one another")
    pae = np.frombuffer(base64.b64decode(first["pae"]), "u1").reshape(RESIDUES, RESIDUES) * 31.75 / 254
    np.testing.assert_allclose(pae, helix(0).aligned_error.pae, atol=0.07)  # type: ignore[union-attr]
    assert first["plddt"][3] == 92
    assert second["plddt"][3] == 87


def test_many_seeds_share_the_page(monkeypatch: pytest.MonkeyPatch, output: Path) -> None:
    """Catches pages that grow without limit, and blocks of residues that are not averages."""
    monkeypatch.setattr("evodsp.inference.pages.target_page._MOST_CELLS", 3 * 9 * 9)
    write_target_page(output / "x", [alignment()])
    data = embedded((output / "x" / "report.html").read_text())
    assert data["step"] == 7
    pae = np.frombuffer(base64.b64decode(data["seeds"][0]["pae"]), "u1").reshape(9, 9) * 31.75 / 254
    true = helix(0).aligned_error.pae  # type: ignore[union-attr]
    np.testing.assert_allclose(pae[1, 2], true[7:14, 14:21].mean(), atol=0.07)
    np.testing.assert_allclose(pae[8, 8], true[56:, 56:].mean(), atol=0.07)
    monkeypatch.undo()
    write_target_page(output / "x", [alignment()])


def test_coverage() -> None:
    """Catches identities over gaps, rows in another order, and counts of the first alignment only."""
    found = coverage([alignment(), alignment()])
    assert found.sequences == 6
    assert found.counts[[0, 29, 30, 59]].tolist() == [6, 6, 4, 4]
    np.testing.assert_array_equal(found.rows[:, 0], [1, 1, 1, 1, 0, 0])
    assert np.isnan(found.rows[:4, 59]).sum() == 2
    line = re.search(r'<polyline class="count" points="([^"]+)"', str(coverage_chart(found)))
    assert line is not None
    heights = [float(point.split(",")[1]) for point in line[1].split()]
    assert heights[29] < heights[30] == heights[59]  # six sequences are higher than four


@pytest.mark.parametrize(
    ("residues", "numbers"), [(16, [*range(1, 17)]), (17, [1, *range(2, 18, 2)]), (33, [1, *range(5, 34, 5)])]
)
def test_residue_numbers_below_a_chart(residues: int, numbers: list[int]) -> None:
    """Catches numbers that are left out where there is room for all, and more of them than there is room for."""
    chart = str(plddt_chart({0: np.full(residues, 50, np.float32)}, 0))
    assert [int(n) for n in re.findall(r'<text x="[\d.]+" y="\d+" text-anchor="middle">(\d+)</text>', chart)] == numbers


def test_index_links_to_the_pages(output: Path) -> None:
    """Catches links to nowhere, a page without a way back, and records that failed without a word."""
    page = (output / "index.html").read_text()
    links = re.findall(r'href="([^"]+)"', page)
    assert links == ["x/report.html"]
    assert (output / links[0]).is_file()
    back = re.findall(r'<a href="([^"]+)">', (output / links[0]).read_text())
    assert [(output / "x" / link).resolve() for link in back] == [output / "index.html"]
    assert "no &lt;u&gt;letters" in page


def test_columns_of_the_index(output: Path, tmp_path: Path) -> None:
    """Catches an empty column of pTM for models without a PAE head, a target of such a model that takes the others' pTM away,
    proteins without alignments that look like bad predictions, and results of earlier versions, which do not say how many
    sequences there were, that are left out or counted as none; coloured strips without a legend, and a histogram of which all
    targets are one bar."""
    made = {"alone": 0, "deep": 12345, "old": None, "older": None, "oldest": None}
    for name, rows in made.items():
        shutil.copytree(output / "x", tmp_path / name)
        if rows is not None:
            timings = read_json(tmp_path / name / TIMINGS)
            write_json(tmp_path / name / TIMINGS, {**timings, "alignment_rows": rows})
    page = batch_page(tmp_path, []).html()
    assert page.count('<td class="number">0.80</td>') == 5
    cells = [re.findall(r'<td class="number">([^<]*)</td>', row) for row in page.split("<tr>")[2:]]
    assert [row[1] for row in cells] == ["0", "12,345", "", "", ""]
    assert "confident (&gt; 70)" in page
    assert "<h3>Mean pLDDT</h3>" not in page
    (folder := tmp_path / "y").mkdir()
    write_results(folder, {0: replace(helix(3), aligned_error=None)}, "cif", {}, "y")
    write_json(folder / TIMINGS, {"name": "y"})
    both = batch_page(tmp_path, []).html()
    assert ">pTM</th>" in both
    assert both.count('<td class="number">0.80</td>') == 5
    assert both.count("<td") == 6 * both.count("<th")
    assert "<h3>Mean pLDDT</h3>" in both
    for name in made:
        shutil.rmtree(tmp_path / name)
    assert ">pTM<" not in batch_page(tmp_path, []).html()


@NEEDS_CHROMIUM
def test_index_is_sorted_in_a_browser(output: Path, tmp_path: Path) -> None:
    """Catches numbers that are sorted as texts, rows that lose their cells, and headings that the keyboard does not reach."""
    for name, rows in (("x2", 900), ("x10", 12345), ("x1", 7)):
        shutil.copytree(output / "x", tmp_path / name)
        write_json(tmp_path / name / "ranking.json", {**read_json(tmp_path / name / "ranking.json"), "name": name})
        write_json(tmp_path / name / TIMINGS, {**read_json(tmp_path / name / TIMINGS), "alignment_rows": rows})
    answer = answer_of(batch_page(tmp_path, []).html(), """setTimeout(() => {
      const names = () => [...document.querySelectorAll(".targets tr td:first-child")].map((cell) => cell.textContent);
      const heading = (text) => [...document.querySelectorAll("th")].find((one) => one.textContent === text);
      const answer = [names()];
      heading("aligned sequences").click();
      answer.push(names());
      heading("aligned sequences").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
      answer.push(names(), heading("aligned sequences").ariaSort);
      heading("target").click();
      answer.push(names(), heading("aligned sequences").ariaSort, document.querySelectorAll("[tabindex]").length);
      document.body.textContent = "ANSWER" + JSON.stringify(answer) + "END";
    }, 300);""", tmp_path)  # fmt: skip
    assert answer == [
        ["x1", "x2", "x10"], ["x10", "x2", "x1"], ["x1", "x2", "x10"], "ascending", ["x1", "x2", "x10"], None, 6,
    ]  # fmt: skip


def test_a_target_leads_back_to_our_index_not_to_the_users(output: Path, tmp_path: Path) -> None:
    """Catches a way back to a page of somebody else's, beside which evodsp writes its own."""
    shutil.copytree(output / "x", tmp_path / "x")
    (tmp_path / "index.html").write_text("<h1>My proteins</h1>")
    write_target_page(tmp_path / "x", [])
    assert '<a href="../index_evodsp.html">' in (tmp_path / "x" / "report.html").read_text()
    assert write_batch_page(tmp_path, []) == tmp_path / "index_evodsp.html"
    assert write_batch_page(tmp_path, []) == tmp_path / "index_evodsp.html", "the second run takes it for the user's"


def test_structures_are_links_to_their_files(output: Path) -> None:
    """Catches names that cannot be clicked, and a link of one seed to another's file."""
    page = (output / "x" / "report.html").read_text()
    links = re.findall(r'<a href="([^"]+)" download>([^<]+)</a>', page)
    assert links == 2 * [(name, name) for name in ("seed_0.cif", "seed_1.cif", "seed_2.cif")]
    assert all((output / "x" / address).is_file() for address, _ in links)


def test_long_peptide_bonds_are_counted(output: Path) -> None:
    """Catches a broken chain that looks whole, a bond over a residue without atoms or from chain to chain, and a sound bond
    that counts."""
    assert peptide_bonds(helix(0)) == PeptideBonds(57, 0, 1, ())
    assert peptide_bonds(STRETCHED) == PeptideBonds(57, 57, 1, ("A",))
    few = helix(0)
    few.positions[20:] += [0, 0, 2]
    assert peptide_bonds(few) == PeptideBonds(57, 1, 1, ())
    assert peptide_bonds(replace(few, lengths=(20, 40))) == PeptideBonds(56, 0, 2, ())
    assert peptide_bonds(replace(STRETCHED, lengths=(20, 40))).traced == ("A", "B")
    assert peptide_bonds(replace(helix(0), lengths=(1, 59))) == PeptideBonds(56, 0, 2, ())  # A has no bond
    page = (output / "x" / "report.html").read_text()
    assert page.count("57 of 57 peptide bonds are longer than 1.53 Å, which AlphaFold2 counts as a violation:") == 1
    assert [one["shapes"]["predicted"]["traced"] for one in embedded(page)["seeds"]] == [[], [], ["A"]]
    assert 'class="soft">57 of 57' in page, "a warning that looks like an error"
    assert page.count("--relax best mends") == 1


@pytest.mark.parametrize(
    ("bonds", "end"),
    [
        (PeptideBonds(57, 1, 1, ()), "1 of 57 peptide bonds is longer|: the ribbon is drawn through it."),
        (PeptideBonds(57, 2, 2, ()), "2 of 57 peptide bonds are longer|: the ribbon is drawn through them."),
        (PeptideBonds(57, 9, 1, ("A",)), "9 of|: the chain is drawn as a line through the CA atoms."),
        (PeptideBonds(57, 9, 3, ("A", "C")), "9 of|: 2 of 3 chains are drawn as a line through the CA atoms."),
        (PeptideBonds(57, 0, 1, ()), "|"),
    ],
)
def test_what_is_said_of_long_bonds(bonds: PeptideBonds, end: str) -> None:
    first, _, last = end.partition("|")
    assert bonds.note.startswith(first)
    assert bonds.note.endswith(last)
    assert bool(bonds.note) == bool(bonds.long)


def test_the_view_begins_along_the_shortest_axis(output: Path) -> None:
    """Catches a mirror image, a quaternion of the opposite rotation, and a structure that stands upright or beside the box."""
    view = embedded((output / "x" / "report.html").read_text())["view"]
    axes, turn = np.array(view["axes"]), view["quaternion"]
    np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-9)
    assert np.linalg.det(axes) == pytest.approx(1)
    rotation = Rigid.from_quaternion(torch.tensor([turn[3], *turn[:3]]), torch.zeros(3)).rotation
    np.testing.assert_allclose(rotation, axes, atol=1e-6)
    one = helix(0)
    seen = (one.positions[:, CA][one.mask[:, CA] > 0.5] - view["centre"]) @ axes.T
    np.testing.assert_allclose(seen.min(0) + seen.max(0), 0, atol=1e-4)
    assert np.ptp(seen, axis=0)[0] > 80  # Å, of a helix that is 88 Å long


@pytest.mark.parametrize("angles", [(180, 0, 0), (0, 180, 0), (0, 0, 180), (0, 0, 0), (170, 80, -120)])
def test_any_rotation_has_its_quaternion(angles: tuple[float, float, float]) -> None:
    """Catches a quaternion that is undefined for half turns."""
    rotation = np.eye(3)
    for axis, angle in enumerate(np.radians(angles)):
        turn, (a, b) = np.eye(3), ((axis + 1) % 3, (axis + 2) % 3)
        turn[[a, a, b, b], [a, b, a, b]] = np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)
        rotation = turn @ rotation
    x, y, z, w = View(np.zeros(3), rotation).quaternion
    found = Rigid.from_quaternion(torch.tensor([w, x, y, z]), torch.zeros(3)).rotation
    np.testing.assert_allclose(found, rotation, atol=1e-6)


@pytest.fixture(scope="module")
def relaxed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target whose best seed is stretched, and sound after relaxation; its second seed is not relaxed."""
    folder = tmp_path_factory.mktemp("relaxed") / "x"
    folder.mkdir()
    write_results(folder, {2: STRETCHED, 3: helix(3)}, "cif", {"numerics": 1}, NAME)
    timings = {
        "features_seconds": 1.0,
        "model_seconds": 3.25,
        "peak_memory_mib": 1234,
        "peak_memory_of": "process, so far",
    }
    write_json(folder / TIMINGS, {"name": NAME, **timings})
    (folder / "seed_2_relaxed.cif").write_text(structure_text(helix(2), "cif", Origin()))
    write_target_page(folder, [alignment()])
    return folder


def test_a_relaxed_structure_is_shown_first(relaxed: Path, tmp_path: Path) -> None:
    """Catches a page that shows, or warns of, the structure whose repair the user has asked for, without a link to the repaired
    one, a file of other atoms that is drawn with these names, and words of the program's own book-keeping."""
    page = (relaxed / "report.html").read_text()
    first, second = embedded(page)["seeds"]
    assert [*first["shapes"]] == ["relaxed", "predicted"]
    assert [*second["shapes"]] == ["predicted"]
    assert [one["traced"] for one in first["shapes"].values()] == [[], ["A"]]
    xyz = [
        np.frombuffer(base64.b64decode(one["coordinates"]), "<i4").reshape(-1, 3) for one in first["shapes"].values()
    ]
    assert np.ptp(xyz[1], axis=0).max() > 1.5 * np.ptp(xyz[0], axis=0).max()
    links = re.findall(r'<a href="([^"]+)" download>', page)
    assert links == [
        *2 * ["seed_2_relaxed.cif", "seed_2.cif"],
        "seed_3.cif",
        "seed_2_relaxed.cif",
        "seed_2.cif",
        "seed_3.cif",
    ]
    assert all((relaxed / link).is_file() for link in links)
    shown = re.findall(r'<p class="of-seed" data-seed="2" data-shape="relaxed">.*?</p>', page)
    assert len(shown) == 1
    assert "bonds" not in shown[0]
    assert "1,234 (process, so far)" in page
    assert not {"numerics", "version of the numbers", "peak memory is of"} & set(re.findall(r"<td>([^<]*)</td>", page))
    shutil.copytree(relaxed, tmp_path / "x")
    more = replace(helix(2), mask=np.where(np.arange(37) == 4, 0, helix(2).mask).astype(np.float32))
    (tmp_path / "x" / "seed_2_relaxed.cif").write_text(structure_text(more, "cif", Origin()))
    with pytest.raises(UserError, match=r"seed_2_relaxed.cif: has other atoms than seed_2.cif; "):
        write_target_page(tmp_path / "x", [])


@pytest.mark.verify
@NEEDS_CHROMIUM
def test_predicted_and_relaxed_in_a_browser(relaxed: Path, tmp_path: Path) -> None:
    """Catches a switch that does nothing, or offers what is not there, and a readout that is out of sight in a low window."""
    answer = answer_of((relaxed / "report.html").read_text(), """setTimeout(async () => {
      const wait = () => new Promise((done) => setTimeout(done, 300)), answer = { notes: [] };
      const note = () => answer.notes.push(document.querySelector(".of-seed:not([hidden])").textContent);
      const [relaxed, predicted] = document.querySelectorAll("#shapes button");
      note();
      predicted.click();
      note();
      document.querySelectorAll("#seeds button")[1].click();
      note();
      answer.disabled = [relaxed.disabled, predicted.disabled];
      const chart = document.querySelector("svg.along"), readout = document.getElementById("readout");
      window.scrollTo(0, chart.getBoundingClientRect().top - 100);
      const box = chart.getBoundingClientRect();
      chart.dispatchEvent(new MouseEvent("mousemove", { clientX: box.left + box.width / 2, clientY: box.top + 5 }));
      await wait();
      answer.readout = [window.scrollY > 300, readout.textContent.length > 10, readout.getBoundingClientRect().top];
      document.body.textContent = "ANSWER" + JSON.stringify(answer) + "END";
    }, 500);""", tmp_path)  # fmt: skip
    first, second, third = answer["notes"]
    assert first == "Download: seed_2_relaxed.cif, seed_2.cif"
    assert second.startswith("Download: seed_2_relaxed.cif, seed_2.cif · 57 of 57 peptide bonds")
    assert third == "Download: seed_3.cif"
    assert answer["disabled"] == [True, False]
    assert answer["readout"] == [True, True, 0]


@pytest.mark.verify
@NEEDS_CHROMIUM
def test_nothing_is_cut_in_a_narrow_window(output: Path, relaxed: Path, tmp_path: Path) -> None:
    """Catches charts, tables and buttons that leave a telephone's screen."""
    pages = {"target": output / "x" / "report.html", "relaxed": relaxed / "report.html", "index": output / "index.html"}
    assert not cut({name: path.read_text() for name, path in pages.items()}, 400, tmp_path)


@NEEDS_CHROMIUM
def test_page_in_a_browser(output: Path, tmp_path: Path) -> None:
    """Catches errors of the script, an empty viewer, and hovering that names another residue or a transposed pair."""
    probe = (Path(__file__).parent / "probe_page.js").read_text()
    answer = answer_of((output / "x" / "report.html").read_text(), probe, tmp_path)
    assert answer["drawn"] > 2000, "the viewer is empty"
    assert answer["redrawn"] > 2000
    assert answer["pair"] == "ALA 21: pLDDT 75.0 · ALA 11: pLDDT 85.0 · 3 sequences · PAE 21 → 11: 0.0 Å"
    assert answer["lines"] == 2
    assert answer["residue"] == "ALA 31: pLDDT 65.0 · 2 sequences"
    assert answer["cursors"] == 2
    assert answer["before"] == ""
    named = re.fullmatch(r"ALA (\d+): pLDDT ([\d.]+) · \d sequences", answer["structure"])
    assert named is not None, "the pointer on the structure names no residue"
    assert float(named[2]) == 96 - int(named[1])
    assert (answer["marked"], answer["along"]) == (1, 2), "neither the matrix nor the charts show it"
    assert answer["other"] == "ALA 31: pLDDT 60.0 · 2 sequences"
    assert answer["shown"] == ["1"]
    assert answer["width"] > 0.85, "the structure does not fill the box"
    assert answer["stretched"] > 2000, "a chain with long bonds is not drawn"
    assert answer["note"].startswith("Download: seed_2.cif · 57 of 57 peptide bonds are longer than 1.53 Å")
    assert answer["gap"] > 20, "a right-aligned heading runs into the one after it"


def test_chains_that_lie_in_each_other_are_said(output: Path, tmp_path: Path) -> None:
    """Catches a complex whose chains lie in each other, on a page of good pLDDT that says nothing of it."""
    one = helix(0)
    half = RESIDUES // 2
    onto = {
        shift: np.concatenate([one.positions[:half], one.positions[:half] + shift]) for shift in (np.float32(0.5), 90)
    }
    for shift, positions in onto.items():
        mask = np.concatenate([one.mask[:half], one.mask[:half]])
        both = replace(one, positions=(positions * mask[..., None]).astype(np.float32), mask=mask, lengths=(half, half))
        (folder := tmp_path / f"{shift}").mkdir()
        write_results(folder, {0: replace(both, aligned_error=None)}, "cif", {}, NAME)
        write_json(folder / TIMINGS, {"name": NAME, "features_seconds": 1.0, "model_seconds": 3.25})
        write_target_page(folder, [alignment()])
        page = unescape(re.sub(r"<[^>]+>", " ", (folder / "report.html").read_text().partition("<script")[0]))
        assert "clashes between chains, best seed" in page
        assert ("pairs of atoms clash (closer than 2 Å) in chains A and B: real chains" in page) == (shift == 0.5)
    assert "clashes" not in (output / "x" / "report.html").read_text()

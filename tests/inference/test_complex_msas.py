"""The MSAs of complexes: where alignments of chains are looked for, which of their rows are paired, ColabFold's own file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evodsp.errors import UserError
from evodsp.geometry.residues import decode
from evodsp.inference.config import Pairing
from evodsp.inference.target_msas import ComplexMsa
from evodsp.inference.targets import Target, find_targets

FIRST, SECOND = "ACDEFGHIKL", "MNPQRST"


def write_alignments(folder: Path, letters: str, name: str, species: str = "BOVIN") -> None:
    """An alignment with a row of an entry, and rows for pairing of which one has this species."""
    folder.mkdir(parents=True)
    (folder / "family.a3m").write_text(f">q\n{letters}\n>2xyz_{name}\nW{letters[1:]}\n>alone\n{letters[:-1]}-\n")
    rows = f">sp|P12345|X_{species}\n{letters[:-1]}W\n>sp|P12346|X_YEAST{name}\n{letters[:-2]}WW\n"
    (folder / "uniprot_hits.a3m").write_text(f">q\n{letters}\n{rows}")


def target_of(root: Path, text: str, alignments: Path | None, pairing: Pairing = "species") -> Target:
    (root / "x.fasta").write_text(text)
    (target, *_), failures = find_targets([root / "x.fasta"], alignments, pairing=pairing)
    assert not failures
    return target


def rows_of(target: Target) -> list[str]:
    """The rows of the MSA, with the chains in the order in which they were given."""
    found = ComplexMsa.read(target).alignments
    return [decode(row) for row in found[0].residues] if found else []


DIMER = f">x\n{SECOND}:{FIRST}\n"


@pytest.mark.parametrize(
    ("first", "second", "others"),
    [("x_A", "x_B", True), ("x/A", "x/B", True), ("A", "B", False), ("x_A", "x/B", True)],
    ids=["x_A", "x/A", "A", "both"],
)
def test_where_alignments_of_chains_lie(tmp_path: Path, first: str, second: str, others: bool) -> None:
    """Catches a layout that is not found, and the alignments of one record's chain A for every record."""
    folder = tmp_path / "alignments"
    write_alignments(folder / first, SECOND, "A")
    write_alignments(folder / second, FIRST, "B")
    more = ">y\nAC:DE\n" if others else ""
    target = target_of(tmp_path, DIMER + more, folder)
    assert [chain.alignments for chain in target.chains] == [folder / first, folder / second]
    assert not target.notes
    rows = rows_of(target)
    assert rows[0] == SECOND + FIRST
    assert rows[1] == SECOND[:-1] + "W" + FIRST[:-1] + "W", "rows of one species stand beside one another"
    gaps = {(row[: len(SECOND)].strip("-") == "", row[len(SECOND) :].strip("-") == "") for row in rows[2:]}
    assert gaps == {(True, False), (False, True)}
    if not others:  # A may be any record's
        several = target_of(tmp_path, DIMER + ">y\nAC:DE\n", folder)
        assert [chain.alignments for chain in several.chains] == [None, None]


def test_a_chain_that_was_a_record_keeps_its_alignments(tmp_path: Path) -> None:
    """Catches the folders of training, 1abc_D, that are not found for the complex 1abc, whose chains are called A and B."""
    folder = tmp_path / "alignments"
    write_alignments(folder / "1abc_D", FIRST, "D")
    (tmp_path / "1abc.fasta").write_text(f">1abc_D\n{FIRST}\n>1abc_E\n{SECOND}\n")
    (target,), _ = find_targets([tmp_path / "1abc.fasta"], folder, one_complex=True)
    assert [chain.alignments for chain in target.chains] == [folder / "1abc_D", None]
    (note,) = target.notes
    assert note.startswith(f"no alignments for 1abc_E in {folder}: predicted from its sequence alone")
    assert target.notes_of_many == target.notes, "a complex of which one chain has alignments is not alone"
    assert rows_of(target)[1:] == [f"W{FIRST[1:]}-------", f"{FIRST[:-1]}--------"]


def test_identical_chains_need_alignments_once(tmp_path: Path) -> None:
    """Catches copies that are predicted from their sequence alone because only one of them, not the first, has a folder."""
    folder = tmp_path / "alignments"
    write_alignments(folder / "x_B", FIRST, "B")
    target = target_of(tmp_path, f">x\n{FIRST}:{FIRST}\n", folder)
    assert not target.notes
    assert rows_of(target)[1:] == [2 * ("W" + FIRST[1:]), 2 * (FIRST[:-1] + "-")]
    assert not target.pairs


@pytest.mark.parametrize(
    ("pairing", "paired"),
    [
        ("species", [(SECOND[:-1] + "W", FIRST[:-1] + "W")]),
        ("entry", [("W" + SECOND[1:], "W" + FIRST[1:])]),
        ("none", []),
    ],
)
def test_rules_for_pairing(tmp_path: Path, pairing: Pairing, paired: list[tuple[str, str]]) -> None:
    """Catches a rule that is not heeded."""
    folder = tmp_path / "alignments"
    write_alignments(folder / "x_A", SECOND, "A")
    write_alignments(folder / "x_B", FIRST, "B")
    target = target_of(tmp_path, DIMER, folder, pairing)
    whole = [row for row in rows_of(target)[1:] if row[0] != "-" and row[-2] != "-"]
    assert whole == ["".join(parts) for parts in paired]


def test_the_fingerprint_covers_rows_for_pairing(tmp_path: Path) -> None:
    """Catches results that are kept although the rows that were paired have changed; and others that are not kept."""
    folder = tmp_path / "alignments"
    write_alignments(folder / "x_A", SECOND, "A")
    write_alignments(folder / "x_B", FIRST, "B")
    one, alone = target_of(tmp_path, DIMER, folder), target_of(tmp_path, DIMER, folder, "none")
    before, without = one.digest, alone.digest
    with (folder / "x_B" / "uniprot_hits.a3m").open("a") as file:
        file.write(f">sp|P1|A_HUMAN\n{FIRST}\n")
    assert one.digest != before
    assert alone.digest == without


def test_alignments_of_another_sequence(tmp_path: Path) -> None:
    """Catches an alignment of the partner that is taken for the chain's."""
    write_alignments(tmp_path / "alignments" / "x_A", FIRST, "A")
    with pytest.raises(UserError, match=r"family\.a3m: the first row 'q' has 10 residues, the query 'x_A' has 7"):
        ComplexMsa.read(target_of(tmp_path, DIMER, tmp_path / "alignments"))


def test_rows_of_colabfolds_alignment(tmp_path: Path) -> None:
    """Catches rows of one chain that are paired, paired rows that come apart, and copies without their rows."""
    width = len(FIRST)
    rows = (
        f">101\t102\n{FIRST}{SECOND}\n>p1\tp2\nW{FIRST[1:]}{SECOND[:-1]}W\n>q1\tq2\n{FIRST[:-1]}Y{SECOND[:-1]}Y\n"
        f">101\n{FIRST}{'-' * len(SECOND)}\n>u\nK{FIRST[1:]}{'-' * len(SECOND)}\n>102\n{'-' * width}{SECOND}\n"
        f">v\n{'-' * width}aa{SECOND[:-1]}K\n"
    )
    (tmp_path / "x.a3m").write_text(f"#{width},{len(SECOND)}\t2,1\n{rows}")
    (target,), _ = find_targets([tmp_path / "x.a3m"], None)
    found = ComplexMsa.read(target)
    own = [(row[:width], row[width : 2 * width], row[2 * width :]) for row in rows_of(target)]
    assert own[:3] == [
        (FIRST, FIRST, SECOND),
        ("W" + FIRST[1:], "W" + FIRST[1:], SECOND[:-1] + "W"),
        (FIRST[:-1] + "Y", FIRST[:-1] + "Y", SECOND[:-1] + "Y"),
    ]
    gaps = "-" * width
    assert sorted(own[3:]) == sorted(
        [("K" + FIRST[1:], "K" + FIRST[1:], "-" * len(SECOND)), (gaps, gaps, SECOND[:-1] + "K")]
    )
    assert found.merged.deletions[-1, 2 * width] == 2
    assert not target.pairs
    assert found.line == "5 rows in the MSA of all chains, 2 of them paired"
    assert np.count_nonzero(found.merged.block == 0) == 3

"""The comparison of structure readers: a difference is found, and has the kind that explains it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scripts.parity.structures import Account, Residue, biopython_chains, compare, differences, gemmi_chains, own_chains
from tests.builders.backbone import chain, ligand, pdb_text

ATOMS = {"N": (0.0, 0.0, 0.0), "CA": (1.0, 0.0, 0.0), "NH1": (2.0, 0.0, 0.0), "NH2": (3.0, 0.0, 0.0)}
ONE = Residue("1", "R", ATOMS, "ARG")
TWO = Residue("2A", "K", ATOMS, "LYS")


def kinds(theirs: list[Residue], own: list[Residue]) -> list[str]:
    return [kind for kind, _ in differences("gemmi", theirs, own)]


def test_kinds() -> None:
    """Catches a difference of residues, order, numbers, atoms or locations that nobody is told of, or by a wrong name."""
    assert kinds([ONE, TWO], [ONE, TWO]) == []
    assert kinds([ONE, TWO], [ONE]) == ["only theirs: ATOM"]
    assert kinds([ONE, replace(TWO, is_het=True)], [ONE]) == ["only theirs: HETATM"]
    assert kinds([ONE, replace(TWO, name="NH2")], [ONE]) == ["only theirs: cap"]
    assert kinds([ONE], [ONE, TWO]) == ["only evodsp's, not gemmi's"]
    assert kinds([ONE, TWO], [ONE, replace(TWO, number="2")]) == ["other residues"]
    assert kinds([ONE, TWO], [TWO, ONE]) != []
    assert kinds([ONE], [replace(ONE, atoms={"N": (0.0, 0.0, 0.0)})]) == ["atoms"]
    assert kinds([ONE], [replace(ONE, atoms=ATOMS | {"CA": (1.01, 0.0, 0.0)})]) == ["location"]
    assert kinds([ONE], [replace(ONE, atoms=ATOMS | {"NH1": ATOMS["NH2"], "NH2": ATOMS["NH1"]})]) == [
        "NH1 and NH2 exchanged"
    ]
    assert kinds([], [ONE]) == ["chain that only evodsp has"]
    assert kinds([ONE], []) == ["chain that evodsp has not"]
    assert kinds([replace(ONE, is_het=True)], []) == ["chain of one residue"]


def test_three_readers_of_one_file(tmp_path: Path) -> None:
    """Catches a side that reads nothing, and forms without a listed sequence that are not compared with the file."""
    residues = chain(("GLY", "SER", "MSE", "LYS"))
    residues[1:2] = [
        replace(residues[1], altloc="A", occupancy=0.4),
        replace(residues[1], altloc="B", occupancy=0.6, row=0),
    ]
    path = tmp_path / "1abc.pdb"
    path.write_text(pdb_text([*residues, "TER", ligand("HOH", 90)]))
    read = own_chains(path), gemmi_chains(path), biopython_chains(path)
    for chains in read:
        assert [(r.number, r.letter) for r in chains["A"]] == [("1", "G"), ("2", "S"), ("3", "M"), ("4", "K")]
    accounts: dict[tuple[str, str], Account] = {}
    compare(path, accounts)
    assert {form for form, _ in accounts} == {"the file", "atoms", "gemmi's PDB", "Biopython's PDB"}
    assert {side for _, side in accounts} == {"gemmi", "Biopython", "the whole file"}
    assert all((a.chains, a.equal, a.residues, a.kinds, a.refused) == (1, 1, 4, {}, {}) for a in accounts.values())

"""Copies of the nearest training complex: which one is taken, and whose atoms stand where."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats.mmcif import read_assembly
from evodsp.data.records import Assembly, Chain
from evodsp.data.similarity import nearest
from evodsp.data.similarity.nearest import PlacedCopy, TrainingSet, placed_copies
from evodsp.data.similarity.sequences import score
from evodsp.data.sources.structures import AssemblyFolder
from evodsp.geometry.residues import CA, RESTYPE_ATOM37_MASK, RESTYPE_ORDER
from scripts.examples.synthetic.mmcif_writer import write_mmcif

ALPHA, BETA, GAMMA = "MKTAYIAKQRWLEDFGHNPC", "GSHMDERVTCNPFWAQLLKK", "PPLLKKWWEEDDSSTTRRGG"


def chain(name: str, letters: str, seed: int, resolution: float = 2.0) -> Chain:
    positions = np.random.default_rng(seed).normal(size=(len(letters), 37, 3)).astype(np.float32) * 20
    mask = RESTYPE_ATOM37_MASK[[RESTYPE_ORDER[letter] for letter in letters]].astype(np.float32)
    return Chain(
        pdb_id="9abc",
        chain_id=name,
        sequence=letters,
        residue_number=np.arange(1, len(letters) + 1, dtype=np.int32),
        insertion_code=("",) * len(letters),
        is_missing=np.zeros(len(letters), bool),
        positions=positions * mask[..., None],
        mask=mask,
        resolution=resolution,
    )


def mutated(letters: str, number: int) -> str:
    """The sequence with W at so many places from the third on."""
    return letters[:2] + "W" * number + letters[2 + number :]


@dataclass(frozen=True)
class Training:
    """Training complexes in a folder."""

    known: TrainingSet
    folder: AssemblyFolder

    def copy_for(self, name: str, target: Assembly) -> PlacedCopy | str:
        letters = {name: tuple(one.sequence for one in target.chains)}
        ((_, found),) = placed_copies(letters, self.known, lambda _: target, self.folder.assembly_of)
        return found if isinstance(found, str) else found[0]


def training(folder: Path, **complexes: list[tuple[str, str]]) -> Training:
    """Training complexes of chains (name, sequence), written to a folder. `_2A5` in a name: a resolution of 2.5 Å."""
    for name, chains in complexes.items():
        resolution = float(name.partition("_")[2].replace("A", ".") or 3)
        made = [chain(one, letters, seed, resolution) for seed, (one, letters) in enumerate(chains)]
        write_mmcif(folder / f"{name}.cif", made)
    sequences = {name: tuple(letters for _, letters in chains) for name, chains in complexes.items()}
    return Training(TrainingSet(sequences), AssemblyFolder(folder, None))


def target(*letters: str) -> Assembly:
    names = tuple("XYZUVWST"[: len(letters)])
    return Assembly("9abc", names, tuple(chain(name, one, 50) for name, one in zip(names, letters, strict=True)))


def test_each_chain_has_the_atoms_of_its_own_counterpart(tmp_path: Path) -> None:
    """Catches chains that are paired by their order, and atoms of residues that the alignment does not pair."""
    shorter = mutated(BETA, 2)[:15]
    found = training(tmp_path, near=[("L", shorter), ("H", ALPHA)]).copy_for("9abc", target(ALPHA, BETA))
    assert isinstance(found, PlacedCopy)
    assert (found.nearest, found.assembly.names) == ("near", ("H", "L"))
    assert (found.identity, found.coverage) == (pytest.approx(33 / 35), 35 / 40)
    source = read_assembly(tmp_path / "near.cif", None).chains
    first, second = found.assembly.chains
    assert (first.sequence, second.sequence) == (ALPHA, BETA)
    np.testing.assert_array_equal(first.positions, source[1].positions)
    np.testing.assert_array_equal(second.positions[:15], source[0].positions)
    np.testing.assert_array_equal(second.mask[:, CA], np.arange(20) < 15)


def test_the_highest_sum_of_scores_is_taken(tmp_path: Path) -> None:
    """Catches the nearest by one chain, a complex of other kinds or with another number of chains, and the target itself."""
    source = training(
        tmp_path,
        itself=[("A", ALPHA), ("B", BETA)],
        more=[("A", ALPHA), ("B", BETA), ("C", GAMMA)],
        twice=[("A", ALPHA), ("B", ALPHA)],
        first=[("A", ALPHA), ("B", mutated(BETA, 12))],
        both=[("A", mutated(BETA, 2)), ("B", mutated(ALPHA, 2))],
    )
    found = source.copy_for("itself", target(ALPHA, BETA))
    assert isinstance(found, PlacedCopy)
    assert found.nearest == "both"
    assert source.copy_for("itself", target(ALPHA, ALPHA)).nearest == "twice"  # type: ignore[union-attr]
    reason = "there is no training complex with as many chains of as many kinds that it could be aligned with"
    assert source.copy_for("more", target(ALPHA, BETA, GAMMA)) == reason
    assert source.copy_for("twice", target(ALPHA, ALPHA)) == reason


def test_of_equals_the_best_that_can_be_read(tmp_path: Path) -> None:
    """Catches the first of equals, and one file that ends the copies of a complex."""
    pair = [("A", ALPHA), ("B", BETA)]
    source = training(tmp_path, a_3A0=pair, b_2A5=pair, c_1A5=pair)
    assert source.copy_for("9abc", target(ALPHA, BETA)).nearest == "c_1A5"  # type: ignore[union-attr]
    (tmp_path / "c_1A5.cif").write_text("data_C\n")
    assert source.copy_for("9abc", target(ALPHA, BETA)).nearest == "b_2A5"  # type: ignore[union-attr]
    for name in ("a_3A0", "b_2A5"):
        (tmp_path / f"{name}.cif").unlink()
    assert str(source.copy_for("9abc", target(ALPHA, BETA))).startswith(
        "its nearest training complexes cannot be read: "
    )


def test_the_best_assignment_is_that_of_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an assignment that is not the best one of few chains, and one of many chains that uses a chain twice."""
    table = np.random.default_rng(0).normal(size=(4, 4))
    best = max(itertools.permutations(range(4)), key=lambda order: sum(table[n, order[n]] for n in range(4)))
    assert nearest._best_assignment(table).tolist() == list(best)
    monkeypatch.setattr(nearest, "_MOST_PERMUTED", 3)
    many = nearest._best_assignment(table)
    assert sorted(many.tolist()) == [0, 1, 2, 3]
    assert table[np.arange(4), many].max() == table.max()


def test_a_target_that_lies_as_the_copy_does(tmp_path: Path) -> None:
    """Catches scores of pairs of sequences that are taken for those of other pairs."""
    source = training(tmp_path, near=[("A", ALPHA), ("B", BETA)])
    two = target(ALPHA, BETA)
    found = [source.copy_for("9abc", one) for one in (two, Assembly("9abc", ("Y", "X"), two.chains[::-1]))]
    assert [one.assembly.names for one in found if isinstance(one, PlacedCopy)] == [("A", "B"), ("B", "A")]
    assert score(ALPHA, BETA) < score(ALPHA, ALPHA)
    missing = dataclasses.replace(two.chains[0], mask=two.chains[0].mask * 0)
    assert isinstance(source.copy_for("9abc", Assembly("9abc", two.names, (missing, two.chains[1]))), PlacedCopy)

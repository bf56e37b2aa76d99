"""What copying the nearest training chain scores: which chain is copied, what the copy scores, and what bad chains cost."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from evodsp.cli import main
from evodsp.data.doctor import examination
from evodsp.data.formats.mmcif import read_assembly
from evodsp.data.records import Assembly, Chain
from evodsp.data.similarity import nearest
from evodsp.data.similarity.nearest import MOST_FILES, Bar, Copy, PlacedCopy, TrainingSet, bar, copies, placed_copies
from evodsp.data.similarity.sequences import score, sequences
from evodsp.data.sources.structures import AssemblyFolder, StructureFolder
from evodsp.errors import UserError
from evodsp.geometry.residues import CA, RESTYPE_ATOM37_MASK, RESTYPE_ORDER, RESTYPES
from scripts.examples.synthetic.mmcif_writer import write_mmcif
from tests.builders.training_chains import TINY, write_chain
from tests.shared import SHARED

NEAREST = SHARED / "tcr" / "nearest.csv"


def random_sequence(length: int, seed: int = 0) -> str:
    return "".join(RESTYPES[code] for code in np.random.default_rng(seed).integers(len(RESTYPES), size=length))


class Structures:
    """Chains in memory, each with the coordinates that its name is given."""

    def __init__(self) -> None:
        self.chains: dict[str, Chain] = {}
        self.read: list[str] = []

    def add(self, key: str, letters: str, trace: np.ndarray, resolution: float | None = 2.0) -> None:
        positions = np.zeros((len(letters), 37, 3), np.float32)
        mask = np.zeros((len(letters), 37), np.float32)
        positions[:, CA], mask[:, CA] = trace, 1
        numbers, names = np.arange(1, len(letters) + 1, dtype=np.int32), ("",) * len(letters)
        missing = np.zeros(len(letters), bool)
        pdb_id, chain_id = key.split("_")
        self.chains[key] = Chain(
            pdb_id, chain_id, letters, numbers, names, missing, positions, mask, resolution=resolution
        )

    def chain(self, key: str) -> Chain:
        self.read.append(key)
        if key not in self.chains:
            raise UserError(f"{key}.cif:7: broken")
        return self.chains[key]

    def assembly_of(self, key: str) -> Assembly:
        return Assembly.of_chain(key, self.chain(key))


def trace(length: int, seed: int = 0) -> np.ndarray:
    """A helix of CA atoms with noise, in Å."""
    n = np.arange(length)
    helix = np.stack([2.3 * np.cos(1.745 * n), 2.3 * np.sin(1.745 * n), 1.5 * n], -1)
    return helix + np.random.default_rng(seed).normal(size=(length, 3))


def share_kept(true: np.ndarray, copied: np.ndarray) -> float:
    """lDDT-CA, in plain loops. Rows of NaN have no counterpart."""
    kept, counted = 0.0, 0
    for one in range(len(true)):
        for other in range(len(true)):
            distance = np.linalg.norm(true[one] - true[other])
            if one != other and distance < 15:
                error = abs(distance - np.linalg.norm(copied[one] - copied[other]))
                counted += 1
                kept += np.mean([bool(error < threshold) for threshold in (0.5, 1, 2, 4)])
    return kept / counted


def found(structures: Structures, targets: Iterable[str], training: Iterable[str]) -> Bar:
    letters = {key: chain.sequence for key, chain in structures.chains.items()}
    known, others = ({key: letters.get(key, "") for key in keys} for keys in (targets, training))
    return bar_of(structures, known, others)


def of_chains(letters: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The sequences of single chains."""
    return {key: (one,) if one else () for key, one in letters.items()}


def bar_of(structures: Structures, targets: Mapping[str, str], training: Mapping[str, str]) -> Bar:
    return bar("test chain", of_chains(targets), of_chains(training), structures.assembly_of, structures.assembly_of, 0)


def test_the_copy_is_that_of_the_aligned_residues() -> None:
    """Catches atoms that are put on other residues, or scored where they have no counterpart or no CA; an identity of all
    residues; and the likest chain by identity, which may be a short one."""
    structures, letters = Structures(), random_sequence(50)
    mine, other = trace(50), trace(40, seed=1)
    structures.add("1abc_A", letters, mine)
    changed = [letters[at] for at in range(50) if not 20 <= at < 30]
    changed[4], changed[6] = ("W" if letters[4] != "W" else "V"), "X"
    structures.add("2abc_A", "".join(changed), other)
    structures.add("3abc_A", letters[:12], trace(12))
    structures.chains["2abc_A"].mask[38, CA] = 0
    structures.chains["1abc_A"].mask[2, CA] = 0
    (copy,) = found(structures, ["1abc_A"], ["3abc_A", "2abc_A"]).copies
    assert (copy.chain, copy.nearest) == ("1abc_A", "2abc_A")
    assert (copy.identity, copy.coverage) == (pytest.approx(37 / 39), 39 / 50)
    copied = np.full((50, 3), np.nan)
    copied[[*range(20), *range(30, 50)]] = other
    copied[48] = np.nan
    resolved = [at for at in range(50) if at != 2]
    assert copy.lddt_ca == pytest.approx(share_kept(mine[resolved], copied[resolved]), abs=1e-6)
    assert 0.2 < copy.lddt_ca < 0.9


def test_of_equal_scores_the_best_resolution_is_copied() -> None:
    """Catches the first or last of equal chains, a chain without a resolution that passes for a perfect one, and a chain that
    is copied from itself."""
    structures, letters = Structures(), random_sequence(40)
    for number, resolution in enumerate([None, 3.0, 1.8, 1.8, 0.9]):
        structures.add(f"{number}abc_A", letters, trace(40, number), resolution)
    names = [f"{number}abc_A" for number in range(5)]
    result = found(structures, ["4abc_A"], names)
    assert ([copy.nearest for copy in result.copies], result.trained_on) == (["2abc_A"], ["4abc_A"])
    assert found(structures, ["4abc_A"], names[:2]).copies[0].nearest == "1abc_A"
    (copy,) = found(structures, ["4abc_A"], names[:1]).copies
    assert (copy.nearest, copy.identity, copy.coverage) == ("0abc_A", 1.0, 1.0)
    assert found(structures, ["4abc_A"], ["4abc_A"]).copies == []


def test_a_bad_chain_costs_no_other() -> None:
    """Catches one broken file, on either side, that ends the comparison, and a reason that nobody gets to know."""
    structures, letters = Structures(), random_sequence(40)
    near, far = letters[:30] + random_sequence(10, 1), letters[:12] + random_sequence(28, 2)
    structures.add("1abc_A", letters, trace(40))
    structures.add("2abc_A", letters, trace(40, 1))
    structures.chains["2abc_A"].mask[:] = 0
    structures.add("3abc_A", far, trace(40, 2))
    structures.add("4abc_A", "A", trace(1))
    targets = {"1abc_A": letters, "8abc_A": letters, "2abc_A": letters, "7abc_A": "", "4abc_A": "A"}
    training = {"9abc_A": near, "2abc_A": letters, "3abc_A": far, "6abc_A": ""}
    result = bar_of(structures, targets, training)
    assert [(copy.chain, copy.nearest) for copy in result.copies] == [("1abc_A", "3abc_A"), ("4abc_A", "3abc_A")]
    assert result.without == {
        "8abc_A": "8abc_A.cif:7: broken",
        "2abc_A": "no residue of it has a CA",
        "7abc_A": "its sequence is unknown",
    }
    alone = bar_of(structures, {"1abc_A": letters}, {"9abc_A": near})
    assert alone.without == {"1abc_A": "its nearest training chains cannot be read: 9abc_A.cif:7: broken"}
    assert np.isnan(alone.lddt_ca)
    assert bar_of(structures, {"1abc_A": letters}, {"1abc_A": letters}).without == {
        "1abc_A": "there is no training chain that it could be aligned with"
    }


def test_hundreds_of_copies_are_not_all_read() -> None:
    """Catches a protein with hundreds of structures, all of which are read for their resolution."""
    structures, letters = Structures(), random_sequence(30)
    structures.add("0abc_A", letters, trace(30))
    training = {f"{number}xyz_A": letters for number in range(3 * MOST_FILES)}
    result = bar_of(structures, {"0abc_A": letters}, training)
    assert "cannot be read: 0xyz_A.cif:7: broken" in result.without["0abc_A"]
    assert len(structures.read) == 1 + MOST_FILES


def test_a_large_set_is_narrowed_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a chain that is aligned with all of a hundred thousand, the relative that is not among those it is aligned with,
    one long sequence in front that hides all others, and a chain that is too long for any."""
    aligned: list[str] = []
    monkeypatch.setattr(nearest, "score", lambda letters, _: aligned.append(letters) or letters.count("W"))
    monkeypatch.setattr(nearest, "MOST_CELLS", 30 * 30 * 3)
    structures, letters = Structures(), random_sequence(30)
    training = {f"{number}xyz_A": random_sequence(30, number) for number in range(1, 60)}
    training["1abc_A"] = letters[:15] + random_sequence(15, 99)
    training["2abc_A"] = letters * 4
    for key in ("0abc_A", "5abc_A"):
        structures.add(key, letters, trace(30))
    targets = of_chains({"0abc_A": letters, "5abc_A": letters * 99})
    dict(copies(targets, of_chains(training), structures.assembly_of, structures.assembly_of, workers=0))
    assert len(aligned) == 3
    assert training["1abc_A"] in aligned


def test_the_doctor_names_the_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a bar that stands in one report only, that is of training chains which the filters leave out, that forbids a
    training, or that takes hours with thousands of validation chains."""
    one, two = random_sequence(30), random_sequence(30, 1)
    chains = {
        "1abc_A": one,
        "2abc_A": two,
        "3abc_A": f"{one[:15]}{'W' if one[15] != 'W' else 'V'}{one[16:]}",
        "4abc_A": two[1:],
        "5abc_A": two[:20],
        "6abc_A": one,
        "7abc_A": one[2:],
    }
    for key, letters in chains.items():
        write_chain(tmp_path, key, letters)
    content = yaml.safe_load(TINY)
    cache = {key: {"seq": letters, "resolution": 9.5 if key == "6abc_A" else 2.0} for key, letters in chains.items()}
    (tmp_path / "cache.json").write_text(json.dumps(cache))
    content["data"] |= {
        "alignment_dir": f"{tmp_path}/alignments", "structure_dir": f"{tmp_path}/mmcif_files", "test_chains": ["7abc_A"],
        "train_chains": ["6abc_A", "1abc_A", "2abc_A"], "validation_chains": ["3abc_A", "4abc_A", "5abc_A"],
        "chain_data_cache": f"{tmp_path}/cache.json",
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    words = ["data", "doctor", "--config", f"{tmp_path}/config.yaml", "--output", f"{tmp_path}/doctor", "--workers=0"]
    assert main(words) == 0
    out, page = capsys.readouterr().out, (tmp_path / "doctor" / "doctor.html").read_text()
    validation, test = json.loads((tmp_path / "doctor" / "doctor.json").read_text())["copied"]
    nearest_of = {copy["chain"]: copy["nearest"] for copy in validation["copies"]}
    assert nearest_of == {"3abc_A": "1abc_A", "4abc_A": "2abc_A", "5abc_A": "2abc_A"}
    assert validation["identity"] == pytest.approx((29 / 30 + 1 + 1) / 3)
    assert (test["set"], test["chains"], test["trained_on"]) == ("test", 1, [])
    assert test["copies"][0]["nearest"] == "1abc_A"
    line = f"copying the nearest training chain scores lDDT-CA {validation['lddt_ca']:.3f}, at 99% identity (3 chains)"
    for text in (out, page):
        assert f"validation: {line}" in text
    assert "lDDT-CA of copies, test" in page.partition("Training, validation and test")[0]
    monkeypatch.setattr(examination, "MOST_COPIED", 2)
    content["data"]["train_chains"] = ["2abc_A"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "(2 of 3 chains, drawn by --seed)" in out
    (tmp_path / "mmcif_files" / "2abc.cif").write_text("data_2ABC\n")
    assert main(words) == 1
    said = (
        "test: copying the nearest training chain scores nothing (1 chain; 1 have no copy, such as 7abc_A: its nearest"
    )
    assert said in capsys.readouterr().out
    assert json.loads((tmp_path / "doctor" / "doctor.json").read_text())["copied"][1]["lddt_ca"] is None


@pytest.mark.verify
@pytest.mark.skipif(not NEAREST.is_file(), reason="needs ../shared/tcr")
def test_the_bar_of_real_proteins(tmp_path: Path) -> None:
    """Catches another nearest chain, another alignment or score than those of another program, on each of the 89
    held-out T-cell-receptor domains (its README says how they were made)."""
    with NEAREST.open() as file:
        rows = {row["chain"]: row for row in csv.DictReader(file)}
    with tarfile.open(NEAREST.parent / "tcr.tar") as pack:
        for member in pack:
            name = member.name.removeprefix("./")
            if name == "train.txt" or name.startswith("mmcif_files/"):
                pack.extract(member, tmp_path, filter="data")
    train = (tmp_path / "train.txt").read_text().split()
    folder = StructureFolder(tmp_path / "mmcif_files")
    targets, training = (sequences(folder, keys, {}, None, 1) for keys in (rows, train))
    result = bar("held-out chain", of_chains(targets), of_chains(training), folder.assembly_of, folder.assembly_of, 1)
    assert (len(result.copies), result.without, result.trained_on) == (89, {}, [])
    for copy in result.copies:
        row = rows[copy.chain]
        assert copy.nearest == row["nearest_by_score"], copy
        columns = ("lddt_ca_by_score", "identity_by_score", "coverage_by_score")
        expected = [float(row[column]) for column in columns]
        assert [copy.lddt_ca, copy.identity, copy.coverage] == pytest.approx(expected, abs=6e-4), copy
    assert _mean(result.copies, rows, "test") == pytest.approx(0.831, abs=6e-4)
    assert _mean(result.copies, rows, "validation") == pytest.approx(0.748, abs=6e-4)


def _mean(found: list[Copy], rows: dict[str, dict[str, str]], split: str) -> float:
    return float(np.mean([copy.lddt_ca for copy in found if rows[copy.chain]["split"] == split]))


# Copies of the nearest training complex: which one is taken, and whose atoms stand where.


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

"""Scores of predicted complexes: which chain is compared with which, what counts as wrong, and the files of the command."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from evodsp import metrics
from evodsp.cli import main
from evodsp.data.records import Assembly, Chain
from evodsp.errors import UserError
from evodsp.files import whole_folder
from evodsp.geometry.residues import ATOM_ORDER, CA, RESTYPE_ATOM37_MASK, RESTYPE_ORDER
from evodsp.inference import interfaces as clashes
from evodsp.inference.results import RANKING, TIMINGS, write_json, write_results
from evodsp.inference.score.chain_mapping import ComplexComparison, chains_beside, likeness
from evodsp.inference.score.structure_scores import Predicted, score_structure
from evodsp.inference.structure_files import PredictedStructure
from scripts.examples.synthetic.mmcif_writer import write_mmcif

SEQUENCES = {"a": "MKTAYIAKQRWLEDFGHNPC", "b": "GSHMDERVTCNPFWAQ", "c": "PPLLKKWWEEDDSSTTRR"}


def chain(name: str, kind: str, number: int) -> Chain:
    """A chain of one of three sequences: a walk that begins beside that of the number before. It lacks residues 3 and 4."""
    letters = SEQUENCES[kind]
    random_numbers = np.random.default_rng(number)
    trace = random_numbers.normal(size=(len(letters), 1, 3)).cumsum(0) * 2 + [6.0 * number, 0, 0]
    positions = (trace + random_numbers.normal(size=(len(letters), 37, 3))).astype(np.float32)
    mask = RESTYPE_ATOM37_MASK[[RESTYPE_ORDER[letter] for letter in letters]].astype(np.float32)
    mask[2:4] = 0
    return Chain(
        pdb_id="9abc",
        chain_id=name,
        sequence=letters,
        residue_number=np.arange(1, len(letters) + 1, dtype=np.int32),
        insertion_code=("",) * len(letters),
        is_missing=~mask.any(-1),
        positions=positions * mask[..., None],
        mask=mask,
    )


def assembly(kinds: str) -> Assembly:
    """A true complex with a chain A, B, … for each letter."""
    names = tuple("ABCDEFGHIJ"[: len(kinds)])
    return Assembly(
        "9abc", names, tuple(chain(name, kind, n) for n, (name, kind) in enumerate(zip(names, kinds, strict=True)))
    )


def prediction(truth: Assembly, order: str, scale: float = 0.0, names: str = "PQRSTUVWXY") -> Assembly:
    """A prediction of the true chains named by `order`, in this order: moved as a whole, with errors of `scale` Å."""
    random_numbers = np.random.default_rng(7)
    chains = []
    for name, true in zip(names, order, strict=False):
        one = truth.chains[truth.names.index(true)]
        moved = one.positions[..., [1, 2, 0]] + random_numbers.normal(size=one.positions.shape) * scale + 11
        chains.append(dataclasses.replace(one, chain_id=name, positions=moved.astype(np.float32)))
    return Assembly("seed_0", tuple(names[: len(order)]), tuple(chains))


def without_first(one: Chain, count: int) -> Chain:
    """The chain without its first residues, in its sequence, too."""
    fields = ("sequence", "residue_number", "insertion_code", "is_missing", "positions", "mask")
    return dataclasses.replace(one, **{name: getattr(one, name)[count:] for name in fields})


def scored(truth: Assembly, predicted: Assembly):
    """Without the line about clashes: the walks of different chains cross."""
    one = score_structure("9abc", "held-out", truth, Predicted(predicted))
    return one.scores, list(one.interfaces()), [line for line in one.remarks() if "closer than 2 Å" not in line]


def test_chains_that_lie_in_each_other_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches DockQ 0.39 of two chains on top of each other that stands in a table without a word."""
    truth = assembly("ab")
    a, b = truth.chains
    inside, apart = (
        dataclasses.replace(b, positions=b.positions + b.mask[..., None] * np.float32([shift, 0, 0]))
        for shift in (-6.0, 200.0)
    )
    some = 0
    for other in (inside, apart):
        predicted = Assembly("x", ("A", "B"), (a, other))
        found = score_structure("9abc", "held-out", truth, Predicted(predicted))
        scores, (interface,), remarks = found.scores, found.interfaces(), list(found.remarks())
        one, two = (chain.positions[chain.mask > 0.5] for chain in (a, other))
        expected = int((np.linalg.norm(one[:, None] - two, axis=-1) < 2).sum())
        some = max(some, expected)
        assert scores.clashes == interface.clashes == expected
        line = f"{expected} pairs of atoms clash (closer than 2 Å) in chains A and B: real chains do not come"
        assert [text.startswith(line) for text in remarks] == ([True] if other is inside else [])
    assert expected == 0
    monkeypatch.setattr(clashes, "_MOST_AT_ONCE", 100)
    assert sum(clashes.clashes_of([(chain.positions, chain.mask) for chain in (a, inside)]).values()) == some
    assert clashes.clashes_of([(a.positions, a.mask), (a.positions, 0 * a.mask)]) == {}  # a chain without atoms
    assert clashes.clash_line({(0, 2): 1, (1, 2): 4}, "ABC").startswith(
        "5 pairs of atoms clash (closer than 2 Å) in 2 pairs of"
    )


def test_a_bridge_of_two_chains_is_no_clash() -> None:
    """Catches SG atoms of a disulphide bridge that are called a clash, and any other atom that is not."""
    positions, mask = np.zeros((1, 37, 3)), np.zeros((1, 37))
    mask[0, [ATOM_ORDER["SG"], ATOM_ORDER["CB"]]] = 1
    positions[0, ATOM_ORDER["CB"]] = 9.0
    moved = positions + np.array([1.95, 0, 0])
    moved[0, ATOM_ORDER["CB"]] = 50.0
    assert clashes.clashes_of([(positions, mask), (moved, mask)]) == {}
    moved[0, ATOM_ORDER["CB"]] = [0, 1.9, 0]
    assert clashes.clashes_of([(positions, mask), (moved, mask)]) == {(0, 1): 1}


@pytest.mark.parametrize(
    ("kinds", "order", "mapping", "by"),
    [
        ("abc", "ABC", "A:P B:Q C:R", "sequence"),
        ("abc", "CAB", "A:Q B:R C:P", "sequence"),
        ("aab", "BCA", "A:R B:P C:Q", "DockQ"),
        ("aabb", "BACD", "A:Q B:P C:R D:S", "DockQ"),
        ("aabb", "DBCA", "A:S B:Q C:R D:P", "DockQ"),
        ("aaaaaaa", "CEGBADF", "A:T B:S C:P D:U E:Q F:V G:R", "RMSD"),
    ],
)
def test_chains_are_mapped_by_sequence_and_copies_by_what_fits(kinds, order, mapping, by) -> None:
    """Catches chains that are taken in the order or by the names of the file, and copies that are not exchanged."""
    scores, interfaces, remarks = scored(assembly(kinds), prediction(assembly(kinds), order))
    assert (scores.mapping, scores.mapped_by, scores.missing, remarks) == (mapping, by, "", [])
    assert (scores.chains, scores.interfaces) == (len(kinds), len(interfaces))
    assert len(interfaces) > 1
    ones = scores.dockq, scores.fnat, scores.interface_lddt_ca, scores.lddt_ca, *(one.dockq for one in interfaces)
    assert ones == pytest.approx([1.0] * len(ones), abs=1e-5)
    assert (scores.residues, scores.resolved) == (
        sum(len(SEQUENCES[kind]) for kind in kinds),
        sum(len(SEQUENCES[kind]) - 2 for kind in kinds),
    )


def test_the_mapping_has_the_highest_dockq_of_all() -> None:
    """Catches a mapping that is not the best one, and one that is left out."""
    truth = assembly("aaabb")
    comparison = ComplexComparison(truth, prediction(truth, "DBECA", scale=4.0))
    choices = [
        (*first, *second) for first in itertools.permutations((1, 3, 4)) for second in itertools.permutations((0, 2))
    ]
    *_, second, best = sorted(choices, key=comparison.dockq)
    assert comparison.mapping().chains == best
    assert comparison.dockq(best) > comparison.dockq(second) + 0.01


@pytest.mark.parametrize(("order", "mapping"), [("AC", "A:P B:- C:Q"), ("BC", "A:- B:P C:Q"), ("AB", "A:P B:Q C:-")])
def test_a_missing_chain_counts_as_wrong(order, mapping) -> None:
    """Catches a mean over interfaces that are left, lDDT of residues that are left, and a missing chain without a line."""
    truth = assembly("aac")
    scores, interfaces, remarks = scored(truth, prediction(truth, order))
    assert scores.mapping == mapping
    (lost,) = set("ABC") - set(order)
    assert scores.missing == lost
    assert remarks == [f"chain {lost} is missing in the prediction, and counts as wrong"]
    there = {(one.first, one.second): one for one in interfaces}
    expected = {pair: 0.0 if lost in pair else 1.0 for pair in there}
    assert {pair: one.dockq for pair, one in there.items()} == pytest.approx(expected, abs=1e-5)
    assert {pair: one.fnat for pair, one in there.items()} == expected
    kept = sum(one.contacts for pair, one in there.items() if lost not in pair)
    assert scores.fnat == kept / sum(one.contacts for one in interfaces), "of all contacts, not a mean of interfaces"
    assert scores.dockq == pytest.approx(np.mean(list(expected.values())), abs=1e-5)
    assert all((one.interface_rmsd is None) == (lost in pair) for pair, one in there.items())
    atoms = [
        (name, position)
        for name, one in zip(truth.names, truth.chains, strict=True)
        for position, seen in zip(one.positions[:, CA].astype(float), one.mask[:, CA], strict=True)
        if seen
    ]
    pairs = [
        (a != b, lost not in (a, b)) for (a, x), (b, y) in itertools.permutations(atoms, 2) if math.dist(x, y) < 15
    ]
    assert scores.lddt_ca == pytest.approx(np.mean([kept for _, kept in pairs]))
    assert scores.interface_lddt_ca == pytest.approx(np.mean([kept for between, kept in pairs if between]))


def test_residues_that_are_missing() -> None:
    """Catches residues that are compared by their place in the file, missing ones that are left out, and an alignment that
    nobody hears of."""
    truth = assembly("ab")
    first, second = prediction(truth, "AB").chains
    unseen = second.mask.copy()
    unseen[10:] = 0
    shorter = Assembly("seed_0", ("P", "Q"), (without_first(first, 6), dataclasses.replace(second, mask=unseen)))
    scores, (interface,), remarks = scored(truth, shorter)
    line = "chain P of the prediction has another sequence than chain A: 14 of its 20 residues are paired by number, "
    assert remarks == [line + "100% identical"]
    true = [one.positions[:, CA].astype(float) for one in truth.chains]
    seen = [one.mask[:, CA] > 0 for one in truth.chains]
    kept = [np.arange(20) >= 6, np.arange(16) < 10]
    counts = [
        kept[0][i] and kept[1][j]
        for i in np.flatnonzero(seen[0])
        for j in np.flatnonzero(seen[1])
        if math.dist(true[0][i], true[1][j]) < 15
    ]
    assert 0 < sum(counts) < len(counts)
    assert scores.interface_lddt_ca == pytest.approx(np.mean(counts))
    assert 0 < interface.recovered < interface.contacts
    assert interface.interface_rmsd == pytest.approx(0, abs=1e-4)


def test_confidence_belongs_to_the_residue_that_it_is_compared_with() -> None:
    """Catches pLDDT in the order of the prediction, of residues that only one of the two has, and a picture without
    the true chains' names."""
    truth = assembly("abc")
    c, a = prediction(truth, "CA", 0.5).chains
    truth = Assembly("9abc", ("W", "X", "Y"), truth.chains)
    c = without_first(c, 6)
    bare = a.mask.copy()
    bare[5, CA] = 0
    a = dataclasses.replace(a, mask=bare)
    plddt = np.arange(len(c) + len(a), dtype=np.float32)
    found = score_structure("9abc", "test", truth, Predicted(Assembly("x", ("P", "Q"), (c, a)), plddt))
    confidence = found.confidence()
    assert confidence is not None
    seen = [*(n for n in range(20) if n not in (2, 3, 5)), *range(36 + 6, 36 + 18)]  # of 20 + 16 + 18 true residues
    assert confidence[0].tolist() == [12 + n for n in range(20) if n not in (2, 3, 5)] + list(range(12))
    alphas = found.comparison.alphas(found.chosen)
    assert confidence[1] == pytest.approx(100 * metrics.lddt_ca(*alphas, per_residue=True)[seen].numpy())
    assert 0 < confidence[1].min() < confidence[1].max() < 100
    picture = found.picture()
    assert picture is not None
    assert all(f">{name}</text>" in picture for name in "WXY")
    assert f"pLDDT, mean {plddt.sum() / 54:.1f} " in picture, "0 where nothing is predicted"
    assert "9abc (test): lDDT-CA 0." in picture
    assert score_structure("9abc", "test", truth, Predicted(Assembly("x", ("P", "Q"), (c, a)))).picture() is None


def left_out(one: Chain, *places: int) -> Chain:
    """The chain as a PDB file without SEQRES has it, without the residues at these places."""
    kept = np.delete(np.arange(len(one)), places)
    letters = "".join(one.sequence[k] for k in kept)
    arrays = {name: getattr(one, name)[kept] for name in ("residue_number", "is_missing", "positions", "mask")}
    return dataclasses.replace(one, sequence=letters, insertion_code=("",) * len(kept), **arrays)


LETTERS = "".join(np.random.default_rng(5).choice(list(RESTYPE_ORDER), 75).repeat(2))
"""Each residue twice: an alignment cannot tell which of the two is missing."""


def long_chain(name: str, number: int) -> Chain:
    """A chain of 150 residues, all of which are seen."""
    mask = RESTYPE_ATOM37_MASK[[RESTYPE_ORDER[letter] for letter in LETTERS]].astype(np.float32)
    trace = np.random.default_rng(number).normal(size=(len(LETTERS), 1, 3)).cumsum(0) * 2 + [6.0 * number, 0, 0]
    return dataclasses.replace(
        chain(name, "a", number),
        sequence=LETTERS,
        residue_number=np.arange(1, len(LETTERS) + 1, dtype=np.int32),
        insertion_code=("",) * len(LETTERS),
        is_missing=np.zeros(len(LETTERS), bool),
        positions=(trace * mask[..., None]).astype(np.float32),
        mask=mask,
    )


@pytest.mark.parametrize("renumbered", [0, 1, 100])
def test_residues_correspond_by_number_where_both_files_number_them_alike(renumbered: int) -> None:
    """Catches pairs that an alignment shifts beside a missing residue, although the numbers tell which ones belong together;
    numbers that are believed although the files number residues otherwise, by one or by a hundred."""
    whole = [long_chain("A", 0), long_chain("B", 1)]
    gaps = [left_out(one, 2, 41, 74, 111, 146) for one in whole]
    truth = Assembly("9abc", ("A", "B"), tuple(gaps))
    ours = prediction(Assembly("9abc", ("A", "B"), tuple(whole)), "AB")
    moved = tuple(dataclasses.replace(one, residue_number=one.residue_number + renumbered) for one in ours.chains)
    scores, (interface,), remarks = scored(truth, Assembly("seed_0", ours.names, moved))
    by = "alignment" if renumbered else "number"
    assert all(f"residues are paired by {by}" in line for line in remarks)
    assert len(remarks) == 2
    assert (scores.lddt_ca == pytest.approx(1), interface.dockq == pytest.approx(1, abs=1e-5)) == (not renumbered,) * 2
    assert interface.dockq > 0.5


@pytest.mark.parametrize(("letters", "identity"), [("MKTAYIAKQR", 1.0), ("MKTAYIAKQ", 0.0)])
def test_a_piece_of_a_chain_is_another_chain(letters: str, identity: float) -> None:
    """Catches half of a chain that is not compared with it, and a smaller piece that counts as the same chain."""
    assert likeness(letters, "MKTAYIAKQRGSTWVLHEDC").identity == identity


def test_numbers_that_name_two_residues_are_not_believed() -> None:
    """Catches the later of two residues with one number in place of the first."""
    whole = long_chain("A", 0)
    twice = left_out(whole, 3)
    twice.residue_number[-1] = 5
    assert chains_beside(whole, twice).by == "alignment"
    assert chains_beside(whole, left_out(whole, 3)).by == "number"


def test_a_modified_residue_has_the_atoms_of_its_parent() -> None:
    """Catches contacts of an atom that no prediction can have: OD1 of hydroxyproline, which is a proline here."""
    truth = assembly("ac")
    first = truth.chains[1]
    at, slot = first.sequence.index("P"), ATOM_ORDER["OD1"]
    modified = dataclasses.replace(first, mask=first.mask.copy(), positions=first.positions.copy())
    modified.mask[at, slot] = 1
    modified.positions[at, slot] = truth.chains[0].positions[5, CA] + 1
    expected, (plain,), _ = scored(truth, prediction(truth, "AB"))
    found, (interface,), _ = scored(Assembly("9abc", truth.names, (truth.chains[0], modified)), prediction(truth, "AB"))
    assert (interface.contacts, found.dockq) == (plain.contacts, expected.dockq)


@pytest.mark.parametrize(
    ("kinds", "order", "mapping", "by"),
    [
        ("aab", "BAC", "A:Q B:P C:R", "DockQ"),
        ("aaaaaaa", "CEGBADF", "A:T B:S C:P D:U E:Q F:V G:R", "RMSD"),
        ("aaaaaaa", "CEGADF", "A:S B:- C:P D:T E:Q F:U G:R", "RMSD"),
    ],
)
def test_copies_may_differ_in_the_residues_that_were_seen(kinds, order, mapping, by) -> None:
    """Catches copies that are not exchanged, or that are taken for missing, where a file lists the residues seen in each."""
    whole = assembly(kinds)
    truth = Assembly("9abc", whole.names, (whole.chains[0], without_first(whole.chains[1], 5), *whole.chains[2:]))
    scores, interfaces, _ = scored(truth, prediction(whole, order))
    assert (scores.mapping, scores.mapped_by) == (mapping, by)
    expected = [0.0 if "B" in (one.first, one.second) and "-" in mapping else 1.0 for one in interfaces]
    assert [one.dockq for one in interfaces] == pytest.approx(expected, abs=1e-5)


def test_sequences_decide_before_places_do() -> None:
    """Catches two similar chains that are exchanged although each has a sequence of its own."""
    first, second = assembly("aa").chains
    second = dataclasses.replace(second, sequence="W" + second.sequence[1:])
    truth = Assembly("9abc", ("A", "B"), (first, second))
    exchanged = [dataclasses.replace(one, sequence=other.sequence) for one, other in ((first, second), (second, first))]
    scores, _, remarks = scored(truth, Assembly("seed_0", ("P", "Q"), tuple(exchanged)))
    assert (scores.mapping, scores.mapped_by, remarks) == ("A:Q B:P", "sequence", [])
    assert scores.dockq is not None
    assert scores.dockq < 0.9


def test_a_structure_without_ca_atoms_is_refused() -> None:
    """Catches the lDDT of nothing, which is 1."""
    whole = assembly("ab")
    bare = [dataclasses.replace(one, mask=one.mask * (np.arange(37) != CA)) for one in whole.chains]
    with pytest.raises(UserError, match="9abc: no residue has a CA in both structures"):
        scored(Assembly("9abc", whole.names, tuple(bare)), prediction(whole, "AB"))


def test_larger_complexes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory that the number of chains of a file decides."""
    monkeypatch.setattr("evodsp.inference.score.chain_mapping.MOST_CHAINS", 2)
    whole = assembly("aab")
    two = Assembly("9abc", ("A", "B"), whole.chains[:2])
    assert scored(two, prediction(whole, "AB"))[0].dockq == pytest.approx(1, abs=1e-5)
    for truth, order in ((two, "ABC"), (whole, "AB")):
        with pytest.raises(UserError, match="9abc: 3 chains, but complexes of at most 2 are compared"):
            scored(truth, prediction(whole, order))


def test_a_chain_that_moved_loses_its_interfaces_alone() -> None:
    """Catches scores that are not those of the interface named, and scores within chains that a move changes."""
    truth = assembly("abc")
    perfect = prediction(truth, "ABC")
    away = dataclasses.replace(perfect.chains[2], positions=perfect.chains[2].positions + np.float32(40))
    scores, interfaces, _ = scored(truth, Assembly("seed_0", perfect.names, (*perfect.chains[:2], away)))
    found = {one.first + one.second: (one.dockq, one.lddt_ca) for one in interfaces}
    assert found["AB"] == pytest.approx((1.0, 1.0), abs=1e-5)
    assert max(found["BC"]) < 0.1
    assert 0 < scores.interface_lddt_ca < scores.lddt_ca < 1


def test_copies_without_an_interface_are_mapped_by_their_places() -> None:
    """Catches a mapping by DockQ where there is none, and scores of interfaces that do not exist."""
    near = assembly("aa")
    far = dataclasses.replace(near.chains[1], positions=near.chains[1].positions + np.float32(90))
    truth = Assembly("9abc", near.names, (near.chains[0], far))
    scores, interfaces, _ = scored(truth, prediction(truth, "BA"))
    assert (scores.mapping, scores.mapped_by, scores.interfaces, interfaces) == ("A:Q B:P", "RMSD", 0, [])
    assert (scores.dockq, scores.fnat, scores.interface_lddt_ca) == (None, None, None)
    assert scores.lddt_ca == pytest.approx(1)


def test_chains_that_the_structure_does_not_have() -> None:
    """Catches a chain too many that is compared, one of another protein, and a prediction of something else altogether."""
    whole = assembly("aabc")
    truth = Assembly("9abc", ("A", "C"), (whole.chains[0], whole.chains[2]))
    scores, _, remarks = scored(truth, prediction(whole, "BACD"))
    assert scores.mapping == "A:Q C:R"
    assert remarks == [
        "chain P of the prediction is one copy more than the structure has, and is left out",
        "chain S of the prediction has the sequence of no chain of the structure, and is left out",
    ]
    assert scores.dockq == pytest.approx(1, abs=1e-5)
    with pytest.raises(UserError, match="9abc: none of the 1 predicted chains has the sequence of one of its 2 chains"):
        scored(truth, prediction(whole, "D"))


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A prediction of two chains by evodsp predict, another one as a file, and their structures."""
    truth = assembly("ab")
    predicted = prediction(truth, "BA", 0.5, "AB")
    (tmp_path / "structures").mkdir()
    for name in ("9abc", "9xyz"):
        write_mmcif(tmp_path / "structures" / f"{name}.cif", truth.chains)
    plddt = np.linspace(71.5, 91.5, 36, dtype=np.float32)
    aatype = np.array([RESTYPE_ORDER[letter] for one in predicted.chains for letter in one.sequence])
    positions, mask = (
        np.concatenate([getattr(one, part) for one in predicted.chains]) for part in ("positions", "mask")
    )
    both = PredictedStructure("9abc", aatype, positions, mask, plddt, (16, 20))
    with whole_folder(tmp_path / "predictions" / "9abc") as work:
        write_results(work, {0: both}, "cif", {}, "9abc")
        write_json(work / TIMINGS, {})
        ranking = json.loads((work / RANKING).read_text())
        ranking["ranking"][0] |= {"iptm": 0.5, "ptm": 0.9}
        (work / "seed_0_pae.json").touch()
        (work / RANKING).write_text(json.dumps(ranking))
        write_mmcif(work / "seed_0.cif", predicted.chains)
    write_mmcif(tmp_path / "predictions" / "9xyz.cif", predicted.chains)
    return tmp_path


def score_command(root: Path, *words: str, complexes: str = "true") -> int:
    given = ["--predictions", str(root / "predictions"), "--structures", str(root / "structures")]
    return main(["score", "--complexes", complexes, *given, "--output", str(root / "scored"), *words])


def test_the_command_scores_complexes(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches predictions that are not found, tables unlike the files, a column without an explanation, and numbers of a
    confidence that nobody gave."""
    assert score_command(folders, "--train", "9xyz", "--held_out", "9abc") == 0
    said = capsys.readouterr().out
    file, folder = csv.DictReader((folders / "scored" / "scores.csv").open())
    assert (file["complex"], file["split"], folder["complex"], folder["split"]) == ("9xyz", "train", "9abc", "held-out")
    pictures = [path.name for path in (folders / "scored").glob("*.svg")]
    assert sorted(pictures) == ["calibration.svg", "distances_9abc.svg"]
    picture = (folders / "scored" / "distances_9abc.svg").read_text()
    assert f"9abc (held-out): lDDT-CA {float(folder['lddt_ca']):.2f}, DockQ {float(folder['dockq']):.2f}" in picture
    assert picture.count('class="border"') == 3
    assert "held-out: 32 residues, off by" in (folders / "scored" / "calibration.svg").read_text()
    assert file["mapping"] == folder["mapping"] == "A:B B:A"
    assert [file[name] for name in ("plddt", "iptm", "confidence")] == [""] * 3
    assert [folder[name] for name in ("plddt", "iptm", "confidence")] == ["81.5", "0.5", "0.58"]
    assert 0.5 < float(file["dockq"]) < 1
    rows = list(csv.DictReader((folders / "scored" / "interfaces.csv").open()))
    assert [(row["complex"], row["first"], row["predicted_first"]) for row in rows] == [
        ("9xyz", "A", "B"),
        ("9abc", "A", "B"),
    ]
    assert float(rows[0]["dockq"]) == float(file["dockq"])
    table, legend, means = said.split("\n\n")[:3]
    headings = table.splitlines()[0]
    assert all(line.split("  ")[0] in headings for line in legend.splitlines())
    assert f"held-out: mean DockQ {float(folder['dockq']):.3f}, iLDDT-CA " in means
    assert score_command(folders, "--held_out", "9xyz") == 0
    assert "confidence" not in capsys.readouterr().out


def test_complexes_that_are_not_predicted_yet(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a batch that is not finished and costs the scores of what is, and scores of fewer complexes without a word."""
    (folders / "predictions" / "9abc" / RANKING).unlink()
    assert score_command(folders, "--held_out", "9xyz,9abc,9zzz") == 0
    said = capsys.readouterr().out
    assert "held-out: 2 of 3 complexes left out for want of a finished prediction in" in said
    assert "such as 9abc (looked for 9abc/ranking.json and 9abc.cif, " in said
    assert "iLDDT-CA" in said
    (row,) = csv.DictReader((folders / "scored" / "scores.csv").open())
    assert row["complex"] == "9xyz"


def test_the_assembly_is_a_choice(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a prediction that is compared with the asymmetric unit unasked, or always with assembly 1."""
    path = folders / "structures" / "9abc.cif"
    identity = "1 0 0 0 1 0 0 0 1"
    numbers = [f"matrix[{row}][{column}]" for row in (1, 2, 3) for column in (1, 2, 3)]
    generators = "".join(
        f"_pdbx_struct_assembly_gen.{tag}\n" for tag in ("assembly_id", "oper_expression", "asym_id_list")
    )
    operators = "".join(
        f"_pdbx_struct_oper_list.{tag}\n" for tag in ("id", *numbers, *(f"vector[{row}]" for row in (1, 2, 3)))
    )
    text = path.read_text() + f"loop_\n{generators}1 1,2 A\n2 1 B\nloop_\n{operators}"
    path.write_text(f"{text}1 {identity} 0 0 0\n2 {identity} 5 5 0\n")
    found = {}
    for name in ("1", "2", "null", "3"):
        assert score_command(folders, "--held_out", "9abc", "--assembly", name) == (2 if name == "3" else 0)
        (found[name],) = csv.DictReader((folders / "scored" / "scores.csv").open())
    assert [found[name]["mapping"] for name in ("1", "2", "null")] == ["A:B A-2:-", "B:A", "A:B B:A"]
    said = capsys.readouterr()
    assert "9abc: chain A-2 is missing in the prediction, and counts as wrong" in said.out
    assert "no assembly '3': its assemblies are 1, 2." in said.err


def test_mistakes_with_complexes_are_one_line(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, and options that have no effect."""
    ranking = folders / "predictions" / "9abc" / RANKING
    content = json.loads(ranking.read_text())
    content["ranking"][0]["iptm"] = 7
    ranking.write_text(json.dumps(content))
    for words, said in (
        (("--held_out", "9zzz"), "looked for 9zzz/ranking.json and 9zzz.cif, .mmcif or .pdb"),
        (("--held_out", "9abc"), "iptm is 7, not a number from 0 to 1"),
        (("--held_out", ","), "no complexes to compare: the list of names is empty"),
        (("--held_out", "9xyz", "--assembly", "2"), "--assembly is 2, but single chains are compared"),
    ):
        assert score_command(folders, *words, complexes=str("--assembly" not in words).lower()) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_a_prediction_beside_the_copy_of_the_nearest_training_complex(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a difference of the wrong sign, a copy of the complex itself, and training structures that are looked for among
    the true ones."""
    (apart := folders / "training").mkdir()
    true = assembly("ab").chains
    shifted = [one.positions + np.random.default_rng(1).normal(size=one.positions.shape) for one in true]
    source = [dataclasses.replace(one, positions=at.astype(np.float32)) for one, at in zip(true, shifted, strict=True)]
    write_mmcif(apart / "8aaa.cif", source[::-1])
    write_mmcif(apart / "9abc.cif", true)
    (listed := folders / "train.txt").write_text("8aaa\n9abc\n8zzz\n")
    words = ("--baseline", "nearest", "--train_chains", str(listed))
    assert score_command(folders, "--held_out", "9abc", *words, "--structure_dir", str(apart)) == 0
    said = capsys.readouterr()
    (row,) = csv.DictReader((folders / "scored" / "scores.csv").open())
    copied, _, _ = scored(assembly("ab"), Assembly("8aaa", ("A", "B"), tuple(source)))
    assert [row[name] for name in ("nearest", "nearest_identity", "nearest_coverage")] == ["8aaa", "1.0", "0.8889"]
    assert float(row["nearest_interface_lddt_ca"]) == pytest.approx(copied.interface_lddt_ca, abs=1e-3)
    assert float(row["nearest_dockq"]) == pytest.approx(copied.dockq, abs=1e-3)
    assert float(row["nearest_lddt_ca"]) == pytest.approx(copied.lddt_ca, abs=1e-3)
    better = float(row["interface_lddt_ca"]) - float(row["nearest_interface_lddt_ca"])
    assert float(row["better_by"]) == pytest.approx(better, abs=2e-4)
    assert better > 0
    assert f" iLDDT-CA {float(row['interface_lddt_ca']):.3f}, " in said.out
    assert "; the prediction is better (iLDDT-CA) on 1 of 1\n" in said.out
    # The training complexes of a run's config, which are those with alignments.
    for name, one in zip("AB", true, strict=True):
        (own := folders / "alignments" / f"8aaa_{name}").mkdir(parents=True)
        (own / "hits.a3m").write_text(f">8aaa_{name}\n{one.sequence}\n")
    data = {"alignment_dir": str(folders / "alignments"), "structure_dir": str(apart)}
    config = folders / "run.yaml"
    for arrangement, code in (("multimer", 0), ("monomer", 2)):
        config.write_text(yaml.safe_dump({"data": data, "model": {"arrangement": arrangement}}))
        assert score_command(folders, "--held_out", "9abc", "--baseline", "nearest", "--config", str(config)) == code
    assert "trains on chains, but complexes are compared; give --complexes false" in capsys.readouterr().err
    assert next(csv.DictReader((folders / "scored" / "scores.csv").open())) == row
    (apart / "8aaa.cif").unlink()
    assert score_command(folders, "--held_out", "9abc", *words, "--structure_dir", str(apart)) == 0
    said_then = "held-out: no copy for 1 of 1 complex, such as 9abc: there is no training complex with as many chains"
    assert said_then in capsys.readouterr().out

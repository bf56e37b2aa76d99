"""Synthetic complexes: interfaces, rows that co-vary across them, and files, of the bundled set and of small ones made here."""

from __future__ import annotations

import filecmp
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.complexes.merging import merge
from evodsp.data.complexes.pairing import uniprot_species
from evodsp.data.records import Chain
from evodsp.data.sources.opening import ComplexFiles
from evodsp.data.sources.parsed import Parsed
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_ORDER
from evodsp.rng import Draws
from scripts.examples.synthetic import SynthesisConfig, assemblies, complexes, families, synthesize
from scripts.examples.synthetic.assemblies import Pose, dock
from scripts.examples.synthetic.backbone import CA, build_backbone
from scripts.examples.synthetic.blueprint import make_blueprint
from scripts.examples.synthetic.complexes import ComplexFamily
from scripts.examples.synthetic.families import Family
from scripts.examples.synthetic.folding import CONTACT, rmsd, superpose
from scripts.examples.synthetic.interfaces import couple_copies, keeping_frequencies, partners, touching
from scripts.examples.synthetic.sequences import CHARGE, HYDROPHOBICITY, PottsModel
from scripts.examples.synthetic.sidechains import closest_approach, place_side_chains
from tests.builders.bundled import dimers

OF_A_FAMILY = 5
HETERODIMERS = 6  # families


@dataclass(frozen=True)
class Bundled:
    """An entry of the bundled set. `distance`: between the CA atoms of its two chains."""

    parsed: Parsed
    chains: tuple[Chain, Chain]
    distance: np.ndarray


@cache
def bundled() -> list[list[Bundled]]:
    """The entries of each family."""
    files, entries = ComplexFiles(dimers() / "alignments", dimers() / "mmcif_files"), []
    for entry in sorted(_listed("train") + _listed("validation")):
        parsed = files.parsed(entry)
        first, second = parsed.assembly.chains
        between = np.linalg.norm(_ca(first)[:, None] - _ca(second), axis=-1)
        entries.append(Bundled(parsed, (first, second), between))
    return [entries[n : n + OF_A_FAMILY] for n in range(0, len(entries), OF_A_FAMILY)]


def _listed(name: str) -> list[str]:
    return (dimers() / f"{name}.txt").read_text().split()


def _ca(chain: Chain) -> np.ndarray:
    return chain.positions[:, ATOM_ORDER["CA"]].astype(np.float64)


def _interface_lddt(one: np.ndarray, other: np.ndarray) -> float:
    """Of the distances of CA atoms across the interface, those below 15 Å in `other`."""
    error = np.abs(one - other)[other < 15]
    return float(np.mean([(error < bound).mean() for bound in (0.5, 1, 2, 4)]))


def _toy_model(length: int, draws: Draws) -> PottsModel:
    """Positions without couplings, that prefer some letters."""
    nothing = np.zeros((length, length, 20, 20))
    return PottsModel(draws.gumbel(length, 20), nothing, np.zeros((length, length), dtype=bool))


def _toy_family(name: str, length: int) -> Family:
    draws = Draws.root(11).at(name)
    blueprint = make_blueprint("helix_bundle", length, 1, draws)
    torsions = np.deg2rad(np.tile([-63.0, -42.0], (length, 1)))
    model = _toy_model(length, draws)
    ancestor = (draws.at("ancestor").uniform(1, length) * 20).astype(np.int64)
    return Family(blueprint, torsions, build_backbone(torsions), model, ancestor)


@pytest.fixture
def small_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds and poses that are found quickly."""
    monkeypatch.setattr(families, "VARIANTS", 1)
    for name, value in (("STARTS", 8), ("REFINED", 2), ("STEPS", 2)):
        monkeypatch.setattr(assemblies, name, value)


def test_chains_are_packed_without_clashes() -> None:
    """Catches chains that lie apart, that run through each other, and side chains that were placed without the partner."""
    for family in bundled():
        for entry in family:
            assert entry.distance.min() > 3.8
            near = [(entry.distance < 10).any(axis).mean() for axis in (0, 1)]
            assert min(near) > 0.25
            first, second = (chain.positions[chain.mask > 0].astype(np.float64) for chain in entry.chains)
            assert np.linalg.norm(first[:, None] - second, axis=-1).min() > 2.5


def test_families_differ_in_their_interface_and_members_agree() -> None:
    """Catches a pose drawn for each member, and two families of the same chains with one pose."""
    for family in bundled():
        for one, other in combinations(family, 2):
            assert _interface_lddt(one.distance, other.distance) > 0.5
    for one, other in combinations(bundled()[:HETERODIMERS], 2):
        assert _interface_lddt(one[0].distance, other[0].distance) < 0.45
        assert rmsd(_ca(one[0].chains[0]), _ca(other[0].chains[0])) < 1.2, "the folds are the same"


def test_copies_are_related_by_a_two_fold_axis() -> None:
    """Catches a homodimer whose second copy has the coordinates of the first, or another sequence, or lies askew."""
    for family in bundled()[HETERODIMERS:]:
        for entry in family:
            first, second = entry.chains
            assert first.sequence == second.sequence
            moved = superpose(_ca(first), _ca(second))
            assert 0.01 < np.sqrt(np.square(moved - _ca(second)).sum(-1).mean()) < 0.6
            back = superpose(_ca(first), _ca(second), carried=_ca(second))  # the motion A -> B, once more
            assert np.sqrt(np.square(back - _ca(first)).sum(-1).mean()) < 3.0


def _covariation(rows: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    """Mean correlation of the pairs of columns: of the hydrophobicity, less that of the charge."""
    present, letters = rows < 20, np.minimum(rows, 19)
    found = 0.0
    for feature, sign in ((HYDROPHOBICITY, 1), (CHARGE, -1)):
        values = np.where(present, feature[letters], np.nan)
        values = np.nan_to_num((values - np.nanmean(values, 0)) / np.maximum(np.nanstd(values, 0), 0.1))
        found += sign * float((values[:, first] * values[:, second]).mean())
    return found


def test_paired_rows_co_vary_where_chains_touch() -> None:
    """Catches rows whose partners are others', couplings lost in sampling, and columns that are not the interface's."""
    together, apart, shuffled = [], [], []
    for family in bundled()[:HETERODIMERS]:
        for entry in family:
            merged = merge(entry.parsed.chains)
            rows, size = merged.msa[merged.block == 0], len(entry.chains[0])
            assert len(rows) == 48, "not all rows are paired"
            cb = [np.where(c.mask[:, 3:4] > 0, c.positions[:, 3], _ca(c)) for c in entry.chains]
            first, second = touching(*(atoms.astype(np.float64) for atoms in cb)).T
            together.append(_covariation(rows, first, size + second))
            apart.append(_covariation(rows, first, size + np.roll(second, 1)))
            mixed = np.concatenate([rows[:, :size], np.roll(rows[:, size:], 7, 0)], 1)
            shuffled.append(_covariation(mixed, first, size + second))
    assert np.mean(together) > 0.3
    assert max(abs(np.mean(apart)), abs(np.mean(shuffled))) < 0.08


def test_bundled_files_are_those_of_complexes() -> None:
    """Catches entries that no reader of complexes takes, held-out entries that are trained on, and a folder too many."""
    train, validation = _listed("train"), _listed("validation")
    assert (len(train), len(validation)) == (32, 8)
    assert not set(train) & set(validation)
    assert [entry in validation for entry in sorted(train + validation)] == [False, False, False, False, True] * 8
    folders = {path.name for path in (dimers() / "alignments").iterdir()}
    homodimers = [entry.parsed.assembly.pdb_id for family in bundled()[HETERODIMERS:] for entry in family]
    assert folders == {f"{entry}_{chain}" for entry in train + validation for chain in "AB"} - {
        f"{entry}_B" for entry in homodimers
    }
    for family in bundled():
        for entry in family:
            assert entry.parsed.assembly.names == ("A", "B")
            assert all(chain.resolution and chain.release_date for chain in entry.chains)


def test_couplings_leave_frequencies() -> None:
    """Catches couplings of a homodimer's copies after which its columns prefer other letters."""
    draws = Draws.root(3)
    first, second = (np.exp(draws.at(n).gumbel(20)) for n in (0, 1))
    first, second = first / first.sum(), second / second.sum()
    attraction = np.outer(HYDROPHOBICITY, HYDROPHOBICITY) * 5
    joint = np.exp(keeping_frequencies(attraction, first, second)) * np.outer(first, second)
    np.testing.assert_allclose(joint.sum(1), first, atol=1e-6)
    np.testing.assert_allclose(joint.sum(0), second, atol=1e-6)
    assert HYDROPHOBICITY @ (joint - np.outer(first, second)) @ HYDROPHOBICITY > 0.05


def test_copies_are_coupled_where_they_touch() -> None:
    """Catches positions that are coupled to themselves, and a copy's pair that is counted twice."""
    draws = Draws.root(5)
    twice = couple_copies(_toy_model(4, draws), np.array([[1, 2], [2, 1], [3, 3]]), draws)
    assert {tuple(pair) for pair in np.argwhere(twice.contacts)} == {(1, 2), (2, 1)}
    np.testing.assert_array_equal(twice.couplings[1, 2], twice.couplings[2, 1].T)
    once = couple_copies(_toy_model(4, draws), np.array([[1, 2]]), draws)
    np.testing.assert_array_equal(twice.couplings, once.couplings)


def test_no_exchange_of_two_partners_fits_better() -> None:
    """Catches rows with two partners, columns of the wrong chain, charges that repel, and exchanges that end early or go by
    what fitted before the last one."""
    draws = Draws.root(6)
    first, second = ((draws.at(n).uniform(24, 4 + n) * 20).astype(np.int64) for n in (0, 1))
    pairs = np.array([[0, 4], [3, 1]])

    def fit(order: list[int]) -> float:
        total = 0.0
        for scale, sign in ((HYDROPHOBICITY, 1), (CHARGE, -1)):
            for i, j in pairs:
                one, other = scale[first[:, i]], scale[second[order, j]]
                total += sign * float((one - one.mean()) @ (other - other.mean()))
        return total

    found = partners(first, second, pairs).tolist()
    assert sorted(found) == list(range(24))
    assert fit(found) > fit(list(range(24))) + 5
    for i, j in combinations(range(24), 2):
        other = list(found)
        other[i], other[j] = found[j], found[i]
        assert fit(other) < fit(found) + 1e-6
    assert partners(first, second, np.zeros((0, 2), dtype=np.int64)).tolist() == list(range(24))


def test_touching_residues_have_one_partner() -> None:
    """Catches residues with two partners, pairs that do not touch, and a pair that is left out for a farther one."""
    first = np.array([[0.0, 0, 0], [5, 0, 0], [50, 0, 0]])
    second = np.array([[4.0, 0, 0], [0, 6, 0], [80, 0, 0]])
    assert touching(first, second).tolist() == [[1, 0], [0, 1]]
    assert touching(first, second + 100).shape == (0, 2)


def test_poses_touch_and_two_fold_axes_are_two_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches chains that overlap or lie apart after docking, and a half turn about an axis along the line between them."""
    for name, value in (("STARTS", 12), ("REFINED", 4), ("STEPS", 3)):
        monkeypatch.setattr(assemblies, name, value)
    helix = assemblies.centred(build_backbone(np.deg2rad(np.tile([-63.0, -42.0], (12, 1)))))
    for symmetric in (False, True):
        for pose in dock(helix, helix, 2, symmetric, Draws.root(2)):
            placed = pose.place(helix, helix)
            gap = np.linalg.norm(helix[:, None, :, None] - placed[None, :, None], axis=-1) - CONTACT
            assert -1e-9 < gap.min() < 0.3  # 0.2 for CA atoms, which keep 4 Å
            if symmetric:
                back = placed @ pose.rotation.T + pose.distance * pose.direction
                np.testing.assert_allclose(back, helix, atol=1e-9)
    overlapping = Pose(np.eye(3), np.array([1.0, 0, 0]), distance=0.0).place(helix, helix, overlap=0.4)
    between = np.linalg.norm(helix[:, None, :, None] - overlapping[None, :, None], axis=-1)
    assert -0.4 - 1e-9 < (between - CONTACT).min() < 0


def test_ca_atoms_keep_their_distance() -> None:
    """Catches CA atoms of two chains nearer than in any protein, where other atoms may overlap a little."""
    residue = np.full((1, 6, 3), [-100.0, 0, 0])
    residue[:, CA] = 0
    moved = Pose(np.eye(3), np.array([1.0, 0, 0])).place(residue, -residue, overlap=0.4)
    np.testing.assert_allclose(moved[0, CA], [4.0, 0, 0])


def _toy_rows(shuffled: bool = False, touching: tuple[int, int] = (3, 5)) -> list[dict[str, complexes.Homologs]]:
    one, other = _toy_family("one", 30), _toy_family("other", 28)
    pose = Pose(np.eye(3), np.eye(3)[0])
    family = ComplexFamily((one, other), pose, (pose,), 0, np.array([touching]), (one.model, other.model))
    config = SynthesisConfig(Path("new"), 2, sequences=20, complexes=1, shuffled=shuffled)
    query = np.concatenate([one.ancestor, other.ancestor], 1)[0]
    return complexes._alignments(config, family, "c001", query, Draws.root(4))


def test_shuffled_rows_have_the_species_of_others() -> None:
    """Catches a control that changes the rows, or the query's partner, or nothing."""
    (first, second), (same, mixed) = _toy_rows(), _toy_rows(shuffled=True)
    paired = [part[complexes.PAIRED] for part in (first, second, same, mixed)]
    species = [[uniprot_species(name) for name in rows.names] for rows in paired]
    assert species[0] == species[1] == species[2]
    assert len(set(species[0][1:])) == 19, "species are not recognised"
    assert sorted(species[3]) == sorted(species[0])
    assert sum(a == b for a, b in zip(species[3], species[0], strict=True)) < 8
    assert paired[3].names[0] == paired[1].names[0] == "c001_B"
    np.testing.assert_array_equal(paired[3].residues, paired[1].residues)
    np.testing.assert_array_equal(paired[2].residues, paired[0].residues)
    assert len(first[complexes.UNPAIRED].names) == 5


def test_rows_of_one_chain_do_not_tell_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows drawn with their partner in view: a control with shuffled rows would then know the interface as well."""
    here, there = _toy_rows(touching=(3, 5)), _toy_rows(touching=(7, 20))
    np.testing.assert_array_equal(here[0][complexes.PAIRED].residues, there[0][complexes.PAIRED].residues)
    np.testing.assert_array_equal(here[1][complexes.PAIRED].residues[0], here[1][complexes.UNPAIRED].residues[0])
    for chain in (0, 1):
        np.testing.assert_array_equal(
            here[chain][complexes.UNPAIRED].residues, there[chain][complexes.UNPAIRED].residues
        )
    assert not np.array_equal(here[1][complexes.PAIRED].residues, there[1][complexes.PAIRED].residues)
    # The second chain's rows are some of those that were drawn; with one for each row that is written, all of them.
    monkeypatch.setattr(complexes, "_POOL", 1)
    rows = [sorted(_toy_rows(touching=at)[1][complexes.PAIRED].residues.tolist()) for at in ((3, 5), (7, 20))]
    assert rows[0] == rows[1]


def test_only_the_pairing_of_rows_tells_twins_apart(small_search: None) -> None:
    """Catches twins whose sequences, chains or rows differ, so that something else than the pairing tells their interface."""
    config = SynthesisConfig(Path("new"), 2, 1, 0, 28, 28, sequences=8, complexes=2, twins=True, seed=3)
    twins = list(complexes.make_complexes(config))
    for first, second in zip(*twins, strict=True):
        assert first.chain.sequence == second.chain.sequence
        inside = [np.linalg.norm(_ca(m.chain)[:, None] - _ca(m.chain), axis=-1) for m in (first, second)]
        np.testing.assert_allclose(*inside, atol=1e-3)
        unpaired = [member.alignments[complexes.UNPAIRED].residues for member in (first, second)]
        np.testing.assert_array_equal(*unpaired)
    across = [np.linalg.norm(_ca(a.chain)[:, None] - _ca(b.chain), axis=-1) for a, b in twins]
    assert _interface_lddt(*across) < 0.45
    (one, partner), (other, other_partner) = ([m.alignments[complexes.PAIRED].residues for m in twin] for twin in twins)
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(partner, other_partner)


def test_atoms_of_neighbours_that_are_not_bonded_count() -> None:
    """Catches the end of one chain and the start of the next taken for neighbours, whose atoms may be near."""
    types = np.array([0, 0, 0])
    atoms = place_side_chains(types, build_backbone(np.deg2rad(np.tile([-120.0, 130.0], (3, 1)))), Draws.root(1))[1]
    assert closest_approach(types, atoms)[0, 1] > 2.5
    apart = closest_approach(types, atoms, np.array([False, True]))
    assert apart[0, 1] < 1.4
    assert apart[1, 2] > 2.5


def test_short_chains_have_fewer_elements() -> None:
    """Catches elements of no residues in chains shorter than a single chain's shortest."""
    for fold, kinds in (("helix_bundle", "HH"), ("beta_meander", "EEE"), ("alpha_beta", "EEH")):
        for length in (28, 32, 40):
            blueprint = make_blueprint(fold, length, 1, Draws.root(0))
            elements = blueprint.elements()
            assert "".join(blueprint.structure[start] for start, _ in elements) == kinds
            assert min(stop - start for start, stop in elements) >= 4
            assert len(blueprint.structure) == length


def test_the_same_seed_gives_the_same_complexes(tmp_path: Path, small_search: None) -> None:
    """Catches randomness that is not a function of the seed alone, such as the time in the header of a gzip file."""
    for name in ("first", "again"):
        synthesize(SynthesisConfig(tmp_path / name, 1, 1, 0, 28, 28, sequences=4, complexes=1, homodimers=1, seed=1))
    files = sorted(p.relative_to(tmp_path / "first") for p in (tmp_path / "first").rglob("*") if p.is_file())
    assert len(files) == 9
    _, unequal, missing = filecmp.cmpfiles(tmp_path / "first", tmp_path / "again", files, shallow=False)
    assert not unequal + missing


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"complexes": 2, "homodimers": 3}, ("homodimers 3", "complexes 2")),
        ({"complexes": 3, "homodimers": 1, "families": 1}, ("families 1", "2 heterodimers", "--homodimers 3")),
        ({"complexes": 300}, ("--complexes 300", "999")),
        ({"complexes": 1, "min_length": 27}, ("27..64", "28..128")),
        ({"complexes": -1}, ("complexes is -1", "at least 0")),
        ({"complexes": 2, "homodimers": 2, "shuffled": True}, ("--shuffled true", "no heterodimers")),
        ({"complexes": 4, "homodimers": 1, "twins": True}, ("--twins true", "each of the 3", "--complexes 5")),
    ],
)
def test_complexes_that_cannot_be_made_are_refused(settings: dict[str, int], words: tuple[str, ...]) -> None:
    """Catches a set that has fewer complexes than were asked for, or fails deep inside the folding."""
    with pytest.raises(UserError) as error:
        SynthesisConfig(Path("new"), **settings)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)

"""Synthetic chains: geometry, folds and files of the bundled set and of a small set made here."""

from __future__ import annotations

import filecmp
import math
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.data.records import Chain
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.errors import UserError
from evodsp.geometry.frames import atom37_to_atom14
from evodsp.geometry.residues import ATOM_ORDER, RESTYPE_ATOM37_MASK, RESTYPE_ORDER
from evodsp.rng import Draws
from scripts.examples.synthetic import SynthesisConfig, families, synthesize, writers
from scripts.examples.synthetic.blueprint import make_blueprint
from scripts.examples.synthetic.config import FOLDS
from scripts.examples.synthetic.folding import expected_radius_of_gyration, rmsd
from scripts.examples.synthetic.sidechains import closest_approach

BUNDLED = Path(__file__).resolve().parents[4] / "data"
SMALL = SynthesisConfig(
    Path("small"), families=3, members=1, held_out=1, min_length=48, max_length=56, sequences=12, seed=3
)


@dataclass(frozen=True)
class Written:
    """A set as read back from its files: chains of each family."""

    root: Path
    config: SynthesisConfig
    families: list[list[Chain]]
    made: tuple[families.Member, ...] = ()

    @property
    def chains(self) -> list[Chain]:
        return [chain for family in self.families for chain in family]

    def structure(self, family: int) -> str:
        """H, E, L of each residue: the blueprint's, which does not depend on the draws."""
        fold, length = FOLDS[family % 3], len(self.families[family][0])
        return make_blueprint(fold, length, 1, Draws.root(0)).structure


def _read(root: Path, config: SynthesisConfig) -> Written:
    store = ChainFiles(root / "alignments", root / "mmcif_files")
    chains = [store.chain(key) for key in sorted(store.keys())]
    size = config.members + config.held_out
    return Written(root, config, [chains[n : n + size] for n in range(0, len(chains), size)])


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Written:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            families, "VARIANTS", 3
        )  # fewer starts than for a real set: enough here, and several times faster
        made: list[families.Member] = []
        write = writers._write_member
        patch.setattr(writers, "_write_member", lambda at, member: (made.append(member), write(at, member)))
        root = tmp_path_factory.mktemp("synthetic") / "set"
        synthesize(replace(SMALL, output=root))
    return replace(_read(root, SMALL), made=tuple(made))


@pytest.fixture(params=["bundled", "small"])
def written(request: pytest.FixtureRequest, small: Written) -> Written:
    return small if request.param == "small" else _read(BUNDLED, SynthesisConfig(BUNDLED))


def _dihedral(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Torsion angles a-b-c-d in (-pi, pi], IUPAC sign; points [..., 3]."""
    axis = (c - b) / np.linalg.norm(c - b, axis=-1, keepdims=True)
    before, after = a - b, d - c
    before = before - (before * axis).sum(-1, keepdims=True) * axis
    after = after - (after * axis).sum(-1, keepdims=True) * axis
    return np.arctan2((np.cross(axis, before) * after).sum(-1), (before * after).sum(-1))


def _backbone_torsions(n: np.ndarray, ca: np.ndarray, c: np.ndarray) -> np.ndarray:
    """[R, 3] phi, psi, omega (of the bond before the residue) from atoms [R, 3]; NaN where undefined (chain ends)."""
    out = np.full((len(ca), 3), np.nan)
    out[1:, 0] = _dihedral(c[:-1], n[1:], ca[1:], c[1:])
    out[:-1, 1] = _dihedral(n[:-1], ca[:-1], c[:-1], n[1:])
    out[1:, 2] = _dihedral(ca[:-1], c[:-1], n[1:], ca[1:])
    return out


def _atoms(chain: Chain, name: str) -> np.ndarray:
    return chain.positions[:, ATOM_ORDER[name]].astype(np.float64)


def _types(chain: Chain) -> np.ndarray:
    return np.array([RESTYPE_ORDER[letter] for letter in chain.sequence])


def _angle(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    u, v = a - b, c - b
    return np.degrees(np.arccos((u * v).sum(-1) / np.linalg.norm(u, axis=-1) / np.linalg.norm(v, axis=-1)))


def test_backbone_bonds_and_angles_are_ideal(written: Written) -> None:
    """Catches a chain broken or bent by the optimiser: bond lengths within 0.02 Å, angles within 2° of Engh and Huber's."""
    for chain in written.chains:
        n, ca, c, o = (_atoms(chain, name) for name in ("N", "CA", "C", "O"))
        for a, b, length in ((n, ca, 1.459), (ca, c, 1.525), (c, o, 1.231), (c[:-1], n[1:], 1.329)):
            assert np.abs(np.linalg.norm(a - b, axis=-1) - length).max() < 0.02
        for a, b, d, angle in (
            (n, ca, c, 111.0),
            (ca[:-1], c[:-1], n[1:], 116.6),
            (c[:-1], n[1:], ca[1:], 121.7),
            (ca, c, o, 120.5),
        ):
            assert np.abs(_angle(a, b, d) - angle).max() < 2.0


def test_peptide_bonds_are_planar_and_trans(written: Written) -> None:
    """Catches omega other than 180°, and an O out of its plane because psi has the wrong sign."""
    for chain in written.chains:
        n, ca, c, o = (_atoms(chain, name) for name in ("N", "CA", "C", "O"))
        omega = np.degrees(_backbone_torsions(n, ca, c)[1:, 2])
        assert np.abs(np.abs(omega) - 180).max() < 1.0
        normal = np.cross(ca[:-1] - c[:-1], n[1:] - c[:-1])
        height = ((o[:-1] - c[:-1]) * normal).sum(-1) / np.linalg.norm(normal, axis=-1)
        assert np.abs(height).max() < 0.03


def test_residues_are_complete_left_handed_amino_acids(written: Written) -> None:
    """Catches a missing atom, a D amino acid, a side chain that floats, or a proline whose ring is open."""
    for chain in written.chains:
        types = _types(chain)
        np.testing.assert_array_equal(chain.mask, RESTYPE_ATOM37_MASK[types])
        n, ca, c, cb = (_atoms(chain, name) for name in ("N", "CA", "C", "CB"))
        has_cb = types != RESTYPE_ORDER["G"]
        handedness = (np.cross(n - ca, c - ca) * (cb - ca)).sum(-1)
        assert (handedness[has_cb] > 2.0).all()
        distance = np.linalg.norm(chain.positions[:, :, None] - chain.positions[:, None], axis=-1)
        distance[(chain.mask[:, :, None] * chain.mask[:, None]) == 0] = np.inf
        distance[:, range(37), range(37)] = np.inf
        nearest = distance.min(-1)[chain.mask > 0]
        assert nearest.min() > 1.18
        assert nearest.max() < 1.85
        proline = types == RESTYPE_ORDER["P"]
        assert np.abs(np.linalg.norm(n - _atoms(chain, "CD"), axis=-1)[proline] - 1.473).max(initial=0) < 0.02


def test_no_heavy_atoms_clash(written: Written) -> None:
    """Catches side chains that overlap: heavy atoms of residues that are not bonded are over 2.5 Å apart."""
    for chain in written.chains:
        types = _types(chain)
        atom14 = atom37_to_atom14(torch.from_numpy(chain.positions), torch.from_numpy(types)).numpy()
        assert closest_approach(types, atom14).min() > 2.5, chain.key


def test_clash_check_sees_a_clash(small: Written) -> None:
    """Control of the test above: it must fail when one residue is moved onto another."""
    chain = small.chains[0]
    types = _types(chain)
    atom14 = atom37_to_atom14(torch.from_numpy(chain.positions), torch.from_numpy(types)).numpy()
    atom14[20] += atom14[40, 1] - atom14[20, 1] + 1.0
    assert closest_approach(types, atom14)[20, 40] < 2.0


def test_torsions_are_those_of_the_intended_secondary_structure(written: Written) -> None:
    """Catches a helix folded as coil, a strand as helix, and a residue with positive phi that is not glycine."""
    for number, family in enumerate(written.families):
        structure = np.array(list(written.structure(number)))
        for chain in family:
            torsions = _backbone_torsions(*(_atoms(chain, name) for name in ("N", "CA", "C")))
            phi, psi = np.degrees(torsions[1:-1, 0]), np.degrees(torsions[1:-1, 1])
            inner = structure[1:-1]
            helix, strand = inner == "H", inner == "E"
            assert (helix | strand).mean() > 0.5
            alpha = (np.abs(phi + 63) < 25) & (np.abs(psi + 42) < 25)
            extended = (phi < -50) & ((psi > 80) | (psi < -150))
            assert (alpha & helix).sum() >= 0.75 * helix.sum()
            assert (extended & strand).sum() >= 0.75 * strand.sum()
            letters = np.array(list(chain.sequence[1:-1]))
            assert set(letters[(phi > 20) & (phi < 140) & (inner == "L")]) <= {"G"}


def test_helices_and_sheets_are_held_by_hydrogen_bonds(written: Written) -> None:
    """Catches strands that do not pair: at least half of the blueprint's N-O pairs are within 3.5 Å."""
    for number, family in enumerate(written.families):
        blueprint = make_blueprint(FOLDS[number % 3], len(family[0]), 1, Draws.root(0))
        for chain in family:
            between = np.linalg.norm(_atoms(chain, "N")[:, None] - _atoms(chain, "O"), axis=-1)
            apart = np.abs(np.subtract.outer(np.arange(len(chain)), np.arange(len(chain)))) > 2
            assert ((between < 3.5) & apart).sum() > 0.5 * len(blueprint.hydrogen_bonds)


def test_chains_are_as_compact_as_real_proteins(written: Written) -> None:
    """Catches an unfolded or collapsed chain: the radius of gyration is within 25 % of 2.2 N^0.38 Å."""
    for chain in written.chains:
        ca = _atoms(chain, "CA")
        radius = np.sqrt(np.square(ca - ca.mean(0)).sum(-1).mean())
        ratio = radius / expected_radius_of_gyration(len(chain))
        assert 0.75 < ratio < 1.25


def test_folds_differ_and_members_of_a_family_agree(written: Written) -> None:
    """Catches equal folds, and members that are identical or unrelated."""
    for family in written.families:
        for a, b in combinations(family, 2):
            assert 0.15 < rmsd(_atoms(a, "CA"), _atoms(b, "CA")) < 1.6
            identity = np.mean(_types(a) == _types(b))
            assert 0.35 < identity < 0.85
    for first, second in combinations(written.families, 2):
        length = min(len(first[0]), len(second[0]))
        assert rmsd(_atoms(first[0], "CA")[:length], _atoms(second[0], "CA")[:length]) > 6.0


def test_files_are_read_by_our_parsers(written: Written) -> None:
    """Catches a file that the data pipeline refuses, an alignment of another chain, or one without gaps and insertions."""
    store = ChainFiles(written.root / "alignments", written.root / "mmcif_files")
    for chain in written.chains:
        assert chain.release_date is not None
        assert chain.resolution is not None
        alignments = store.alignments(chain.key)
        assert sorted(Path(a.source).name for a in alignments) == ["bfd_uniclust_hits.a3m", "uniref90_hits.sto"]
        for alignment in alignments:
            assert alignment.residues.shape == (written.config.sequences, len(chain))
            np.testing.assert_array_equal(alignment.residues[0], _types(chain))
            assert 0.02 < (alignment.residues == 21).mean() < 0.3
            assert (alignment.deletions > 0).any()
            assert not alignment.deletions[0].any()
        assert not np.array_equal(alignments[0].residues[1:], alignments[1].residues[1:])


def test_chain_lists_hold_out_the_last_members(written: Written) -> None:
    """Catches a validation chain among the training chains."""
    train, validation = ((written.root / f"{name}.txt").read_text().split() for name in ("train", "validation"))
    assert train + validation == sorted(train + validation, key=(train + validation).index)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == [chain.key for chain in written.chains]
    for family in written.families:
        assert [chain.key in validation for chain in family] == [False] * written.config.members + [
            True
        ] * written.config.held_out


def test_written_positions_are_those_that_were_made(small: Written) -> None:
    """Catches coordinates lost or permuted on the way through the file: 1e-3 Å."""
    for made, read in zip(small.made, small.chains, strict=True):
        assert read.key == made.chain.key
        assert read.sequence == made.chain.sequence
        assert np.abs(read.positions - made.chain.positions).max() < 1e-3
        np.testing.assert_array_equal(read.residue_number, made.chain.residue_number)


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches randomness that is not a function of the seed alone."""
    monkeypatch.setattr(families, "VARIANTS", 1)
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        synthesize(SynthesisConfig(tmp_path / name, 1, 1, 0, 48, 48, sequences=4, seed=seed))
    files = sorted(p.relative_to(tmp_path / "first") for p in (tmp_path / "first").rglob("*") if p.is_file())
    assert len(files) == 9
    _, unequal, missing = filecmp.cmpfiles(tmp_path / "first", tmp_path / "again", files, shallow=False)
    assert not unequal + missing
    _, unequal, _ = filecmp.cmpfiles(tmp_path / "first", tmp_path / "other", files, shallow=False)
    assert Path("mmcif_files/s001.cif") in [Path(name) for name in unequal]


def test_bundled_set_is_small(small: Written) -> None:
    """Catches a bundled set that grows: it must stay under 2 MB, and the trained models beside it under 1.4 MB each."""
    models = [sum(p.stat().st_size for p in (BUNDLED / f"{name}_model").iterdir()) for name in ("example", "family")]
    assert max(models) < 1_400_000
    assert sum(p.stat().st_size for p in BUNDLED.rglob("*") if p.is_file()) - sum(models) < 2_000_000


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_length": 47}, ("47..64", "48..128")),
        ({"min_length": 60, "max_length": 50}, ("60..50", "48..128")),
        ({"max_length": 400}, ("48..400", "48..128")),
        ({"families": 0}, ("families is 0", "at least 1")),
        ({"members": 0}, ("members is 0", "at least 1")),
        ({"sequences": 1}, ("sequences is 1", "at least 2")),
        ({"seed": -1}, ("seed is -1", "at least 0")),
        ({"families": 500}, ("999",)),
    ],
)
def test_sizes_that_cannot_be_made_are_refused(settings: dict[str, int], words: tuple[str, ...]) -> None:
    """Catches a config that fails deep inside the folding, or makes nothing."""
    with pytest.raises(UserError) as error:
        SynthesisConfig(Path("new"), **settings)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a user's folder that is emptied, and half a set that looks complete."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    with pytest.raises(UserError, match="not an empty folder"):
        synthesize(replace(SMALL, output=tmp_path / "mine"))
    with pytest.raises(UserError, match="does not exist"):
        synthesize(replace(SMALL, output=tmp_path / "no" / "such"))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writers, "make_family", stop)
    with pytest.raises(KeyboardInterrupt):
        synthesize(SynthesisConfig(tmp_path / "half", 1, 1, 0, 48, 48))
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback, or a half-written folder, if the output cannot be written."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writers, "make_family", full)
    with pytest.raises(UserError, match=r"new: cannot be written \(No space left on device\); make room") as error:
        synthesize(SynthesisConfig(tmp_path / "new"))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_lengths_are_spread_over_the_families() -> None:
    """Catches families that all have the same length despite a range."""
    config = SynthesisConfig(Path("new"), families=5, min_length=48, max_length=64)
    lengths = [config.length(n) for n in range(5)]
    assert lengths == [48, 52, 56, 60, 64]
    assert all(a <= b for a, b in pairwise(lengths))
    assert math.isclose(expected_radius_of_gyration(56), 10.15, abs_tol=0.02)

"""Synthetic families: the same bytes by the same seed for each kind of set, read back as they were made; and twins."""

from __future__ import annotations

import filecmp
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.opening import ComplexFiles
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_ORDER, RESTYPE_ORDER
from scripts.examples.synthetic import SynthesisConfig, assemblies, complexes, families, synthesize, writers
from scripts.examples.synthetic.families import Member

KINDS = {
    "chains": {"families": 1, "min_length": 48, "max_length": 48},
    "complexes": {"families": 2, "min_length": 28, "max_length": 28, "complexes": 2, "homodimers": 1},
}
"""Settings of the recipes of data/ and of dimers.tar.gz, small."""


@pytest.fixture(autouse=True)
def small_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds and poses that are found quickly."""
    monkeypatch.setattr(families, "VARIANTS", 1)
    for name, value in (("STARTS", 8), ("REFINED", 2), ("STEPS", 2)):
        monkeypatch.setattr(assemblies, name, value)


def ca(member: Member) -> np.ndarray:
    """[R, 3]"""
    return member.chain.positions[:, ATOM_ORDER["CA"]].astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_a_function_of_its_seed_and_is_read_as_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Catches randomness that is not a function of the seed alone, such as the time in the header of a gzip file; coordinates,
    sequences or alignments lost or permuted in the files; and a held-out entry that is trained on."""
    made: list[Member] = []
    write = writers._write_member
    monkeypatch.setattr(writers, "_write_member", lambda at, member: (made.append(member), write(at, member)))
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        made.clear()
        synthesize(SynthesisConfig(tmp_path / name, members=1, held_out=1, sequences=8, seed=seed, **KINDS[kind]))
    last, first = tmp_path / "other", tmp_path / "first"
    files = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    _, unequal, missing = filecmp.cmpfiles(first, tmp_path / "again", files, shallow=False)
    assert not unequal + missing
    assert len(filecmp.cmpfiles(first, last, files, shallow=False)[1]) > 5

    train, validation = ((last / f"{name}.txt").read_text().split() for name in ("train", "validation"))
    assert len(train) == len(validation) == max(1, SynthesisConfig(last, **KINDS[kind]).complexes)
    assert not set(train) & set(validation)
    folders = last / "alignments", last / "mmcif_files"
    if kind == "chains":
        store = ChainFiles(*folders)
        chains = [store.chain(key) for key in sorted(train + validation)]
    else:
        source = ComplexFiles(*folders)
        chains = [chain for e in sorted(train + validation) for chain in source.parsed(e).assembly.chains]
    for member, read in zip(made, chains, strict=True):
        assert (read.key, read.sequence) == (member.chain.key, member.chain.sequence)
        assert read.release_date == member.chain.release_date
        np.testing.assert_array_equal(read.mask, member.chain.mask)
        assert np.abs(read.positions - member.chain.positions).max() < 1e-3
    if kind == "chains":
        for member in made:
            read = {Path(one.source).name: one for one in store.alignments(member.chain.key)}
            assert read.keys() == member.alignments.keys()
            for name, drawn in member.alignments.items():
                found = read[name]
                np.testing.assert_array_equal(found.residues, np.where(drawn.present, drawn.residues, 21))
                np.testing.assert_array_equal(found.deletions[:, 1:], drawn.inserted[:, :-1])
                assert [RESTYPE_ORDER[letter] for letter in member.chain.sequence] == found.residues[0].tolist()


def test_only_the_pairing_of_rows_tells_twins_apart() -> None:
    """Catches twins whose sequences, chains or rows differ, so that something else than the pairing tells their interface."""
    config = SynthesisConfig(Path("new"), 2, 1, 0, 28, 28, sequences=8, complexes=2, twins=True, seed=3)
    twins = list(complexes.make_complexes(config))
    for first, second in zip(*twins, strict=True):
        assert first.chain.sequence == second.chain.sequence
        inside = [np.linalg.norm(ca(m)[:, None] - ca(m), axis=-1) for m in (first, second)]
        np.testing.assert_allclose(*inside, atol=1e-3)
        unpaired = [member.alignments[complexes.UNPAIRED].residues for member in (first, second)]
        np.testing.assert_array_equal(*unpaired)
    one, other = [np.linalg.norm(ca(a)[:, None] - ca(b), axis=-1) for a, b in twins]
    error = np.abs(one - other)[other < 15]
    assert np.mean([(error < bound).mean() for bound in (0.5, 1, 2, 4)]) < 0.45, "the interfaces differ"
    (rows, partners), (same, others) = ([m.alignments[complexes.PAIRED].residues for m in twin] for twin in twins)
    np.testing.assert_array_equal(rows, same)
    assert not np.array_equal(partners, others)


def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a user's folder that is emptied, and half a set that looks complete."""
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(UserError, match="not an empty folder"):
        synthesize(SynthesisConfig(tmp_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writers, "make_family", full)
    with pytest.raises(UserError, match=r"new: cannot be written \(No space left on device\); make room"):
        synthesize(SynthesisConfig(tmp_path / "new"))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]

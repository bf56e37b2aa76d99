"""Residues that a structure file without SEQRES does not have: `data/sources/parsed.py`."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.complexes.merging import merge
from evodsp.data.formats.mmcif import read_chain
from evodsp.data.sources.msa import QueryMismatch
from evodsp.data.sources.opening import ComplexFiles
from evodsp.data.sources.parsed import with_missing_residues
from evodsp.errors import UserError
from evodsp.geometry.residues import CA, encode
from tests.builders.backbone import chain, pdb_text
from tests.builders.missing_residues import NAMES, SEEN, WHOLE, write


def test_missing_residues_are_those_of_the_alignment(tmp_path: Path) -> None:
    """Catches a chain of the lab's refinement that is refused, and atoms that are put on the wrong residues."""
    parsed = write(tmp_path).parsed("x", with_hits=False)
    assert parsed.assembly.chains[0].sequence == WHOLE
    assert np.flatnonzero(~parsed.assembly.chains[0].is_missing).tolist() == list(SEEN)
    assert (
        parsed.assembly.chains[0].mask[:, CA].astype(bool).tolist() == (~parsed.assembly.chains[0].is_missing).tolist()
    )
    alone = read_chain(tmp_path / "x.pdb", "A")
    assert alone.breaks == (3,)
    np.testing.assert_array_equal(parsed.assembly.chains[0].positions[list(SEEN)], alone.positions)
    assert parsed.assembly.chains[0].residue_number[list(SEEN)].tolist() == alone.residue_number.tolist()
    assert parsed.chains[0].msa.msa.shape[1] == len(WHOLE)


def test_missing_residues_of_a_complex(tmp_path: Path) -> None:
    """Catches a complex of the lab's refinement whose chains lack the residues that their alignments have, and copies of
    a chain that lack different ones."""
    copies = {"A": SEEN, "B": (1, 2, 3, 4, 7, 8)}
    residues = [
        chain(NAMES, chain=name, row=row)[place] for row, (name, seen) in enumerate(copies.items()) for place in seen
    ]
    (tmp_path / "y.pdb").write_text(pdb_text(residues))
    for name in copies:
        (own := tmp_path / "a" / f"y_{name}").mkdir(parents=True)
        (own / "hits.a3m").write_text(f">101\n{WHOLE}\n>hit\n{WHOLE[:-1]}-\n")
    parsed = ComplexFiles(tmp_path / "a", tmp_path).parsed("y")
    assert [chain.sequence for chain in parsed.assembly.chains] == [WHOLE, WHOLE]
    for own, seen in zip(parsed.assembly.chains, copies.values(), strict=True):
        assert np.flatnonzero(~own.is_missing).tolist() == list(seen)
    assert merge(parsed.chains).msa.shape == (2, 2 * len(WHOLE))


def test_a_listed_sequence_stays(tmp_path: Path) -> None:
    """Catches residues that are added to a chain whose file lists its sequence."""
    piece = (1, 2, 3, 4)
    store = write(tmp_path, piece, header=f"SEQRES   1 A    4  {' '.join(NAMES[place] for place in piece)}\n")
    with pytest.raises(
        QueryMismatch, match=r"has 12 residues, the query 'x' has 4; search again with this query, or rem"
    ):
        store.parsed("x", with_hits=False)


@pytest.mark.parametrize(
    ("seen", "row"),
    [
        (SEEN, "GSMKWADEFHIR"[::-1]),
        (SEEN, WHOLE.replace("M", "A")),
        ((0, 1, 5), "GSGSA"),
        ((0, 1), "GSGS"),
        ((7, 8, 9, 1, 2, 3), WHOLE),
    ],
    ids=["other", "mutated", "two_places", "two_places_of_one_piece", "other_order"],
)
def test_pieces_that_do_not_fit_in_one_way(tmp_path: Path, seen: tuple[int, ...], row: str) -> None:
    """Catches pieces that are put where they do not belong, and the first of two places taken for the only one."""
    with pytest.raises(
        QueryMismatch, match=r"x\.a3m: the first row '101'.*its chain is not this row with some residues"
    ):
        write(tmp_path, seen, row).parsed("x", with_hits=False)


def test_unknown_residues_and_gaps(tmp_path: Path) -> None:
    """Catches X that matches nothing, and a gap that is taken for a residue."""
    write(tmp_path)
    one = read_chain(tmp_path / "x.pdb", "A")
    unknown = with_missing_residues(replace(one, sequence="X" + one.sequence[1:]), encode(WHOLE.replace("F", "X")))
    assert unknown is not None
    assert unknown.sequence == "GXMKWADEFHIK"
    assert with_missing_residues(one, encode("-" + WHOLE)) is None


def test_the_mismatch_of_a_worker_arrives() -> None:
    """Catches an error with an argument of its own, which a process that makes samples cannot send."""
    sent = pickle.loads(pickle.dumps(QueryMismatch("x", encode("AC"))))
    assert isinstance(sent, UserError)
    assert str(sent) == "x"
    assert sent.found.tolist() == encode("AC").tolist()

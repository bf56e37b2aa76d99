"""Alignments whose query lists every monomer of a residue that has several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.msa import matched_alignments, matched_hits
from evodsp.errors import UserError
from evodsp.geometry.residues import decode, encode
from tests.builders.alignments import make_alignment
from tests.builders.mmcif import atom, entry
from tests.builders.templates import make_hit

# Residue 2 is S or T, residue 4 is E, D or N: the chain has T and D. SEQRES lists A S T G E D N W.
QUERY = ProteinSequence("1abc_A", "ATGDW", alternatives=((1, "ST"), (3, "EDN")))
ROWS = ("ASTGEDNW", "AS-GE-NW", "-STG-DN-")


def alignment(rows: tuple[str, ...]) -> Alignment:
    residues = np.stack([encode(row) for row in rows])
    deletions = np.arange(residues.size, dtype=np.int32).reshape(residues.shape)
    return Alignment("hits.a3m", tuple(f"s{i}" for i in range(len(rows))), residues, deletions)


def test_surplus_columns_are_dropped() -> None:
    """Catches the wrong monomer's column kept, columns shifted behind it, and deletions that vanish with a column."""
    (matched,) = matched_alignments([alignment(ROWS)], QUERY)
    assert [decode(row) for row in matched.residues] == ["ATGDW", "A-G-W", "-TGD-"]
    assert matched.deletions[0].tolist() == [0, 1 + 2, 3, 4 + 5, 6 + 7]
    assert matched.deletions[1].tolist() == [8, 9 + 10, 11, 12 + 13, 14 + 15]
    assert (matched.deletions.dtype, matched.residues.dtype) == (np.int32, np.int8)


def test_an_alignment_of_the_chain_itself_is_kept() -> None:
    """Catches columns dropped from an alignment that was made with the chain's own sequence."""
    own = make_alignment("ATGDW", 4)
    assert matched_alignments([own], QUERY) == [own]


def test_hits_of_such_a_query_are_renumbered() -> None:
    """Catches templates shifted behind a residue with several monomers, hits of the chain itself changed, and the
    IndexError of a hit that ends one residue behind the query."""
    searched = make_hit("STG-EDNW", "MKLVMKLV", first_query=1)  # of A S T G E D N W
    (hit,) = matched_hits([searched], QUERY)
    assert (hit.query, hit.indices_query.tolist()) == ("-TG--D-W", [-1, 1, 2, -1, -1, 3, -1, 4])
    assert hit.aligned_columns == searched.aligned_columns - 3
    assert hit.pairs.tolist() == [[1, 1], [2, 2], [3, 5], [4, 7]]
    own, other = make_hit("TGDW", "MKLV", first_query=1), make_hit("WWWW", "MKLV", first_query=5)
    assert matched_hits([own, other], QUERY) == (own, other)
    assert matched_hits([own], replace(QUERY, alternatives=())) == (own,)


def test_hmmsearch_of_such_a_query(tmp_path: Path) -> None:
    """Catches a search refused that was made with all monomers, hits of it shifted, and one with the chain's own refused."""
    (tmp_path / "1abc_A").mkdir()
    file = tmp_path / "1abc_A" / "hmm_output.sto"
    text = "# STOCKHOLM 1.0\n3xyz_A/5-13 {}\n//\n"
    file.write_text(text.format("M-TGkkEDNW"))  # of A S T G E D N W
    (hit,) = matched_hits(ChainFiles(tmp_path).template_hits("1abc_A", QUERY), QUERY)
    assert (hit.query, hit.residues) == ("A-TG-D-W", "MTGKKEDNW")
    assert (hit.aligned_columns, hit.pairs.tolist()) == (5, [[0, 0], [1, 1], [2, 2], [3, 6], [4, 8]])
    file.write_text(text.format("mttTGkkEDNW").replace("5-13", "5-15"))
    with pytest.raises(UserError, match="has 6 match columns, the query 5 residues"):
        ChainFiles(tmp_path).template_hits("1abc_A", QUERY)
    file.write_text(text.format("MTGkkEDnw"))
    (own,) = matched_hits(ChainFiles(tmp_path).template_hits("1abc_A", QUERY), QUERY)
    assert (own.query, own.pairs.tolist()) == ("ATGDW", [[0, 0], [1, 1], [2, 2], [3, 5], [4, 6]])


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(QUERY, id="other letters"),
        pytest.param(replace(QUERY, alternatives=()), id="one monomer each"),
        pytest.param(replace(QUERY, alternatives=((1, ""), (99, "AC"))), id="nonsense"),
    ],
)
def test_another_query_is_one_line(query: ProteinSequence) -> None:
    """Catches columns dropped until anything fits."""
    rows = ("ASTGEDNA",) if query is QUERY else ROWS
    with pytest.raises(UserError, match=r"hits\.a3m: the first row 's0' has 8 residues, .* has 5"):
        matched_alignments([alignment(rows)], query)


def test_from_files(tmp_path: Path) -> None:
    """Catches monomers of SEQRES that do not reach the alignment; the chain has those of highest occupancy."""
    monomers = "1:ALA 2:SER 2:THR 3:GLY 4:GLU 4:ASP 4:ASN 5:TRP"
    chosen = [("ALA", 1, 1), ("SER", 2, 0.4), ("THR", 2, 0.6), ("GLY", 3, 1), ("GLU", 4, 0.2), ("ASP", 4, 0.5)]
    atoms = [
        atom("CA", name, number, 3.8 * number, occupancy=share) for name, number, share in [*chosen, ("TRP", 5, 1)]
    ]
    (structures := tmp_path / "mmcif_files").mkdir()
    (structures / "1abc.cif").write_text(entry({"A": monomers}, atoms))
    (folder := tmp_path / "alignments" / "1abc_A").mkdir(parents=True)
    (folder / "hits.a3m").write_text("".join(f">s\n{row}\n" for row in ROWS))
    assert read_chain(structures / "1abc.cif", "A").query("1abc_A") == QUERY
    parsed = ChainFiles(tmp_path / "alignments", structures).parsed("1abc_A", with_hits=False)
    assert [decode(row) for row in parsed.chains[0].msa.msa] == ["ATGDW", "A-G-W", "-TGD-"]

"""Merging of alignments against AF2's raw features, and edge cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.msa import (
    MsaFeatures,
    check_alignments,
    check_query,
    first_occurrences,
    letter_profile,
    matched_alignments,
    matched_hits,
    merge_alignments,
    query_only,
)
from evodsp.errors import UserError
from evodsp.geometry.residues import decode, encode
from tests.builders.alignments import make_alignment
from tests.builders.mmcif import atom, entry
from tests.builders.templates import make_hit
from tests.shared import load

# The golden alignments are strings; this is AF2's table for them, independent of evodsp's.
CODES = np.full(256, 20, np.int8)
for code, letters in enumerate(["A", "R", "N", "DB", "CU", "Q", "EZ", *"GHILKMFPSTWYV"]):
    CODES[[ord(letter) for letter in letters]] = code
CODES[ord("-")] = 21


def golden_alignment(path: Path) -> Alignment:
    arrays = load(path)
    letters = arrays["sequences"].view(np.uint8).reshape(len(arrays["sequences"]), -1)
    names = tuple(str(i) for i in range(len(letters)))
    return Alignment(path.name, names, CODES[letters], arrays["deletion_matrix"].astype(np.int32))


def alignment(rows: list[list[int]], deletions: list[list[int]] | None = None, source: str = "a.a3m") -> Alignment:
    residues = np.array(rows, np.int8)
    counts = np.zeros(residues.shape, np.int32) if deletions is None else np.array(deletions, np.int32)
    return Alignment(source, tuple(f"row{i}" for i in range(len(rows))), residues, counts)


def test_two_real_alignments_merge_as_in_af2(golden: Path) -> None:
    """Catches a wrong order of files, the wrong duplicate kept, or deletions of another row: 3,126 rows become 3,057."""
    parts = [golden_alignment(golden / f"featurization/msa_ex_{name}.npz") for name in ("bfd_a3m", "mgnify_sto")]
    raw = load(golden / "features_raw_full.npz")
    to_ours = load(golden / "residue_constants.npz")["map_hhblits_aatype_to_our_aatype"]

    merged = merge_alignments(parts)

    np.testing.assert_array_equal(merged.msa, to_ours[raw["msa"]])
    np.testing.assert_array_equal(merged.deletions, raw["deletion_matrix_int"])
    assert merged.num_alignments == raw["num_alignments"][0]
    assert merged.msa.dtype == np.int8
    assert merged.deletions.dtype == np.int32


def test_profile_is_af2s(golden: Path) -> None:
    transforms = load(golden / "featurization/msa_transforms.npz")
    profile = letter_profile(transforms["msa_corrected"].astype(np.int8))
    np.testing.assert_allclose(profile, transforms["hhblits_profile"], atol=1e-6)


def test_first_of_equal_rows_stays_with_its_deletions() -> None:
    """Catches a sort inside the deduplication that reorders rows or keeps the deletions of a later duplicate."""
    first = alignment([[9, 1, 2], [5, 5, 5], [0, 0, 0]], [[0, 0, 0], [7, 0, 0], [0, 0, 1]])
    second = alignment([[9, 1, 2], [1, 1, 1], [5, 5, 5]], [[8, 8, 8], [0, 2, 0], [3, 3, 3]])
    merged = merge_alignments([first, second])
    np.testing.assert_array_equal(merged.msa, [[9, 1, 2], [5, 5, 5], [0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(merged.deletions, [[0, 0, 0], [7, 0, 0], [0, 0, 1], [0, 2, 0]])


def test_the_profile_counts_a_sequence_once() -> None:
    """Catches a profile of all files' rows: a sequence that two databases hold would count twice."""
    first = alignment([[9, 1], [5, 21], [5, 21]])
    second = alignment([[9, 1], [5, 21], [3, 1]])
    profile = merge_alignments([first, second]).profile
    expected = np.zeros((2, 22), np.float32)
    expected[0, [9, 5, 3]] = 1 / 3
    expected[1, [1, 21]] = 2 / 3, 1 / 3
    np.testing.assert_array_equal(profile, expected)


def test_deduplication_agrees_with_a_dictionary() -> None:
    rows = np.random.default_rng(0).integers(0, 3, (500, 5)).astype(np.int8)
    seen: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        seen.setdefault(row.tobytes(), index)
    np.testing.assert_array_equal(first_occurrences(rows), list(seen.values()))
    # A view whose rows are not contiguous in memory must be compared by its values.
    np.testing.assert_array_equal(first_occurrences(np.asfortranarray(rows)), list(seen.values()))


def test_query_alone() -> None:
    merged = query_only(np.array([4, 20], np.int8))
    assert merged.msa.shape == (1, 2)
    assert not merged.deletions.any()
    assert merged.profile[0, 4] == 1
    assert merged.profile[1, 20] == 1


def test_alignments_of_different_lengths_are_named() -> None:
    with pytest.raises(UserError, match=r"long\.sto: 3 columns, but short\.a3m has 2"):
        merge_alignments([alignment([[1, 2]], source="short.a3m"), alignment([[1, 2, 3]], source="long.sto")])


def test_no_alignment_is_an_error_not_an_empty_msa() -> None:
    with pytest.raises(UserError, match="no alignment"):
        merge_alignments([])


def test_record_refuses_an_msa_without_rows() -> None:
    with pytest.raises(ValueError, match="msa"):
        MsaFeatures(np.zeros((0, 3), np.int8), np.zeros((0, 3), np.int32), np.zeros((3, 22), np.float32))


# The comparison of a query with the rows and hits that were searched with it.


def test_a_different_letter_is_named() -> None:
    """Catches a position counted from 0 or in the compared part, the two letters exchanged, only the last difference reported,
    and a gap in the row that is none."""
    with pytest.raises(UserError, match=r"^here has 'D' at position 2, q has 'R' \(2 positions differ\); fix it$"):
        check_query("here", encode("ADNC"), "q", encode("ARND"), "fix it")
    with pytest.raises(UserError, match="has 'W' at position 31, q has 'Y'"):
        check_query("hit", encode("MW"), "q", encode("MY"), "fix it", np.array([3, 30]))
    with pytest.raises(UserError, match="has '-' at position 2, q has 'R'"):
        check_query("here", encode("A-"), "q", encode("AR"), "fix it")


def test_unknown_and_ambiguous_letters_match() -> None:
    """X matches any letter on either side; alignments write U as C, B as D and Z as E."""
    check_query("here", np.array([5, 20, 4, 3, 6], np.int8), "q", encode("XAUBZ"), "fix it")


def test_every_alignment_is_checked() -> None:
    """Catches a check of the first alignment only."""
    query = ProteinSequence("q", "ARND")
    good, bad = make_alignment("ARND"), make_alignment("ARNC", source="bad.a3m")
    check_alignments([good, good], query)
    with pytest.raises(
        UserError, match=r"^bad\.a3m: the first row 'row0' has 'C' at position 4, the query 'q' has 'D'"
    ):
        check_alignments([good, bad], query)
    with pytest.raises(UserError, match=r"bad\.a3m: .* the first row of hits\.a3m has 'D'"):
        check_alignments([good, bad])


# Alignments whose query lists every monomer of a residue that has several.


# Residue 2 is S or T, residue 4 is E, D or N: the chain has T and D. SEQRES lists A S T G E D N W.
QUERY = ProteinSequence("1abc_A", "ATGDW", alternatives=((1, "ST"), (3, "EDN")))
LISTED = ("ASTGEDNW", "AS-GE-NW", "-STG-DN-")


def listing(rows: tuple[str, ...]) -> Alignment:
    residues = np.stack([encode(row) for row in rows])
    deletions = np.arange(residues.size, dtype=np.int32).reshape(residues.shape)
    return Alignment("hits.a3m", tuple(f"s{i}" for i in range(len(rows))), residues, deletions)


def test_surplus_columns_are_dropped() -> None:
    """Catches the wrong monomer's column kept, columns shifted behind it, and deletions that vanish with a column."""
    (matched,) = matched_alignments([listing(LISTED)], QUERY)
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
    rows = ("ASTGEDNA",) if query is QUERY else LISTED
    with pytest.raises(UserError, match=r"hits\.a3m: the first row 's0' has 8 residues, .* has 5"):
        matched_alignments([listing(rows)], query)


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
    (folder / "hits.a3m").write_text("".join(f">s\n{row}\n" for row in LISTED))
    assert read_chain(structures / "1abc.cif", "A").query("1abc_A") == QUERY
    parsed = ChainFiles(tmp_path / "alignments", structures).parsed("1abc_A", with_hits=False)
    assert [decode(row) for row in parsed.chains[0].msa.msa] == ["ATGDW", "A-G-W", "-TGD-"]

"""FASTA, A3M and Stockholm: formats by small examples, then golden parity on real alignments."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats import parse_a3m, parse_fasta, parse_stockholm, query_of_complex, read_fasta
from evodsp.data.formats.alignments import query_of_a3m
from evodsp.data.records import ProteinSequence
from evodsp.errors import FileFormatError
from evodsp.geometry.residues import decode, encode
from evodsp.reading import text_files
from tests.shared import load


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_fasta_joins_lines_and_reads_headers(tmp_path: Path):
    """Catches sequences cut at the first line end and descriptions taken for names."""
    records = parse_fasta(write(tmp_path / "a.fasta", ">one first protein\nMKV\nlx\n\n>two\nA\n"))
    assert [(r.name, r.letters, r.description) for r in records] == [
        ("one", "MKVLX", "first protein"),
        ("two", "A", ""),
    ]


def test_a3m_counts_insertions_left_of_the_column(tmp_path: Path):
    """Catches deletions counted right of the column, carried into the next row, or kept after the last column."""
    path = write(tmp_path / "a.a3m", "# comment\n>query\nACDE\n>hit words\nabAC-cdeEfg\n>other\n-.-xD\nE\n")
    alignment = parse_a3m(path)
    assert (*alignment.names,) == ("query", "hit", "other")
    assert [decode(row) for row in alignment.residues] == ["ACDE", "AC-E", "--DE"]
    assert alignment.deletions.tolist() == [[0, 0, 0, 0], [2, 0, 0, 3], [0, 0, 1, 0]]
    assert alignment.residues.dtype == np.int8
    assert alignment.deletions.dtype == np.uint8


STOCKHOLM = """# STOCKHOLM 1.0
#=GF ID test
#=GS hit/1-4 DE a hit

query    A-CD
hit/1-4  AkC-
third    ----
#=GR hit/1-4 PP 9*99
#=GC RF  x.xx

query    E--
hit/1-4  Efg
third    .hE
//
"""


def test_stockholm_interleaved_blocks_and_dropped_columns(tmp_path: Path):
    """Catches blocks that overwrite each other, annotation read as sequence, query-gap columns kept, deletions misplaced."""
    alignment = parse_stockholm(write(tmp_path / "a.sto", STOCKHOLM))
    assert (*alignment.names,) == ("query", "hit/1-4", "third")
    assert [decode(row) for row in alignment.residues] == ["ACDE", "AC-E", "----"]
    assert alignment.deletions.tolist() == [
        [0, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 0, 0],
    ]  # after the last column: not counted


def test_stockholm_deletion_runs(tmp_path: Path):
    """Catches runs of dropped columns counted as one deletion, or summed over neighbouring runs."""
    text = "# STOCKHOLM 1.0\nq --A-CD---E-\nh KKAKCD-KKEK\n//\n"
    assert parse_stockholm(write(tmp_path / "a.sto", text)).deletions.tolist() == [[0, 0, 0, 0], [2, 1, 0, 2]]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
def test_line_ends_missing_final_newline_and_gzip(tmp_path: Path, newline: str, final: bool, zipped: bool):
    """Catches carriage returns read as residues, a last row lost, and compressed files read as text."""
    texts = {"a3m": ">q\nAC\n>h\nA-\n", "sto": "# STOCKHOLM 1.0\nq AC\nh A-\n//\n", "fasta": ">q\nAC\n>h\nA\n"}
    for kind, parse in (("a3m", parse_a3m), ("sto", parse_stockholm), ("fasta", parse_fasta)):
        data = (texts[kind] if final else texts[kind].rstrip("\n")).replace("\n", newline).encode()
        path = write(tmp_path / f"x.{kind}.gz", gzip.compress(data)) if zipped else write(tmp_path / f"x.{kind}", data)
        parsed = parse(path)
        rows = [r.letters for r in parsed] if kind == "fasta" else [decode(r).rstrip("-") for r in parsed.residues]
        assert rows == ["AC", "A"]


def test_a3m_agrees_with_a_character_loop(tmp_path: Path):
    """Catches errors of the running-count arithmetic: random rows against the definition, letter by letter."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(40):
        columns = rng.choice(list("ACDEFGHIKLMNPQRSTVWYXBZUOJ-"), 23)
        inserts = ["".join(rng.choice(list("acdxyz."), rng.poisson(0.4))) for _ in range(24)]
        rows.append("".join(a + b for a, b in zip(inserts, [*columns, ""], strict=True)))
    alignment = parse_a3m(write(tmp_path / "a.a3m", "".join(f">s{k}\n{row}\n" for k, row in enumerate(rows))))
    for row, residues, deletions in zip(rows, alignment.residues, alignment.deletions, strict=True):
        expected, counts, count = [], [], 0
        for letter in row:
            if letter.islower():
                count += 1
            elif letter != ".":
                expected.append(encode(letter)[0])
                counts.append(count)
                count = 0
        assert residues.tolist() == expected
        assert deletions.tolist() == counts


@pytest.mark.parametrize("block", [40, 61, 500])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_an_a3m_in_blocks_is_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, newline: str):
    """Catches a row, a name, a line or insertions lost or counted twice where a block of the file ends."""
    rows = [
        "ACDEFGHIKL" * 9,
        "",
        ("A" + "c" * 7) * 90,
        "w" * 700 + "A" * 90 + "vv",
        "-" * 89 + "q" * 255 + "W",
    ]
    rows[1] = "AC-" * 30
    text = "".join(f">s{k} x\n{row}\n" for k, row in enumerate(rows)).replace("DEF", "D\nE F").replace("\n", newline)
    path = write(tmp_path / "a.a3m", text)
    whole = parse_a3m(path)
    monkeypatch.setattr(text_files, "BLOCK", block)
    found = parse_a3m(write(tmp_path / "a.a3m.gz", gzip.compress(text.encode())))
    assert (*found.names,) == (*whole.names,) == ("s0", "s1", "s2", "s3", "s4")
    np.testing.assert_array_equal(found.residues, whole.residues)
    np.testing.assert_array_equal(found.deletions, whole.deletions)
    assert (whole.deletions[2:, [0, 1, 89]] == [[0, 7, 7], [700, 0, 0], [0, 0, 255]]).all()
    for bad, said in (
        ("A7A", r":5: illegal letter '7' at position 92"),
        ("A>A", r":5: illegal letter '>' at position 92"),
    ):
        with pytest.raises(FileFormatError, match=said):
            parse_a3m(write(path, f">q\nAC\n>h\n\n{'-' * 90}{bad}\n>z\n"))


def test_an_endless_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a header that is kept until it fills the memory, or of which the rest is read as a sequence."""
    monkeypatch.setattr(text_files, "BLOCK", 100)
    text = ">q\nAC\n>" + "h" * 1_000 + "\nAC\n"
    with pytest.raises(FileFormatError, match=r"a\.a3m:3: a header of more than 100 characters; shorten it"):
        parse_a3m(write(tmp_path / "a.a3m", text))


def test_an_insertion_longer_than_any_protein_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a few kilobytes of gzip that unpack to gigabytes of one insertion, and a number that two bytes do not hold."""
    monkeypatch.setattr(text_files, "BLOCK", 10_000)
    path = write(tmp_path / "a.a3m", ">q\nAC\n>h\nA" + "c" * 65_535 + "C\n")
    assert parse_a3m(path).deletions.tolist() == [[0, 0], [0, 65_535]]
    for row in ("A" + "c" * 65_536 + "C", "AC" + "c" * 65_536):
        with pytest.raises(FileFormatError, match=r":3: sequence 'h' has more than 65,535 insertions"):
            parse_a3m(write(path, f">q\nAC\n>h\n{row}\n"))


@pytest.mark.parametrize(
    "row", ["ACDEFGHIKL" * 30, "aA" * 300, "A" * 299 + "c" * 300 + "A", "AC"], ids=["plain", "many", "long", "short"]
)
def test_a_large_alignment_takes_three_bytes_for_each_of_its_own(tmp_path: Path, row: str):
    """Catches arrays of the whole text: masks, running counts, and insertions of 4 bytes took 18 to 53 bytes for each."""
    text = f">ab\n{row}\n" * ((1 << 19) // (len(row) + 5))
    path = write(tmp_path / "a.a3m.gz", gzip.compress(text.encode(), 1))
    size = len(text)
    del text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "BLOCK", 1 << 14)
        tracemalloc.start()
        parse_a3m(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 3 * size + (1 << 20)


GOLDEN = {
    "ex_bfd_a3m": "6KWC_1/bfd_uniref_hits.a3m",
    "ex_mgnify_sto": "6KWC_1/mgnify_hits.sto",
    "td_bfd_a3m": "query73_A/bfd_uniclust_hits.a3m",
    "td_mgnify_sto": "query73_A/mgnify_hits.sto",
    "td_uniref90_sto": "query73_A/uniref90_hits.sto",
    "2q2kA_bfd_a3m": "2q2k_A/bfd_uniclust_hits.a3m",
    "2q2kA_uniprot_sto": "2q2k_A/uniprot_hits.sto",
    "2q2kA_uniref90_sto": "2q2k_A/uniref90_hits.sto",
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_parity(golden: Path, real_data: Path, case: str):
    """Catches any difference from AF2's parsers on real alignments: residues, deletions and names, exactly."""
    expected = load(golden / "featurization" / f"msa_{case}.npz")
    alignment = (parse_a3m if case.endswith("a3m") else parse_stockholm)(real_data / "alignments" / GOLDEN[case])
    np.testing.assert_array_equal(alignment.residues, np.stack([encode(s.decode()) for s in expected["sequences"]]))
    np.testing.assert_array_equal(alignment.deletions, expected["deletion_matrix"])
    assert list(alignment.names) == [text.decode().split(maxsplit=1)[0] for text in expected["descriptions"]]


def test_what_hh_suite_adds_to_an_alignment(tmp_path: Path):
    """Catches secondary structure read as sequences, and an alignment refused for a stop or for the database's zero byte."""
    path = tmp_path / "x.a3m"
    path.write_bytes(b">ss_pred\nCCHH\n>ss_conf\n9987\n>q\nACDE*\n>h\nAC-E\n\0")
    alignment = parse_a3m(path)
    assert (*alignment.names,) == ("q", "h")
    assert alignment.residues.shape == (2, 4)


@pytest.mark.parametrize("first", ["#12,10\t1,1", "#6\t2", "#3,3 2,1", "#6 12", "# 12,10\t1,1", "#12, 10 \t 1 ,1"])
def test_an_alignment_of_a_complex_is_refused(first: str, tmp_path: Path):
    """Catches ColabFold's alignment of several chains that is read as one chain, their residues joined."""
    path = write(tmp_path / "a.a3m", f"{first}\n>101\t102\nACDEFG\n>x\nACDaEFG\n")
    for read in (parse_a3m, lambda path: query_of_a3m(path, text_files.text_blocks(path)), parse_fasta):
        with pytest.raises(FileFormatError, match=r"a\.a3m:1: ColabFold's alignment of a complex") as error:
            read(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("first", ["#3,3", "#3;3\t1;1", "# 3:3 1:1", "#3,3\t1,1,", "# mine\n#3,3\t1,1", "\n#3,3\t1,1"])
def test_a_line_that_is_almost_that_of_a_complex_is_refused(first: str, tmp_path: Path):
    """Catches two chains that are read as one, because the line of their lengths was written by hand."""
    path = write(tmp_path / "a.a3m", f"{first}\n>101\t102\nACDEFG\n>x\nACDaEFG\n")
    line = first.count("\n") + 1
    for read in (
        parse_a3m,
        lambda path: query_of_a3m(path, text_files.text_blocks(path)),
        parse_fasta,
        *([query_of_complex] if line == 1 else []),
    ):
        with pytest.raises(FileFormatError, match=rf"a\.a3m:{line}: '.*' may be ColabFold's line") as error:
            read(path)
        assert "'1,1' for two chains" in str(error.value)


@pytest.mark.parametrize(
    "sequence", ["ALAGLY", "ALA", "ALA:GLY", "AAA GGG SER", "ALAALAALAALAALAALA", "MKTALAGLYSER SER"]
)
def test_sequences_that_look_like_codes_of_three_letters(sequence: str, tmp_path: Path):
    """Catches peptides that are refused because their letters happen to be the name of an amino acid."""
    (record,) = read_fasta(write(tmp_path / "a.fasta", f">a\n{sequence}\n"), several=True)
    assert isinstance(record.sequence, ProteinSequence)


@pytest.mark.parametrize("first", ["#6\t1", "# a comment", "#A3M#", "#12,10 of them", "#6", "# 2026-11-28", "# 6 "])
def test_an_alignment_of_one_chain_may_begin_with_a_comment(first: str, tmp_path: Path):
    """Catches ColabFold's monomers refused."""
    assert parse_a3m(write(tmp_path / "a.a3m", f"{first}\n>101\nACDEFG\n>x\nACDaEFG\n")).names[1] == "x"


def test_a_colon_separates_chains(tmp_path: Path):
    """Catches a message that tells to replace the colon by an amino acid."""
    path = write(tmp_path / "a.fasta", ">dimer\nACD\nEF:GH\n")
    for read in (parse_fasta, parse_a3m):
        with pytest.raises(FileFormatError, match=r"a\.fasta:3: sequence 'dimer' has ':', which separates the chains"):
            read(path)


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches an archive that fills the memory."""
    monkeypatch.setattr(text_files, "LARGEST_UNPACKED", 1000)
    monkeypatch.setattr(text_files, "BLOCK", 100)
    path = tmp_path / "x.a3m.gz"
    path.write_bytes(gzip.compress(b">q\n" + b"A" * 900))
    assert parse_a3m(path).columns == 900
    path.write_bytes(gzip.compress(b">q\n" + b"A" * 1000))
    with pytest.raises(FileFormatError, match="unpacks to more than"):
        parse_a3m(path)

"""Malformed input: a UserError of one line that names file, line and fix, whatever the bytes are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats import parse_a3m, parse_fasta, parse_stockholm
from evodsp.data.formats.mmcif import read_chain, read_structure
from evodsp.data.records import ProteinSequence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.layout import read_alignment_dir
from evodsp.errors import UserError
from tests.builders.mmcif import atom, entry

STO = "# STOCKHOLM 1.0\n"
CIF = entry(
    {"A": "1:GLY 2:SER"}, [atom(n, r, k, k) for k, r in ((1, "GLY"), (2, "SER")) for n in ("N", "CA", "C", "O")]
)


def says(call: Callable[[], object], *parts: str) -> str:
    """The message of the UserError that `call` must raise: one line that contains all `parts`."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, f"'{part}' not in: {message}"
    return message


def fails(reader: Callable, path: Path, content: str | bytes, *parts: str) -> None:
    """`reader` must refuse `content`, saved at `path`, in one line that contains the path and all `parts`."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    says(lambda: reader(path), str(path), *parts)


FASTA_CASES = {
    "empty": ("", ["empty", "write it again"]),
    "blank": (" \n\n", ["empty"]),
    "no header": ("MKV\n", [":1: ", "not a FASTA file", "add '>name'"]),
    "comment only": ("# a\n", ["no header"]),
    "mmCIF": (
        "# a\ndata_1ABC\n_entry.id 1ABC\n",
        [":2: ", "a structure, not a FASTA file", "sequence of each of its chains"],
    ),
    "PDB": ("HEADER    HYDROLASE\nATOM      1  N   ALA A   1\n", [":1: ", "a structure, not a FASTA file"]),
    "PDB of a program": ("CRYST1    1.000\n", [":1: ", "a structure, not a FASTA file"]),
    "codes of three letters": (
        ">a\nMK\n>b\nALA GLY\nSER HSD\n",
        [":3: ", "'b'", "three letters (ALA GLY SER", "residue: AGS"],
    ),
    "codes in lower case": (">b\nAla-Gly-Ser\n", [":1: ", "three letters", "residue: AGS"]),
    "joined codes": (">b\nALAGLYSERTHRVALLEU\n", [":1: ", "three letters", "residue: AGSTVL"]),
    "no name": (">one\nM\n> \nMK\n", [":3: ", "without a name"]),
    "no sequence": (">one\n>two\nMK\n", [":1: ", "'one' is empty", "add its residues"]),
    "last without sequence": (">one\nMK\n>two\n", [":3: ", "'two' is empty"]),
    "digit": (">one\nMK\nAC1D\n", [":3: ", "letter '1'", "'one'", "write X"]),
    "stop": (">one\nMKV*\n", [":2: ", "letter '*'"]),
    "gap": (">one\nMK-V\n", [":2: ", "letter '-'"]),
    "ambiguous": (">one\nMKV\n>two\nMKJ\n", [":4: ", "letter 'J'", "'two'", "I or L"]),
    "not ASCII": (">one\nMKÅV\n", [":2: ", "letter 'Å'"]),
    "two equal names": (">one\nMK\n>two\nMV\n>one x\nMA\n", [":5: ", "'one'", "line 1", "rename"]),
    "slash": (">a/b\nMK\n", [":1: ", "'a/b'", "cannot name a folder", "'/'"]),
    "backslash": (">a\\b\nMK\n", [":1: ", "cannot name a folder"]),
    "parent folder": (">..\nMK\n", [":1: ", "cannot name a folder"]),
    "option": (">-rf\nMK\n", [":1: ", "cannot name a folder"]),
    "long name": (f">{'a' * 300}\nMK\n", [":1: ", "shorten it"]),
    "binary": (b">a\nMK\0V\n", [":2: ", "not a text file"]),
    "Latin-1": (b">a\nMK\n>b \xe9t\xe9\nM\n", [":3: ", "not UTF-8"]),
    "broken gzip": (gzip.compress(b">a\nMK\n")[:-9], ["broken gzip", "download"]),
}


@pytest.mark.parametrize("case", FASTA_CASES)
def test_fasta(tmp_path: Path, case: str):
    """Catches a bad FASTA file that is read silently or ends in a traceback."""
    content, parts = FASTA_CASES[case]
    fails(parse_fasta, tmp_path / "x.fasta", content, *parts)


A3M_CASES = {
    "empty": ("", ["empty"]),
    "no header": ("ACDE\n", [":1: ", "not an A3M file", "'>'"]),
    "truncated at a header": (">q\nACDE\n>h\n", [":3: ", "'h' has 0 match columns", "'q' has 4", "truncated"]),
    "truncated in a row": (
        ">q\nACDE\n>h\nACDE\n>g x\nAC",
        [":5: ", "'g' has 2 match columns", "'q' has 4", "truncated"],
    ),
    "unequal rows": (">q\nACDE\n>h\nACaaDEF\n>g\nACDE\n", [":3: ", "'h' has 5", "'q' has 4", "correct the row"]),
    "digit": (">q\nACDE\n>h\nAC\nD7\n", [":5: ", "letter '7'", "'h'", "remove it"]),
    "symbol": (">q\nACDE\n>h\nA$DE\n", [":4: ", "letter '$'"]),
    "another alphabet": (">q\nACDE\n>h\nACDЖ\n", [":4: ", "letter 'Ж'"]),
    "insertions only": (">q\nacde\n", [":1: ", "'q' has no upper-case residue"]),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0\0", [":1: ", "not a text file"]),
}


@pytest.mark.parametrize("case", A3M_CASES)
def test_a3m(tmp_path: Path, case: str):
    """Catches a bad A3M file that is read silently or ends in a traceback."""
    content, parts = A3M_CASES[case]
    fails(parse_a3m, tmp_path / "x.a3m", content, *parts)


STOCKHOLM_CASES = {
    "empty": ("", ["empty"]),
    "no first line": ("q ACDE\n//\n", [":1: ", "# STOCKHOLM 1.0"]),
    "truncated": (STO + "q ACDE\nh AC", [":3: ", "no '//'", "truncated"]),
    "unequal rows": (STO + "q ACDE\nh ACD\n//\n", [":3: ", "'h' has 3 columns", "'q' has 4"]),
    "block missing": (STO + "q AC\nh AC\n\nq DE\n//\n", [":3: ", "'h' has 2 columns", "'q' has 4"]),
    "digit": (STO + "q ACDE\n\nh A7DE\n//\n", [":4: ", "'7'", "'h'", "remove it"]),
    "no sequences": (STO + "#=GF ID x\n//\n", ["no sequences", "search again"]),
    "words": (STO + "q AC DE\n//\n", [":2: ", "found 3 words"]),
    "gaps only": (STO + "q ----\nh ACDE\n//\n", [":2: ", "'q' consists of gaps"]),
    "two alignments": (STO + "q AC\n//\n" + STO + "q AC\n//\n", [":4: ", "one alignment per file"]),
}


@pytest.mark.parametrize("case", STOCKHOLM_CASES)
def test_stockholm(tmp_path: Path, case: str):
    """Catches a bad Stockholm file that is read silently or ends in a traceback."""
    content, parts = STOCKHOLM_CASES[case]
    fails(parse_stockholm, tmp_path / "x.sto", content, *parts)


STRUCTURE_CASES = {
    "empty.cif": ("", ["empty"]),
    "text.cif": ("once upon a time\n", [":1: ", "not a valid structure file", "download it again"]),
    "fasta.cif": (">a\nMK\n", [":1: ", "not a valid structure file"]),
    "no_atoms.cif": (CIF[: CIF.index("loop_\n_atom_site")], ["no atoms", "another one"]),
    "truncated.cif": (CIF[:-9], ["truncated", "Wrong number of values"]),
    "coordinate.cif": (
        CIF.replace(" 2 0 0 ", " x 0 0 ", 1),
        ["_atom_site.Cartn_x of atom row 5 is 'x'", "correct the file"],
    ),
    "beyond.cif": (entry({"A": "1:GLY"}, [atom("N", "SER", 2, 1)]), ["label_seq_id 2", "SEQRES (1..1)"]),
    "digits.cif": (
        CIF.replace("2 SER", "9" * 5000 + " SER", 1),
        ["_entity_poly_seq.num is '9999", "...9999", "but must be a number"],
    ),
    "large.cif": (
        CIF.replace("2 SER", "1000000000 SER", 1),
        ["_entity_poly_seq.num is '1000000000'"],
    ),
    "number.cif": (CIF.replace("2 SER", "two SER", 1).replace("1 two", "1 two"), ["_entity_poly_seq.num is 'two'"]),
    "binary.cif": (b"\0\1\2\3", ["not a text file"]),
    "empty.pdb": ("HEADER    NOTHING\nEND\n", ["no atoms"]),
    "text.pdb": ("once upon a time\n", ["no atoms"]),
    "truncated.pdb": ("ATOM      1  N   GLY A   1      16.1\n", ["not a valid structure file"]),
}


@pytest.mark.parametrize("name", STRUCTURE_CASES)
def test_structure(tmp_path: Path, name: str):
    """Catches a bad structure file that gives an empty structure or ends in a traceback."""
    content, parts = STRUCTURE_CASES[name]
    fails(read_structure, tmp_path / name, content, *parts)


def test_chain_that_is_not_there(tmp_path: Path):
    """Catches a message that does not list the chains of the file."""
    path = tmp_path / "1abc.cif"
    path.write_text(CIF)
    says(lambda: read_chain(path, "B"), str(path), "no protein chain 'B'", "Chains: A")


@pytest.mark.parametrize("reader", [parse_fasta, parse_a3m, parse_stockholm, read_structure])
def test_missing_file_and_directory(tmp_path: Path, reader: Callable):
    """Catches FileNotFoundError and IsADirectoryError reaching the user as tracebacks."""
    says(lambda: reader(tmp_path / "none"), str(tmp_path / "none"), "cannot be read", "check the path")
    says(lambda: reader(tmp_path), str(tmp_path), "cannot be read")


def folder(tmp_path: Path, files: dict[str, str]) -> Path:
    path = tmp_path / "alignments" / "1abc_A"
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def test_query_differs_from_the_first_row(tmp_path: Path):
    """Catches features of one protein trained against the structure of another."""
    path = folder(tmp_path, {"bfd.a3m": ">other\nACDE\n"})
    file = str(path / "bfd.a3m")
    parts = ("'other' has 'D' at position 3", "query 'mine' has 'W'", "(1 position differs)", "remove the file")
    says(lambda: read_alignment_dir(path, ProteinSequence("mine", "ACWE")), file, *parts)
    says(
        lambda: read_alignment_dir(path, ProteinSequence("mine", "ACDEF")),
        file,
        "has 4 residues",
        "has 5",
        "search again",
    )


def test_alignments_of_different_queries(tmp_path: Path):
    """Catches two searches with different queries merged column by column."""
    path = folder(tmp_path, {"a.a3m": ">q\nACDE\n", "b.sto": STO + "q ACDF\n//\n"})
    says(lambda: read_alignment_dir(path), str(path / "b.sto"), "'F' at position 4", "first row of a.a3m has 'E'")


def test_directory_without_alignments(tmp_path: Path):
    """Catches a misplaced directory taken for a chain without homologues."""
    path = folder(tmp_path, {"pdb70_hits.hhr": "x", "uniprot_hits.sto": STO})
    says(lambda: read_alignment_dir(path), str(path), "no alignment", "pdb70_hits.hhr", "run the search")
    says(lambda: read_alignment_dir(path / "none"), str(path / "none"), "no such alignment directory")


def test_store_names_the_nearest_key(tmp_path: Path):
    """Catches messages about a misspelt chain that do not suggest the nearest one."""
    folder(tmp_path, {"bfd.a3m": ">q\nGS\n"})
    structures = tmp_path / "mmcif_files"
    structures.mkdir()
    (structures / "1abc.cif").write_text(CIF)
    store = ChainFiles(tmp_path / "alignments", structures)
    assert store.alignments("1abc_A")[0].columns == 2
    says(lambda: store.alignments("1abd_A"), "no alignments of chain '1abd_A'", "Did you mean '1abc_A'?")
    says(lambda: store.chain("1abd_A"), "no 1abd.cif", "Did you mean '1abc'?")
    says(lambda: store.chain("1abc_B"), "1abc.cif", "no protein chain 'B'", "Chains: A")
    says(lambda: ChainFiles(tmp_path / "alignments").chain("1abc_A"), "no structure directory was given")
    says(lambda: ChainFiles(tmp_path / "none"), str(tmp_path / "none"), "no such alignment directory")
    says(lambda: ChainFiles(tmp_path / "alignments", tmp_path / "none"), "no such structure directory")


def test_broken_alignment_database(tmp_path: Path):
    """Catches a half-copied database read as shorter alignments."""
    index = tmp_path / "alignment_db.index"
    index.write_text("{")
    says(lambda: ChainFiles(tmp_path).keys(), str(index), ":1: ", "not JSON")
    index.write_text("[]")
    says(lambda: ChainFiles(tmp_path).keys(), str(index), "make the index again")
    index.write_text(json.dumps({"1abc_A": {"db": "alignment_db_0.db", "files": [["bfd.a3m", 0, 100]]}, "2xyz_A": {}}))
    says(lambda: ChainFiles(tmp_path).alignments("1abc_A"), "alignment_db_0.db", "cannot be read")
    (tmp_path / "alignment_db_0.db").write_text(">q\nACDE\n")
    says(
        lambda: ChainFiles(tmp_path).alignments("1abc_A"),
        "alignment_db_0.db",
        "ends before 'bfd.a3m'",
        "copy it again",
    )
    says(lambda: ChainFiles(tmp_path).alignments("2xyz_A"), str(index), "the entry of chain '2xyz_A'")
    says(lambda: ChainFiles(tmp_path).alignments("1abd_A"), "Did you mean '1abc_A'?")


def mutated(rng: np.random.Generator, data: bytes) -> bytes:
    """`data` with a few bytes replaced, a stretch removed, repeated or moved, or the end removed."""
    text = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        start, end = sorted(rng.integers(0, len(text) + 1, 2).tolist())
        match rng.integers(0, 6):
            case 0:
                text = text[:start]
            case 1:
                del text[start : min(end, start + 40)]
            case 2:
                text[start:start] = text[end : end + 40]
            case 3:
                text[start : start + 1] = rng.choice(
                    [b"\n", b" ", b"'", b"?", b"-1", b"1e999", b"nan", b"\xc3\xa5", b"_"]
                )
            case _:
                text[start : start + 1] = bytes([rng.integers(0, 256)])
    return bytes(text)


VALID = {
    "a3m": (parse_a3m, ">query\nACDEFGHIKL\n>one\nAC-EFaaGHIKL\n>two x\n-CDEFGHIK-bb\n"),
    "sto": (parse_stockholm, STO + "#=GF ID x\nq  AC-DE\nh/1 AKK-E\n#=GR h/1 PP 99999\n\nq  FGH\nh/1 F-H\n//\n"),
    "fasta": (parse_fasta, ">one a protein\nMKVLAAGHIT\nWW\n>two\nACDEFGHIKL\n"),
    "cif": (read_structure, CIF),
    "pdb": (
        read_structure,
        "SEQRES   1 A    2  GLY SER\n"
        "ATOM      1  N   GLY A   1      16.192  -4.014 -14.999  1.00 59.92           N\n"
        "ATOM      2  CA ASER A   2A     15.125  -4.784 -14.381  0.50 59.92           C\nEND\n",
    ),
}


@pytest.mark.parametrize("count", [250, pytest.param(20_000, marks=pytest.mark.verify)])
@pytest.mark.parametrize("kind", VALID)
def test_mutated_files_are_read_or_refused(tmp_path: Path, kind: str, count: int):
    """Catches any exception but UserError, and any message of more than one line, on damaged files of each format."""
    reader, text = VALID[kind]
    path = tmp_path / f"x.{kind}"
    path.write_text(text)
    reader(path)
    rng = np.random.default_rng(count)
    refusals = []
    for _ in range(count):
        path.write_bytes(mutated(rng, text.encode()))
        try:
            reader(path)
        except UserError as error:
            refusals.append(str(error))
    assert count / 10 < len(refusals) < count
    assert all("\n" not in message and str(path) in message for message in refusals)

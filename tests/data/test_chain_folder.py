"""The folder of a chain: its alignments and template searches, in OpenFold's and OpenProteinSet's layouts."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from evodsp.data.records import ProteinSequence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.layout import (
    alignment_files,
    parse_alignment_file,
    read_alignment_dir,
    read_template_hits,
    search_result_files,
)
from evodsp.errors import UserError
from evodsp.geometry.residues import decode
from tests.builders.alignments import chain_folder, database, preparsed
from tests.builders.templates import QUERY

A3M = ">q\nACDE\n>h\nAC-E\n"
STO = "# STOCKHOLM 1.0\nq AC-DE\nh AKKDE\n//\n"
HMMSEARCH = "# STOCKHOLM 1.0\n3abc_A/1-5  MKTAY" + "-" * 27 + "\n//\n"


def names(alignments) -> list[str]:
    return [Path(alignment.source).name for alignment in alignments]


def test_alignment_dir_reads_what_is_an_alignment_of_the_chain(tmp_path: Path):
    """Catches pairing and template files read as MSAs, gzipped ones overlooked, and another order than DeepMind's."""
    files = {"uniref90_hits.sto.gz": STO, "bfd_hits.a3m": A3M, "mgnify_hits.a3m.gz": A3M}
    files |= {
        "uniprot_hits.sto": STO,
        "uniprot_hits.a3m": A3M,
        "hmm_output.sto": STO,
        "pdb70_hits.hhr": "x",
        "notes.txt": "x",
    }
    folder = chain_folder(tmp_path, "1abc_A", files)
    alignments = read_alignment_dir(folder, ProteinSequence("1abc_A", "ACDE"))
    assert [path.name for path in alignment_files(folder)] == names(alignments)
    assert names(alignments) == ["uniref90_hits.sto.gz", "bfd_hits.a3m", "mgnify_hits.a3m.gz"]
    assert [decode(a.residues[0]) for a in alignments] == ["ACDE"] * 3


DEEPMINDS = {"uniref90_hits": 10_000, "small_bfd_hits": 600, "mgnify_hits": 501, "a_hits": 10_001, "uniclust30": 502}
"""Files in the order of a chain's MSA, and the rows that are taken of each."""
OF_ONE_SEARCH = {"mgnify_hits": 502, "uniref90_hits": 10_001}
"""How many rows those have that are cut."""


def in_folder(root: Path, files: dict[str, str]) -> None:
    chain_folder(root, "1abc_A", files)


def in_archives(root: Path, files: dict[str, str]) -> None:
    """OpenFold3's archive, and another one in the chain's folder."""
    read = {Path(name).stem: parse_alignment_file(name, text.encode())[0] for name, text in files.items()}
    preparsed(root / "1abc_A.npz", {name: read.pop(name) for name in ("mgnify_hits", "a_hits")})
    preparsed(root / "1abc_A" / "alignment.npz", read)


def in_database(root: Path, files: dict[str, str]) -> None:
    database(root, {"1abc_A": files})


@pytest.mark.parametrize("pack", [in_folder, in_archives, in_database])
def test_the_order_and_the_rows_of_alphafolds_alignments(
    tmp_path: Path, pack: Callable[[Path, dict[str, str]], None]
) -> None:
    """Catches bfd or mgnify before uniref90, of which a complex then keeps a few rows, and more rows than DeepMind takes: in
    folders, archives and databases, and in indices, which list the files by name."""
    wanted = {name: OF_ONE_SEARCH.get(name, rows) for name, rows in DEEPMINDS.items()}
    pack(tmp_path, {f"{name}.a3m": ">q\nACDE\n" + ">h\nAC-E\n" * (rows - 1) for name, rows in sorted(wanted.items())})
    files = ChainFiles(tmp_path)
    found = files.alignments("1abc_A")
    by_name = {Path(one.source.rpartition(":")[2]).stem: len(one) for one in found}
    assert list(by_name.items()) == list(DEEPMINDS.items())
    assert [len(one.names) for one in found] == list(map(len, found))


def test_files_of_both_searches_and_layouts(tmp_path: Path) -> None:
    """Catches OpenProteinSet's nested hhr/, hmmsearch's result or a gzipped file missed, and MSAs read as searches."""
    folder = tmp_path / "1xyz_A"
    for name in (
        "hhr/pdb70_hits.hhr.gz",
        "hmm_output.sto",
        "pdb_hits.sto",
        "sto/hmmsearch_output.sto.gz",
        "uniref90_hits.sto",
        "b.a3m",
        ".hidden.hhr",
        "a.hhr",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(HMMSEARCH)
    assert [path.name for path in search_result_files(folder)] == [
        "a.hhr", "hmm_output.sto", "hmmsearch_output.sto.gz", "pdb70_hits.hhr.gz", "pdb_hits.sto",
    ]  # fmt: skip
    for path in search_result_files(folder):
        if path.name != "hmm_output.sto":
            path.unlink()
    (hit,) = read_template_hits(folder, QUERY)
    assert (hit.key, hit.sum_probs) == ("3abc_A", None)
    (folder / "hmm_output.sto").write_text("")
    assert read_template_hits(folder, QUERY) == [], "hmmsearch without hits leaves an empty file"
    with pytest.raises(UserError, match="no such folder"):
        read_template_hits(tmp_path / "nowhere", QUERY)


@pytest.mark.parametrize("files", [{}, {"a.a3m": ""}, {"a.a3m": "\n \n", "b.sto": "\0", "pdb70.hhr": "x"}])
def test_an_empty_alignment_or_folder_is_the_query_alone(
    tmp_path: Path, files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a search without a result ending the run, and a chain without homologues that nobody is told of, or often."""
    folder = chain_folder(tmp_path, "1abc_A", files)
    folder.mkdir(exist_ok=True)
    query = ProteinSequence("1abc_A", "ACDE")
    assert read_alignment_dir(folder, query) == read_alignment_dir(folder, query) == []
    assert [record.message.count("sequence alone") for record in caplog.records] == [1]


def test_an_empty_alignment_beside_others_is_left_out(tmp_path: Path) -> None:
    """Catches an empty file, gzipped or not, that spoils a good one."""
    folder = chain_folder(tmp_path, "1abc_A", {"a.a3m": "", "b.a3m.gz": "", "c.a3m": A3M})
    assert names(read_alignment_dir(folder)) == ["c.a3m"]


# The store of chains: OpenFold's alignment database, chain keys, real layouts.


def test_alignment_database(tmp_path: Path):
    """Catches wrong offsets in OpenFold's database, and files read as alignments that are not."""
    files = {"uniref90_hits.sto": STO, "uniprot_hits.sto": STO, "bfd.a3m": A3M, "pdb70_hits.hhr": "x"}
    store = ChainFiles(database(tmp_path, {"2xyz_B": {"bfd.a3m": ">q\nWW\n"}, "1abc_A": files}))
    assert store.keys() == ["1abc_A", "2xyz_B"]
    assert names(store.alignments("1abc_A")) == ["uniref90_hits.sto", "bfd.a3m"]
    assert store.query("2xyz_B") == ProteinSequence("2xyz_B", "WW")


def test_several_databases(tmp_path: Path):
    """Catches chains of the second index left out, a chain in two of them taken from either, and super.index ignored."""
    database(tmp_path, {"1abc_A": {"bfd.a3m": A3M}})
    first = json.loads((tmp_path / "alignment_db.index").read_text())
    (tmp_path / "other.index").write_text(json.dumps({"2abc_A": first["1abc_A"]}))
    store = ChainFiles(tmp_path)
    assert store.keys() == ["1abc_A", "2abc_A"]
    assert names(store.alignments("2abc_A")) == ["bfd.a3m"]
    (tmp_path / "other.index").write_text(json.dumps(first))
    with pytest.raises(UserError, match=r"other.index: chain '1abc_A' is in alignment_db.index too"):
        ChainFiles(tmp_path).keys()
    (tmp_path / "super.index").write_text(json.dumps({"3abc_A": first["1abc_A"]}))
    assert ChainFiles(tmp_path).keys() == ["3abc_A"]


def test_pickled_store_is_small_and_works(tmp_path: Path):
    """Catches an index of millions of entries sent to every worker."""
    store = ChainFiles(database(tmp_path, {f"{n}_A": {"bfd.a3m": A3M} for n in range(200)}))
    store.keys()
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert pickle.loads(data).keys() == store.keys()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            '{"1abc_A": {"db": "alignment_db_0.db", "files": [["bfd.a3m", 0, 1180591620717411303424]]}}',
            "the entry of chain",
        ),
        ('{"1abc_A": {"db": "alignment_db_0.db", "files": [["bfd.a3m", 0, 1099511627776]]}}', "ends before 'bfd.a3m'"),
        (r'{"1abc_A": {"db": "a\nb.db", "files": []}}', "the entry of chain '1abc_A' is not"),
        ('{"1abc_A": ' + "9" * 5000 + "}", "a number that is too long"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_hostile_index_is_one_line(tmp_path: Path, index: str, message: str):
    """Catches a traceback for offsets beyond any file, infinite ones, numbers of thousands of digits, and deep nesting."""
    (tmp_path / "alignment_db.index").write_text(index)
    (tmp_path / "alignment_db_0.db").write_text(A3M)
    with pytest.raises(UserError, match=message) as caught:
        ChainFiles(tmp_path).alignments("1abc_A")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400

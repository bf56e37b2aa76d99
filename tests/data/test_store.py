"""The store of chains: OpenFold's alignment database, chain keys, real layouts."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from evodsp.data.records import ProteinSequence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.errors import UserError
from evodsp.geometry.residues import decode
from tests.builders.alignments import database

A3M = ">q\nACDE\n>h\nAC-E\n"
STO = "# STOCKHOLM 1.0\nq AC-DE\nh AKKDE\n//\n"


def names(alignments) -> list[str]:
    return [Path(alignment.source).name for alignment in alignments]


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


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            '{"1abc_A": {"db": "alignment_db_0.db", "files": [["bfd.a3m", 0, 1180591620717411303424]]}}',
            "the entry of chain",
        ),
        ('{"1abc_A": {"db": "alignment_db_0.db", "files": [["bfd.a3m", 0, 1e999]]}}', "the entry of chain"),
        ('{"1abc_A": {"db": "alignment_db_0.db", "files": [["bfd.a3m", 0, 1099511627776]]}}', "ends before 'bfd.a3m'"),
        (r'{"1abc_A": {"db": "a\nb.db", "files": []}}', "the entry of chain '1abc_A' is not"),
        (
            r'{"1abc_A": {"db": "alignment_db_0.db", "files": [["b\u2028.a3m", 0, 1]]}}',
            "the entry of chain '1abc_A' is not",
        ),
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


def test_store_on_real_data(real_data: Path):
    """Catches real layouts misread: keys, structures, queries from SEQRES, first rows wrongly reported as different."""
    store = ChainFiles(real_data / "alignments", real_data / "mmcif_files")
    assert store.keys() == ["102m_A", "1k1a_A", "2q2k_A", "2q2k_B", "6KWC_1", "query73_A"]
    assert [key for key in store.keys() if store.has_structure(key)] == ["102m_A", "1k1a_A", "2q2k_A", "2q2k_B"]  # noqa: SIM118
    alignments = store.alignments("2q2k_A")
    assert names(alignments) == ["uniref90_hits.sto", "bfd_uniclust_hits.a3m", "mgnify_hits.sto"]
    assert store.chain("2q2k_B").sequence == store.query("2q2k_A").letters == decode(alignments[0].residues[0])
    assert len(store.query("6KWC_1")) == 191
    assert len(store.alignments("102m_A", store.query("102m_A"))[0]) == 869


def test_pickled_store_is_small_and_works(tmp_path: Path):
    """Catches an index of millions of entries sent to every worker."""
    store = ChainFiles(database(tmp_path, {f"{n}_A": {"bfd.a3m": A3M} for n in range(200)}))
    store.keys()
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert pickle.loads(data).keys() == store.keys()

"""Templates that are found by alignment among chains that the user names."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats import mmcif
from evodsp.data.records import Chain, ProteinSequence
from evodsp.data.sources import structures as structures_module
from evodsp.data.sources.structures import KeptStructures
from evodsp.data.templates import source as template_chains
from evodsp.data.templates.source import TemplateChains, TemplateSource
from evodsp.geometry.residues import encode_sequence
from tests.builders.training_chains import write_chain

QUERY = "MKTAYIAKQRWLEDERVTCNPFGHW"
CHAINS = {
    "1abc_A": QUERY,
    "1abc_B": QUERY[:20],
    "2abc_A": "MKTAYIAKQRWAEDERVTCNPFGHW",  # one of 25 differs
    "3abc_A": "GGMKTAYIARWLEDERLTCSPFGYW",  # two more before it, two less in it, three differ
    "4abc_A": "MRSAYLAKNRFLDDEKVSCHPYGHF",
    "5abc_A": "MRSAYLAKNRFLDDEKVSCHPYGHF",
    "6abc_A": "PPPPPPPPPP",
}


def names(chains: TemplateChains, name: str, letters: str = QUERY) -> list[str]:
    return [hit.key for hit in chains.hits(ProteinSequence(name, letters))]


def test_best_first_and_never_of_the_own_entry() -> None:
    """Catches hits in the order of the list, two chains of one sequence, and a query's own structure as its template."""
    chains = TemplateChains(CHAINS, max_identity=0.7)
    assert names(chains, "new") == ["1abc_A", "2abc_A", "3abc_A", "1abc_B", "4abc_A"]
    assert names(chains, "4abc_C", CHAINS["4abc_A"])[0] == "5abc_A"
    assert "1abc_B" not in names(chains, "1ABC_C")


def test_near_copies_are_kept_from_the_listed_chains_alone() -> None:
    """Catches a training chain that may copy its double, a limit on held-out chains, and a limit off by one."""
    assert names(TemplateChains(CHAINS, 0.96), "1abc_A") == ["2abc_A", "3abc_A", "4abc_A"]  # 2abc_A: 24 of 25
    assert names(TemplateChains(CHAINS, 0.95), "1abc_A") == ["3abc_A", "4abc_A"]
    # 3abc_A has 25 residues, of which 20 are identical to those of the query.
    assert names(TemplateChains(CHAINS, 0.8), "1abc_A") == ["3abc_A", "4abc_A"]
    assert names(TemplateChains(CHAINS, 0.79), "1abc_A") == ["4abc_A"]
    assert names(TemplateChains({**CHAINS, "7abc_A": QUERY}, 0.79), "8abc_A")[0] == "1abc_A"


def test_an_entry_is_its_only_chain() -> None:
    """Catches near copies as templates of a training chain whose name is that of its entry."""
    assert names(TemplateChains(CHAINS, 0.95), "2abc", CHAINS["2abc_A"])[0] != "1abc_A"
    assert names(TemplateChains(CHAINS, 0.95), "9abc", CHAINS["2abc_A"])[0] == "2abc_A"


def test_of_a_long_list_the_likeliest_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a list of 100,000 chains that is aligned whole for every sample, and the wrong ones left out."""
    aligned: list[str] = []

    def counted(first: str, second: str) -> int:
        aligned.append(second)
        return score(first, second)

    score = template_chains.score
    monkeypatch.setattr(template_chains, "MOST_ALIGNED", 2)
    monkeypatch.setattr(template_chains, "score", counted)
    assert names(TemplateChains(CHAINS, 0.7), "new") == ["1abc_A", "2abc_A"]
    assert aligned == [CHAINS["1abc_A"], CHAINS["2abc_A"]]


def test_atoms_stand_where_the_alignment_says(tmp_path: Path) -> None:
    """Catches atoms that are shifted by the residues before the first pair, or by a gap."""
    write_chain(tmp_path, "3abc_A", CHAINS["3abc_A"])
    folder = KeptStructures(tmp_path / "mmcif_files")
    source = TemplateSource(folder, chains=TemplateChains({"3abc_A": CHAINS["3abc_A"]}, 0.7))
    found = source.find([], ProteinSequence("new", QUERY))
    assert found.log_line == "new: 1 template of 1 hit"
    # GGMKTAYIA--RWLEDERLTCSPFGYW: the query's residues 8 and 9, KQ, have no counterpart.
    counterpart = np.array([2, 3, 4, 5, 6, 7, 8, -1, -1, *range(9, 25)])
    present = counterpart >= 0
    chain = folder.chain("3abc_A")
    (aatype,), (positions,), (mask,) = found.features.aatype, found.features.positions, found.features.mask
    np.testing.assert_array_equal(aatype[present], encode_sequence(chain.sequence)[counterpart[present]])
    np.testing.assert_array_equal(positions[present], chain.positions[counterpart[present]])
    assert not mask[~present].any()
    assert mask[present].any(1).all()


def test_a_structure_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches 20 files parsed again for each sample, and structures that travel to the worker processes."""
    read: list[str] = []

    def counted(path: Path, chain_id: str) -> Chain:
        read.append(path.name)
        return mmcif.read_chain(path, chain_id)

    monkeypatch.setattr(structures_module, "read_chain", counted)
    write_chain(tmp_path, "3abc_A", CHAINS["3abc_A"])
    folder = KeptStructures(tmp_path / "mmcif_files")
    source = TemplateSource(folder, chains=TemplateChains({"3abc_A": CHAINS["3abc_A"]}, 0.7))
    first, second = (source.find([], ProteinSequence("new", QUERY)).features for _ in range(2))
    np.testing.assert_array_equal(first.positions, second.positions)
    assert read == ["3abc.cif"]
    other = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 2000
    np.testing.assert_array_equal(other.find([], ProteinSequence("new", QUERY)).features.positions, first.positions)
    assert len(read) == 2


def test_names_keep_their_letters(tmp_path: Path) -> None:
    """Catches chains of one's own whose files are not found, because a PDB's entry is lower case, and names of queries that are
    no chains."""
    write_chain(tmp_path, "MyProt_A", CHAINS["3abc_A"])
    source = TemplateSource(
        KeptStructures(tmp_path / "mmcif_files"), chains=TemplateChains({"MyProt_A": CHAINS["3abc_A"]}, 0.7)
    )
    for name in ("new", "_x", "new_", "sp|P1|NEW_HUMAN"):
        assert len(source.find([], ProteinSequence(name, QUERY)).features) == 1, name
    assert len(source.find([], ProteinSequence("myprot_B", QUERY)).features) == 0


def test_a_broken_structure_is_no_template(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a broken file of one chain that costs all chains that are like it, or that is passed over without a word."""
    for key in ("3abc_A", "4abc_A"):
        write_chain(tmp_path, key, CHAINS[key])
    (tmp_path / "mmcif_files" / "3abc.cif").write_text("data_3abc\nloop_\n_atom_site.id\n")
    chains = TemplateChains({key: CHAINS[key] for key in ("3abc_A", "4abc_A")}, 0.7)
    source = TemplateSource(KeptStructures(tmp_path / "mmcif_files"), chains=chains)
    for name in ("first", "second"):
        assert source.find([], ProteinSequence(name, QUERY)).features.names == ("4abc_A",)
    assert caplog.text.count("'3abc_A' is no template of other chains, because it cannot be read (") == 1

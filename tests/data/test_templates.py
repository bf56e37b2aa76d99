"""Template features: golden parity from real structure files, query73_A end to end, realignment and every rejection."""

from __future__ import annotations

import pickle
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats import mmcif, parse_fasta
from evodsp.data.records import Chain, ProteinSequence
from evodsp.data.sources import structures as structures_module
from evodsp.data.sources.structures import KeptStructures, StructureFolder, TemplateStructures
from evodsp.data.templates import source as template_chains
from evodsp.data.templates.features import TemplateRejection, match_hit, realign, template_features
from evodsp.data.templates.hits import HitLimits, Rejection, TemplateHit
from evodsp.data.templates.source import TemplateChains, TemplateSource
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import CA, GAP, UNKNOWN, N, decode, encode_sequence
from tests.builders.chains import straight_chain
from tests.builders.templates import (
    LETTERS,
    QUERY,
    QUERY73_TEMPLATES,
    MemoryStructures,
    from_raw,
    make_hit,
)
from tests.builders.training_chains import write_chain
from tests.shared import load


def test_features_golden(golden: Path, real_data: Path):
    """Catches any difference from AF2's raw features of real files: letters, columns, masks.

    The golden templates were moved so that their first N lies at (4, 0, 0): moved back, in float32, hence the 1e-5.
    """
    expected = load(golden / "features_raw_full.npz")
    query = parse_fasta(real_data / "fasta" / "6kwc.fasta")[0]
    store = StructureFolder(real_data / "mmcif_files")
    hits = []
    for name, row, score in zip(
        expected["template_domain_names"],
        expected["template_sequence"],
        expected["template_sum_probs"][:, 0],
        strict=True,
    ):
        letters = row.decode()
        first = len(letters) - len(letters.lstrip("-"))
        piece = letters.strip("-")
        aligned = query.letters[first : first + len(piece)]
        hits.append(make_hit(aligned, piece, first_query=first, first_hit=7, key=name.decode(), score=float(score)))
    found, rejected = template_features(query, hits[::-1], store)
    wanted = from_raw(expected)
    assert rejected == {}
    assert found.names == wanted.names
    assert list(map(decode, found.aatype)) == [row.decode() for row in expected["template_sequence"]]
    for name in ("aatype", "mask", "sum_probs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
    for number, hit in enumerate(hits):
        column = hit.indices_query[0]
        here, mask = found.positions[number], found.mask[number, ..., None]
        moved = (here - here[column, N] + np.array([4, 0, 0], np.float32)) * mask
        np.testing.assert_allclose(moved, wanted.positions[number], atol=1e-5, rtol=0)


def test_gaps_on_both_sides():
    """Catches residues shifted after a gap of the query or of the template, and masks left on in gaps."""
    hit = make_hit("KTA--YIAKQ", "KTAGGY--KQ", first_query=1, first_hit=30)
    found, _ = template_features(QUERY, [hit], MemoryStructures(straight_chain("SSKTAGGYKQSS")))
    assert list(map(decode, found.aatype)) == ["-KTAY--KQ" + "-" * 23]
    x = found.positions[0, :9, CA, 0] / np.float32(3.8)
    np.testing.assert_allclose(x, [0, 2, 3, 4, 7, 0, 0, 8, 9], atol=1e-5)
    np.testing.assert_array_equal(found.mask[0, :, CA], [0, 1, 1, 1, 1, 0, 0, 1, 1] + [0] * 23)


def test_copies_that_hmmsearch_found_are_one_template():
    """Catches four slots with one structure, hits of HHsearch that are compared, and a hit without atoms that hides others."""
    keys = ("1abc_A", "1abc_B", "2abc_A", "3abc_A")
    letters = {"3abc_A": LETTERS[:8] + "W" + LETTERS[9:]}
    chains = [straight_chain(letters.get(key, LETTERS), key) for key in keys]
    empty = replace(chains[0], mask=np.zeros_like(chains[0].mask))
    for score, expected in ((None, ("1abc_B", "3abc_A")), (10.0, keys[1:])):
        hits = [make_hit(LETTERS, letters.get(key, LETTERS), key=key, score=score) for key in keys]
        found, rejected = template_features(QUERY, hits, MemoryStructures(empty, *chains[1:]))
        assert found.names == expected
        assert rejected[TemplateRejection.NO_ATOMS] == ("1abc_A",)


def test_realigned_where_the_structure_lacks_residues():
    """Catches atoms of the wrong residues if the file's sequence lacks a loop or has other letters."""
    theirs = "GS" + LETTERS[:10] + LETTERS[12:20].replace("F", "Y", 1) + LETTERS[20:] + "HHH"
    hit = make_hit(LETTERS, LETTERS)
    found, rejected = template_features(QUERY, [hit], MemoryStructures(straight_chain(theirs)))
    assert rejected == {}
    assert list(map(decode, found.aatype)) == [LETTERS[:10] + "--" + LETTERS[12:20].replace("F", "Y", 1) + LETTERS[20:]]
    x = found.positions[0, :, CA, 0] / np.float32(3.8)
    np.testing.assert_allclose(x, [*range(2, 12), 0, 0, *range(12, 32)], atol=1e-5)


def test_realignment_limit():
    """Catches the limit of 90 % applied to the wrong length or with the wrong sign."""
    letters = LETTERS[:30]
    assert realign(letters, "GG" + "W" * 3 + letters[3:] + "GG") is not None
    assert realign(letters, "GG" + "W" * 4 + letters[4:] + "GG") is None
    # A file that has only a piece of the hit: the piece is the shorter sequence.
    index = realign(letters, letters[10:25])
    assert index is not None
    assert index.tolist() == [-1] * 10 + list(range(15)) + [-1] * 5


def test_x_is_no_identical_residue():
    """Catches unknown residues that count as equal ones: two sequences of X would be one protein."""
    letters = LETTERS[:30]
    assert realign("XXX" + letters[3:], "XXX" + letters[3:]) is not None
    assert realign("XXXX" + letters[4:], "XXXX" + letters[4:]) is None
    assert realign("XXXX" + letters[4:], letters) is None
    assert realign(letters, "XXXX" + letters[4:]) is None


def test_x_matches_anything_when_looking_for_the_hit():
    """Catches a modified residue (X on one side) that prevents the match or shifts it."""
    for piece, sequence, start in (("AXD", "ACDAXD", 3), ("AXD", "GACD", 1), ("ACD", "GAXD", 1)):
        matched = match_hit(make_hit(piece, piece), MemoryStructures(straight_chain(sequence)))
        assert matched.index.tolist() == [start, start + 1, start + 2]
    rejected = match_hit(make_hit("ACD", "ACD"), MemoryStructures(straight_chain("GAGD")))
    assert rejected is TemplateRejection.LOW_IDENTITY
    hit = make_hit("MKTAYI", "MXTAYI")
    found, _ = template_features(QUERY, [hit], MemoryStructures(straight_chain(LETTERS)))
    assert found.aatype[0, 1] == UNKNOWN
    assert found.mask[0, 1].sum() == 5


def with_break(distance: float) -> Chain:
    chain = straight_chain(LETTERS)
    positions = chain.positions.copy()
    positions[20:, :, 2] += distance
    return replace(chain, positions=positions)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (MemoryStructures(), TemplateRejection.NO_STRUCTURE),
        (MemoryStructures(straight_chain("W" * 32, key="1abc_B")), TemplateRejection.NO_CHAIN),
        (MemoryStructures(straight_chain("W" * 32)), TemplateRejection.LOW_IDENTITY),
        (MemoryStructures(with_break(151.0)), TemplateRejection.BROKEN_CHAIN),
        (
            MemoryStructures(replace(straight_chain(LETTERS), mask=np.zeros((32, 37), np.float32))),
            TemplateRejection.NO_ATOMS,
        ),
    ],
)
def test_rejections_are_named(source: MemoryStructures, reason: TemplateRejection):
    """Catches an unusable hit that becomes a template, stops the run, or is dropped without a reason."""
    good = make_hit("MKTAY", "MKTAY", key="2xyz_A", score=1.0)
    source.chains["2xyz_A"] = straight_chain(LETTERS, key="2xyz_A")
    found, rejected = template_features(QUERY, [make_hit(LETTERS, LETTERS), good], source)
    assert found.names == ("2xyz_A",)
    assert rejected == {reason: ("1abc_A",)}


def test_a_gap_in_the_coordinates_is_no_broken_chain():
    """Catches zeros of missing residues read as coordinates: the chain is 200 Å from the origin."""
    chain = straight_chain(LETTERS)
    mask = chain.mask.copy()
    mask[10] = 0
    positions = (chain.positions + np.float32(200)) * mask[..., None]
    found, rejected = template_features(
        QUERY, [make_hit(LETTERS, LETTERS)], MemoryStructures(replace(chain, positions=positions, mask=mask))
    )
    assert rejected == {}
    assert found.mask[0, 10].sum() == 0
    assert found.aatype[0, 10] != GAP


def test_best_first_at_most_limit_and_hits_without_score():
    """Catches templates in file order, the limit applied before rejections, and hmmsearch's hits refused."""
    source = MemoryStructures(*(straight_chain(LETTERS, key=f"{k}abc_A") for k in (1, 2, 3)))
    hits = [
        make_hit("MKTAY", "MKTAY", key=key, score=score)
        for key, score in [("1abc_A", None), ("2abc_A", 3.0), ("9abc_A", 5.0), ("3abc_A", 4.0)]
    ]
    found, rejected = template_features(QUERY, hits, source, limit=2)
    assert found.names == ("3abc_A", "2abc_A")
    assert rejected == {TemplateRejection.NO_STRUCTURE: ("9abc_A",)}
    found, _ = template_features(QUERY, hits, source)
    assert found.names[-1] == "1abc_A"
    assert found.sum_probs.tolist() == [4.0, 3.0, 0.0]
    assert template_features(QUERY, hits, source, limit=0)[1] == {}


def test_no_templates():
    """Catches lost axes: a query without templates must still give arrays of its length."""
    found, rejected = template_features(QUERY, [], MemoryStructures())
    assert (len(found), rejected) == (0, {})
    shapes = {name: value.shape for name, value in found.processed().items()}
    assert shapes["template_all_atom_positions"] == (0, 32, 37, 3)
    assert shapes["template_mask"] == (0,)


@pytest.mark.parametrize(
    ("hit", "limit", "message"),
    [
        (
            make_hit("MKTAW", "MKTAY"),
            20,
            r"hit '1abc_A': its query has 'W' at position 5, 'q' has 'Y' \(1 position differs\); search again",
        ),
        (make_hit("MKTAY", "MKTAY", first_query=28), 20, "aligned to residue 33 of the query, 'q' has 32"),
        (make_hit("MKTAY", "MKTAY"), -1, "the limit of templates is -1; give 0 or more"),
    ],
)
def test_bad_input(hit: TemplateHit, limit: int, message: str):
    """Catches hits of another query's search that are used silently."""
    with pytest.raises(UserError, match=message) as caught:
        template_features(QUERY, [hit], MemoryStructures(straight_chain(LETTERS)), limit)
    assert "\n" not in str(caught.value)


def test_broken_files_stop_the_run(tmp_path: Path):
    """Catches a truncated or unreadable structure treated as a missing one."""
    (tmp_path / "1abc.cif").write_text("data_1ABC\nloop_\n_atom_site.Cartn_x\n")
    hit = make_hit("MKTAY", "MKTAY")
    with pytest.raises(FileFormatError, match=r"1abc\.cif"):
        template_features(QUERY, [hit], StructureFolder(tmp_path))
    unreadable = UserError("1abc.cif: cannot be read")
    unreadable.__cause__ = PermissionError()
    with pytest.raises(UserError, match="cannot be read"):
        template_features(QUERY, [hit], MemoryStructures(error=unreadable))


def test_frozen_and_picklable():
    """Catches a record that cannot be pickled, or whose arrays need not fit together."""
    found, _ = template_features(QUERY, [make_hit("MKTAY", "MKTAY")], MemoryStructures(straight_chain(LETTERS)))
    assert pickle.loads(pickle.dumps(found)).names == ("1abc_A",)
    with pytest.raises(ValueError, match="aatype"):
        replace(found, names=())


# From search results to templates: files, hits, leakage, and the log line.


@pytest.fixture(scope="module")
def query73(real_data: Path) -> ProteinSequence:
    return parse_fasta(real_data / "fasta" / "query73.fasta")[0]


@pytest.fixture(scope="module")
def source(real_data: Path) -> TemplateSource:
    return TemplateSource.open(real_data / "mmcif_files")


def test_query73(real_data: Path, query73: ProteinSequence, source: TemplateSource) -> None:
    """Catches a real search that fails, and a missing structure that the log does not name."""
    found = source.find(real_data / "alignments" / "query73_A", query73)
    assert found.features.names == QUERY73_TEMPLATES
    assert found.features.positions.shape == (7, 73, 37, 3)
    assert found.log_line == (
        "query73_A: 7 templates of 10 hits; 1 hit: no structure (1hf9_B); "
        "2 hits: too few atoms in the aligned residues (5kc1_F, 5kc1_J)"
    )


def test_no_template_is_as_young_as_the_query(
    real_data: Path, query73: ProteinSequence, source: TemplateSource
) -> None:
    """Catches leakage: the query's date or the margin of 60 days ignored, or a hit without a date accepted."""
    folder = real_data / "alignments" / "query73_A"
    found = source.find(folder, query73, release_date=date(2008, 1, 1), pdb_id="9xyz")
    assert found.features.names == ("2crb_A", "1psm_A")
    assert set(found.rejected[Rejection.TOO_RECENT]) >= {"3u8v_A", "2q2k_A"}
    assert found.rejected[TemplateRejection.NO_STRUCTURE] == ("1hf9_B",), (
        "a missing file must not be called a missing date"
    )
    # 2q2k was released on 2008-02-05; 60 days later is 2008-04-05.
    for day, allowed in ((4, False), (5, True)):
        names = source.find(folder, query73, date(2008, 4, day), "9xyz").features.names
        assert ("2q2k_A" in names) == allowed
    latest = replace(source, limits=HitLimits(max_date=date(1995, 2, 7)))
    assert latest.find(folder, query73, date(2020, 1, 1), "9xyz").features.names == ("1psm_A",)


def test_unknown_date_of_the_query() -> None:
    """Catches a training chain without a date (a PDB file) that gets templates released after it."""
    source = TemplateSource(MemoryStructures(straight_chain(LETTERS), dates={"1abc": date(2001, 1, 1)}))
    hits = [make_hit(LETTERS[:12], LETTERS[:12])]
    found = source.find(hits, QUERY, None, "9xyz")
    assert len(found.features) == 0
    assert found.log_line == (
        "q: 0 templates of 1 hit; the query's release date is unknown and no latest date of templates is set"
    )
    limited = replace(source, limits=HitLimits(max_date=date(2001, 1, 1)))
    assert limited.find(hits, QUERY, None, "9xyz").features.names == ("1abc_A",)
    assert source.find(hits, QUERY).features.names == ("1abc_A",), "a query to predict has no date"


def test_dates_are_read_only_where_they_count() -> None:
    """Catches dates read from files although there is no limit."""
    structures = MemoryStructures(straight_chain(LETTERS), dates={"1abc": date(2001, 1, 1)})
    assert isinstance(structures, TemplateStructures)
    hits = [make_hit(LETTERS[:12], LETTERS[:12])]
    TemplateSource(structures).find(hits, QUERY)
    assert structures.asked == []
    TemplateSource(structures).find(hits, QUERY, date(2010, 1, 1), "9xyz")
    assert structures.asked == ["1abc"]


def test_another_chain_of_the_entry() -> None:
    """Catches a hit lost, or realigned with a wrong chain, after the entry's chains were renamed."""
    other, right = straight_chain(LETTERS[::-1], "1abc_A"), straight_chain("GG" + LETTERS, "1abc_C")
    found, rejected = template_features(QUERY, [make_hit(LETTERS, LETTERS)], MemoryStructures(other, right))
    assert (found.names, rejected) == (("1abc_C",), {})
    assert found.positions[0, 0, 1, 0] == pytest.approx(2 * 3.8), "residue 1 of the hit is residue 3 of chain C"
    # An exact match in another chain is preferred to a match with X in the named one.
    with_x = straight_chain("X" + LETTERS[1:], "1abc_A")
    found, _ = template_features(QUERY, [make_hit(LETTERS, LETTERS)], MemoryStructures(with_x, right))
    assert found.names == ("1abc_C",)
    found, _ = template_features(
        QUERY, [make_hit(LETTERS, LETTERS)], MemoryStructures(other, replace(with_x, chain_id="B"))
    )
    assert found.names == ("1abc_B",)


def test_the_only_chain_stands_for_one_that_is_not_there() -> None:
    """Catches an entry with one renamed chain refused, and realignment with an arbitrary one of several chains."""
    similar = straight_chain(LETTERS[:10] + "WW" + LETTERS[12:], "1abc_B")
    hit = make_hit(LETTERS, LETTERS)
    found, _ = template_features(QUERY, [hit], MemoryStructures(similar))
    assert found.names == ("1abc_B",)
    _, rejected = template_features(QUERY, [hit], MemoryStructures(similar, straight_chain("W" * 32, "1abc_C")))
    assert rejected == {TemplateRejection.NO_CHAIN: ("1abc_A",)}


def test_log_of_many_missing_structures() -> None:
    """Catches a log line of thousands of names."""
    hits = [make_hit(LETTERS[:12], LETTERS[:12], key=f"{k}abc_A") for k in range(1000, 1012)]
    line = (
        TemplateSource(MemoryStructures()).find([replace(hit, pdb_id=hit.pdb_id[:4]) for hit in hits], QUERY).log_line
    )
    assert line.startswith("q: 0 templates of 12 hits; 12 hits: no structure (1000_A, ")
    assert line.endswith("1009_A and 2 more)")


def test_limit_and_pickle(real_data: Path, query73: ProteinSequence, source: TemplateSource) -> None:
    """Catches a source that cannot be pickled for workers, and more templates than the limit."""
    sent = pickle.loads(pickle.dumps(replace(source, limit=2)))
    assert sent.find(real_data / "alignments" / "query73_A", query73).features.names == QUERY73_TEMPLATES[:2]


# Templates that are found by alignment among chains that the user names.


ASKED = "MKTAYIAKQRWLEDERVTCNPFGHW"
CHAINS = {
    "1abc_A": ASKED,
    "1abc_B": ASKED[:20],
    "2abc_A": "MKTAYIAKQRWAEDERVTCNPFGHW",  # one of 25 differs
    "3abc_A": "GGMKTAYIARWLEDERLTCSPFGYW",  # two more before it, two less in it, three differ
    "4abc_A": "MRSAYLAKNRFLDDEKVSCHPYGHF",
    "5abc_A": "MRSAYLAKNRFLDDEKVSCHPYGHF",
    "6abc_A": "PPPPPPPPPP",
}


def names(chains: TemplateChains, name: str, letters: str = ASKED) -> list[str]:
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
    assert names(TemplateChains({**CHAINS, "7abc_A": ASKED}, 0.79), "8abc_A")[0] == "1abc_A"


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
    found = source.find([], ProteinSequence("new", ASKED))
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
    first, second = (source.find([], ProteinSequence("new", ASKED)).features for _ in range(2))
    np.testing.assert_array_equal(first.positions, second.positions)
    assert read == ["3abc.cif"]
    other = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 2000
    np.testing.assert_array_equal(other.find([], ProteinSequence("new", ASKED)).features.positions, first.positions)
    assert len(read) == 2


def test_names_keep_their_letters(tmp_path: Path) -> None:
    """Catches chains of one's own whose files are not found, because a PDB's entry is lower case, and names of queries that are
    no chains."""
    write_chain(tmp_path, "MyProt_A", CHAINS["3abc_A"])
    source = TemplateSource(
        KeptStructures(tmp_path / "mmcif_files"), chains=TemplateChains({"MyProt_A": CHAINS["3abc_A"]}, 0.7)
    )
    for name in ("new", "_x", "new_", "sp|P1|NEW_HUMAN"):
        assert len(source.find([], ProteinSequence(name, ASKED)).features) == 1, name
    assert len(source.find([], ProteinSequence("myprot_B", ASKED)).features) == 0


def test_a_broken_structure_is_no_template(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a broken file of one chain that costs all chains that are like it, or that is passed over without a word."""
    for key in ("3abc_A", "4abc_A"):
        write_chain(tmp_path, key, CHAINS[key])
    (tmp_path / "mmcif_files" / "3abc.cif").write_text("data_3abc\nloop_\n_atom_site.id\n")
    chains = TemplateChains({key: CHAINS[key] for key in ("3abc_A", "4abc_A")}, 0.7)
    source = TemplateSource(KeptStructures(tmp_path / "mmcif_files"), chains=chains)
    for name in ("first", "second"):
        assert source.find([], ProteinSequence(name, ASKED)).features.names == ("4abc_A",)
    assert caplog.text.count("'3abc_A' is no template of other chains, because it cannot be read (") == 1

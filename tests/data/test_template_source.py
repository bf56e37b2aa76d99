"""From search results to templates: files, hits, leakage, and the log line."""

from __future__ import annotations

import pickle
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from evodsp.data.formats import parse_fasta, parse_hhr
from evodsp.data.records import ProteinSequence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.structures import TemplateStructures
from evodsp.data.templates.features import TemplateRejection, template_features
from evodsp.data.templates.hits import HitLimits, Rejection
from evodsp.data.templates.source import TemplateSource
from tests.builders.alignments import database
from tests.builders.chains import straight_chain
from tests.builders.templates import LETTERS, QUERY, QUERY73_TEMPLATES, MemoryStructures, make_hit

STO = "# STOCKHOLM 1.0\n3abc_A/1-5  MKTAY" + "-" * 27 + "\n//\n"


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


def test_the_querys_own_entry_is_no_template(real_data: Path, query73: ProteinSequence, source: TemplateSource) -> None:
    """Catches the query's own entry used as a template, even if the dates allow it."""
    found = source.find(real_data / "alignments" / "query73_A", query73, date(2030, 1, 1), "2CRB")
    assert found.features.names == tuple(name for name in QUERY73_TEMPLATES if name != "2crb_A")
    assert found.rejected[Rejection.SAME_ENTRY] == ("2crb_A",)


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


def test_withdrawn_entries_are_replaced(tmp_path: Path) -> None:
    """Catches obsolete.dat read but not used: the folder has the successor of the hit's entry."""
    listed = "OBSLTE    31-JUL-94 0ABC     1ABC\n"
    (tmp_path / "obsolete.dat").write_text(listed)
    (tmp_path / "structures").mkdir()
    opened = TemplateSource.open(tmp_path / "structures", date(2020, 1, 1), tmp_path / "obsolete.dat")
    assert opened.limits.max_date == date(2020, 1, 1)
    source = replace(opened, structures=MemoryStructures(straight_chain(LETTERS), dates={"1abc": date(2001, 1, 1)}))
    assert source.find([make_hit(LETTERS[:12], LETTERS[:12], key="0abc_A")], QUERY).features.names == ("1abc_A",)


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


def test_another_chain_of_a_real_entry(real_data: Path, query73: ProteinSequence, source: TemplateSource) -> None:
    hits = parse_hhr(real_data / "alignments" / "query73_A" / "pdb70_hits.hhr")
    renamed = [replace(hit, chain_id="Z") for hit in hits if hit.key == "4zey_A"]
    assert source.find(renamed, query73).features.names == ("4zey_A",)


def test_hits_of_the_alignment_database(tmp_path: Path) -> None:
    """Catches template searches in OpenFold's database ignored: training would silently have no templates."""
    store = ChainFiles(database(tmp_path, {"1xyz_A": {"bfd.a3m": ">q\nWW\n", "hmm_output.sto": STO}}))
    (hit,) = store.template_hits("1xyz_A", QUERY)
    assert hit.key == "3abc_A"


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

"""Template hits: golden parity of HHsearch results, a small example of hmmsearch, and every filter at its limit."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats import parse_fasta, parse_hhr, parse_hmmsearch, parse_obsolete
from evodsp.data.sources.layout import structure_file
from evodsp.data.templates.hits import HitLimits, Rejection, TemplateHit, reject_alignment, reject_date, select_hits
from evodsp.errors import FileFormatError, UserError

HHR = """Query         query
Match_columns 9

 No Hit                             Prob E-value P-value  Score    SS Cols Query HMM  Template HMM
  1 1ABC_B a protein                99.0 3.8E-02  0.0047   16.2   0.0    6    2-8      4-10  (41)
  2 2XYZ_AA another                  9.0 3.8E+02  0.0047    6.2   0.0    2    1-2      1-2   (2)

No 1
>1ABC_B a protein; with words
Probab=99.00  E-value=3.8e-02  Score=16.19  Aligned_cols=6  Identities=23%  Similarity=0.398  Sum_probs=5.5

Q ss_pred             HHHHH
Q query             2 CD-EF    5 (9)
Q Consensus         2 c~-~f    5 (9)
                      +.  |
T Consensus         4 cdkef    8 (41)
T 1ABC_B            4 CDKEF    8 (41)
Confidence            34 56


Q query             6 GHI    8 (9)
Q Consensus         6 ghi    8 (9)
T Consensus         9 g-i   10 (41)
T 1ABC_B            9 G-I   10 (41)

No 2
>2XYZ_AA another
Probab=9.00  E-value=3.8e+02  Score=6.19  Aligned_cols=2  Identities=23%  Similarity=0.398  Sum_probs=1.1

Q query             1 AC    2 (9)
T 2XYZ_AA           1 AC    2 (2)

"""
QUERY = "ACDEFG"
HMMSEARCH = """# STOCKHOLM 1.0
#=GF ID query
#=GF AU hmmsearch (HMMER 3.3.2)

#=GS 1abc_B/5-11 DE [subseq from] mol:protein length:40  SOME PROTEIN
#=GS 2dna_A/1-6  DE [subseq from] mol:na length:6  DNA
#=GS 3xyz_Cc/1-5 DE [subseq from] mol:protein length:5  OTHER

1abc_B/5-11         --Dk
#=GR 1abc_B/5-11 PP ..9*
2dna_A/1-6          ACG.
3xyz_Cc/1-5         ACD.
#=GC RF             xxx.

1abc_B/5-11         lEFGt
2dna_A/1-6          .ACG.
3xyz_Cc/1-5         .-FG.
#=GC RF             .xxx.
//
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def hit(sequence: str = "ACDEFGHIKLMN", *, chain: str = "1abc_A", columns: int | None = None, sum_probs=None, first=0):
    """A gapless hit at the query's start."""
    columns = len(sequence) if columns is None else columns
    indices = np.arange(len(sequence), dtype=np.int32)
    pdb_id, chain_id = chain.split("_")
    return TemplateHit(1, chain, pdb_id, chain_id, columns, sum_probs, sequence, sequence, indices, indices + first)


@pytest.mark.parametrize(
    ("case", "path"), [("ex_hhsearch", "6KWC_1/hhsearch_output.hhr"), ("td_pdb70", "query73_A/pdb70_hits.hhr")]
)
def test_hhr_golden(golden: Path, real_data: Path, case: str, path: str):
    """Catches any difference from AF2's parser: hits lost, columns shifted by one, gaps counted as residues."""
    with gzip.open(golden / "featurization" / "hhr_hits.json.gz") as file:
        expected = json.load(file)[case]
    hits = parse_hhr(real_data / "alignments" / path)
    assert len(hits) == len(expected)
    for found, wanted in zip(hits, expected, strict=True):
        record = {
            "index": found.index,
            "name": found.name,
            "aligned_cols": found.aligned_columns,
            "sum_probs": found.sum_probs,
            "query": found.query,
            "hit_sequence": found.hit_sequence,
            "indices_query": found.indices_query.tolist(),
            "indices_hit": found.indices_hit.tolist(),
        }
        assert record == {key: wanted[key] for key in record}
        assert found.key == f"{wanted['name'][:4].lower()}_{wanted['name'][5:].split()[0]}"


def test_pairs_and_filters_golden(golden: Path, real_data: Path):
    """Catches pairs counted from the chain's start, and decisions of the alignment filters other than AF2's."""
    with gzip.open(golden / "featurization" / "hhr_hits.json.gz") as file:
        expected = json.load(file)["ex_hhsearch"]
    query = parse_fasta(real_data / "fasta" / "6kwc.fasta")[0].letters
    reasons = {None: None, "AlignRatioError": Rejection.LOW_COVERAGE}
    hits = parse_hhr(real_data / "alignments" / "6KWC_1" / "hhsearch_output.hhr")
    for found, wanted in zip(hits, expected, strict=True):
        assert (found.pdb_id, found.chain_id) == (wanted["pdb_id"], wanted["chain"])
        assert found.pairs.tolist() == wanted["query_to_hit_mapping"]
        assert reject_alignment(found, query, HitLimits()) is reasons[wanted["prefilter_error"]]
    selection = select_hits(hits, query, bool, lambda _: None, HitLimits())
    assert Counter(reason for _, reason in selection.rejected) == {Rejection.LOW_COVERAGE: 1}
    assert [h.sum_probs for h in selection.kept] == sorted((h.sum_probs for h in selection.kept), reverse=True)


def test_hhr_blocks_gaps_and_long_chain_names(tmp_path: Path):
    """Catches blocks joined wrongly, gaps numbered, the consensus taken for the sequence, chain ids cut to one letter."""
    first, second = parse_hhr(write(tmp_path / "a.hhr", HHR))
    assert (first.query, first.hit_sequence, first.residues) == ("CD-EFGHI", "CDKEFG-I", "CDKEFGI")
    assert first.indices_query.tolist() == [1, 2, -1, 3, 4, 5, 6, 7]
    assert first.indices_hit.tolist() == [3, 4, 5, 6, 7, 8, -1, 9]
    assert (first.aligned_columns, first.sum_probs, first.key) == (6, 5.5, "1abc_B")
    assert (second.index, second.key, second.indices_hit.dtype) == (2, "2xyz_AA", np.int32)


def test_hhr_without_hits_and_from_bytes():
    """Catches a search that found nothing taken for a broken file."""
    assert parse_hhr("db:a.hhr", HHR.split("  1 1ABC")[0].encode()) == []
    assert len(parse_hhr("db:a.hhr", gzip.compress(HHR.encode()))) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (HHR, "", "a.hhr: the file is empty"),
        ("Query ", ">a\nQ", "a.hhr:1: not an HHsearch result"),
        (" No Hit", " Hit", "a.hhr:.*no table of hits"),
        (HHR[HHR.index("No 2") :], "", "the table lists 2 hits, 1 alignments follow; the file looks truncated"),
        (HHR[HHR.index("T 2XYZ") :], "T 2XYZ_AA   1 A", "a.hhr:31: a broken alignment row"),
        (HHR[HHR.index("T 2XYZ") :], "", "hit '2XYZ_AA' has no alignment rows"),
        ("T 1ABC_B            9 G-I   10 (41)\n", "", "hit '1ABC_B': the rows of its blocks differ"),
        ("8 (41)\nConf", "9 (41)\nConf", "a.hhr:17: '1ABC_B' is numbered 4 to 9 but has 5 residues"),
        (
            "Q query             6 GHI    8",
            "Q query             7 GHI    9",
            "'query' continues at residue 7, expected 6",
        ),
        ("Aligned_cols=6", "Aligned_cols=7", "a.hhr:10: hit '1ABC_B' has 6 aligned columns, Aligned_cols says 7"),
        (" Sum_probs=5.5", "", "a.hhr:10: expected 'Probab="),
        ("Sum_probs=5.5", "Sum_probs=5e", "a.hhr:10: Sum_probs=5e is not a number"),
        ("Q query             2 CD-EF", "Q query             2 C.-EF", "holds '.' or '~'"),
    ],
)
def test_bad_hhr_is_one_line(tmp_path: Path, old: str, new: str, message: str):
    """Catches tracebacks, silently shortened hits, and messages without file, line and fix."""
    assert old in HHR
    with pytest.raises(FileFormatError, match=message) as error:
        parse_hhr(write(tmp_path / "a.hhr", HHR.replace(old, new, 1)))
    assert "\n" not in str(error.value)
    assert "; " in str(error.value)


@pytest.mark.parametrize("name", ["PF00017", "AF-P00750-F1-model_v4_A", "P53_HUMAN", "pdb_12345678_A"])
def test_a_hit_that_is_no_pdb_chain_is_left_out_alone(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Catches a search that is refused whole for one hit, hits numbered anew, and other names taken for PDB chains."""
    (only,) = parse_hhr(write(tmp_path / "a.hhr", HHR.replace(">1ABC_B", f">{name}", 1)))
    assert (only.index, only.key) == (2, "2xyz_AA")
    text = HMMSEARCH.replace("3xyz_Cc/1-5", f"{name}/1-5")
    (first,) = parse_hmmsearch(write(tmp_path / "hmm.sto", text), query=QUERY)
    assert (first.index, first.key) == (1, "1abc_B")
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 2
    assert all("a hit is left out" in line and f"'{name}" in line for line in warnings)


@pytest.mark.parametrize("prefix", ["pdb_0000", "PDB_0000"])
def test_an_extended_id_is_that_of_its_entry(prefix: str, tmp_path: Path):
    """Catches pdb_00001abc_B refused, or taken for an entry of which no structure and no date is known."""
    first, _ = parse_hhr(write(tmp_path / "a.hhr", HHR.replace(">1ABC_B", f">{prefix}1ABC_B", 1)))
    assert first.key == "1abc_B"
    first, _ = parse_hmmsearch(
        write(tmp_path / "hmm.sto", HMMSEARCH.replace("1abc_B/", f"{prefix}1abc_B/")), query=QUERY
    )
    assert first.key == "1abc_B"
    (tmp_path / "pdb_00001abc.cif.gz").write_text("")
    assert structure_file(tmp_path, "1abc") == tmp_path / "pdb_00001abc.cif.gz"
    (tmp_path / "1abc.cif").write_text("")
    assert structure_file(tmp_path, "1abc") == tmp_path / "1abc.cif"


def test_truncated_hhr_never_gives_other_hits(real_data: Path):
    """Catches a truncated file that gives shortened or fewer hits instead of an error."""
    data = (real_data / "alignments" / "query73_A" / "pdb70_hits.hhr").read_bytes()
    whole = [(h.key, h.query, h.hit_sequence) for h in parse_hhr("a.hhr", data)]
    table = data.index(b"  1 1HF9")
    for end in range(table + 20, len(data), 29):
        try:
            hits = parse_hhr("a.hhr", data[:end])
        except FileFormatError:
            continue
        assert [(h.key, h.query, h.hit_sequence) for h in hits] == whole


def test_hmmsearch_residues_before_the_first_match():
    """Catches pairs shifted by residues that precede the first aligned one."""
    text = "# STOCKHOLM 1.0\n1abc_A/1-5 .aA-Cg.D\n//\n"
    (found,) = parse_hmmsearch("a.sto", text.encode(), query="AWCD")
    assert (found.hit_sequence, found.indices_hit.tolist()) == ("A-CGD", [1, -1, 2, 4])
    assert found.pairs.tolist() == [[0, 0], [2, 1], [3, 3]]
    assert "".join(found.residues[k] for _, k in found.pairs) == "ACD"


def test_hmmsearch_example(tmp_path: Path):
    """Catches insertions that shift the hit's numbering, DNA taken for a template, interleaved blocks lost."""
    first, second = parse_hmmsearch(write(tmp_path / "hmm_output.sto", HMMSEARCH), query=QUERY)
    assert (first.index, first.name, first.key, first.sum_probs) == (1, "1abc_B", "1abc_B", None)
    assert (first.query, first.hit_sequence, first.aligned_columns) == (QUERY, "--DKLEFGT", 4)
    assert first.indices_query.tolist() == [0, 1, 2, 3, 4, 5]
    assert first.indices_hit.tolist() == [-1, -1, 4, 7, 8, 9]
    assert (second.index, second.key, second.residues) == (3, "3xyz_Cc", "ACDFG")
    assert second.indices_hit.tolist() == [0, 1, 2, -1, 3, 4]
    assert first.pairs.tolist() == [[2, 0], [3, 3], [4, 4], [5, 5]]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (HMMSEARCH, " \n", "the file is empty"),
        ("# STOCKHOLM", "STOCKHOLM", "hmm.sto:1: not a Stockholm file"),
        ("//\n", "", "hmm.sto:18: no '//' at the end: the file is truncated; run hmmsearch again"),
        ("//\n", "//\n# STOCKHOLM 1.0\n", "hmm.sto:20: text after '//'"),
        ("--Dk\n", "--Dk x\n", "hmm.sto:9: expected 'name residues'"),
        ("--Dk\n", "--D*\n", r"hmm.sto:9: illegal character '\*' in hit '1abc_B/5-11'"),
        ("--Dk\n", "--Dkk\n", "hmm.sto:9: hit '1abc_B/5-11' has 8 residues, its range says 7"),
        ("--Dk\n", "--DK\n", "hmm.sto:9: hit '1abc_B/5-11' has 7 match columns, the query 6 residues; build"),
    ],
)
def test_bad_hmmsearch_is_one_line(tmp_path: Path, old: str, new: str, message: str):
    """Catches hits of another profile, and truncation."""
    assert old in HMMSEARCH
    with pytest.raises(FileFormatError, match=message) as error:
        parse_hmmsearch(write(tmp_path / "hmm.sto", HMMSEARCH.replace(old, new, 1)), query=QUERY)
    assert "\n" not in str(error.value)


def test_obsolete_entries_and_chains_of_successors(tmp_path: Path):
    """Catches columns off by one, only one replacement followed, an entry without successor taken for a current one."""
    text = (
        " LIST OF OBSOLETE COORDINATE ENTRIES AND SUCCESSORS\n"
        "OBSLTE    31-JUL-94 116L     216L\n"
        "OBSLTE    29-JAN-96 216L     1QNM 1ABC\n"
        "OBSLTE    26-SEP-06 1A0H\n"
        "OBSLTE    26-SEP-06 2A0H     1A0H\n"
    )
    assert parse_obsolete(write(tmp_path / "obsolete.dat", text)) == {
        "116l": "1qnm",
        "216l": "1qnm",
        "1a0h": None,
        "2a0h": None,
    }
    for bad, message in (
        ("no records\n", "no 'OBSLTE' records"),
        ("OBSLTE    31-JUL-94 11", "obsolete.dat:1: an OBSLTE record without"),
        (text + "OBSLTE    29-JAN-96 1QNM     116L\n", "lead back"),
    ):
        with pytest.raises(FileFormatError, match=message):
            parse_obsolete(write(tmp_path / "obsolete.dat", bad))


def test_last_date_is_before_the_query_and_the_maximum():
    """Catches leakage: the later of the two limits used, or templates of the query's release day allowed."""
    limits = HitLimits(max_date=date(2018, 4, 30))
    assert limits.last_date(None) == date(2018, 4, 30)
    assert limits.last_date(date(2020, 1, 1)) == date(2018, 4, 30)
    assert limits.last_date(date(2018, 3, 2)) == date(2018, 1, 1)  # 60 days earlier
    assert HitLimits().last_date(None) is None
    assert HitLimits(days_before_query=1).last_date(date(2018, 3, 1)) == date(2018, 2, 28)
    with pytest.raises(UserError, match="days_before_query is 0"):
        HitLimits(days_before_query=0)


def test_reject_date_at_its_limit():
    """Catches the day of the limit excluded, and an unknown date accepted in training."""
    limit = date(2018, 4, 30)
    assert reject_date(limit, limit) is None
    assert reject_date(date(2018, 5, 1), limit) is Rejection.TOO_RECENT
    assert reject_date(None, limit) is Rejection.UNKNOWN_DATE
    assert reject_date(None, None) is None


def test_reject_alignment_at_its_limits():
    """Catches >= for >, gaps counted as residues, and small pieces of the query rejected."""
    limits, query = HitLimits(), "ACDEFGHIKLMNPQRSTVWY" * 10
    assert reject_alignment(hit("WWWWWWWWWWWW", columns=20), query, limits) is Rejection.LOW_COVERAGE
    assert reject_alignment(hit("WWWWWWWWWWWW", columns=21), query, limits) is None
    assert reject_alignment(hit(query[:190]), query, limits) is None
    assert reject_alignment(hit(query[5:196]), query, limits) is Rejection.DUPLICATE_OF_QUERY
    assert reject_alignment(hit(query[:195].replace("A", "G")), query, limits) is None
    assert reject_alignment(hit("WWWWW----WWWW", columns=21), query, limits) is Rejection.TOO_SHORT
    assert reject_alignment(hit("WWWWW----WWWWW", columns=21), query, limits) is None


def test_select_hits_orders_counts_and_names_every_reason():
    """Catches reasons mixed up, hits in file order instead of by sum_probs, and successors not resolved."""
    query = "ACDEFGHIKLMNPQRSTVWY"
    fine = "ACDEFGHIKLMW"
    hits = [
        hit(fine, chain="1aaa_A", sum_probs=1.0),
        hit(fine, chain="1aaa_B", sum_probs=1.0),
        hit(fine, chain="1aaa_C", sum_probs=1.0, first=7),
        hit(fine, chain="1new_A", sum_probs=2.0),
        hit(fine, chain="1non_A", sum_probs=2.0),
        hit(fine, chain="1que_A", sum_probs=9.0),
        hit(fine, chain="1old_A", sum_probs=8.0),
        hit(fine, chain="1wit_A", sum_probs=7.0),
        hit(query, chain="1dup_A", sum_probs=6.0),
        hit("ACDEFGHIW", chain="1sho_A", sum_probs=5.0),
        hit(fine, chain="1cov_A", columns=2, sum_probs=4.0),
    ]
    early = date(2000, 1, 1)
    dates = dict.fromkeys(("1aaa", "1que", "1rep", "1dup", "1sho", "1cov"), early) | {"1new": date(2019, 1, 1)}
    limits = HitLimits(max_date=date(2018, 4, 30), drop_duplicate_chains=True)
    obsolete = {"1old": "1rep", "1wit": None, "1aaa": "1que"}
    found = select_hits(hits, query, dates.__contains__, dates.get, limits, query_pdb_id="1QUE", obsolete=obsolete)
    assert [h.key for h in found.kept] == ["1rep_A", "1aaa_A", "1aaa_C"]
    assert [(h.key, reason) for h, reason in found.rejected] == [
        ("1que_A", Rejection.SAME_ENTRY),
        ("1wit_A", Rejection.OBSOLETE),
        ("1dup_A", Rejection.DUPLICATE_OF_QUERY),
        ("1sho_A", Rejection.TOO_SHORT),
        ("1cov_A", Rejection.LOW_COVERAGE),
        ("1new_A", Rejection.TOO_RECENT),
        ("1non_A", Rejection.UNKNOWN_DATE),
        ("1aaa_B", Rejection.DUPLICATE_CHAIN),
    ]
    assert Counter(reason for _, reason in found.rejected) == dict.fromkeys(Rejection, 1)

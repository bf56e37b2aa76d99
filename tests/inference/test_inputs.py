"""What a user gives as sequences and alignments (files, folders, standard input), what is made of it, and the config file."""

from __future__ import annotations

import gzip
import io
import shutil
import sys
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.inference import command
from evodsp.inference.api import as_given_files
from evodsp.inference.config import PredictConfig
from evodsp.inference.predict import predict_records
from evodsp.inference.targets import InputRecord, Target, as_files, find_targets, read_inputs
from tests.builders.prediction import read_json

from .conftest import OTHER, QUERY, Workplace


def standard_input(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let this process read `text` from its standard input, once."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def names(*inputs: Path) -> list[str]:
    """The records of inputs that are all in order."""
    records, failures = read_inputs(inputs)
    assert not failures
    return [record.query.name for record in records]


def test_files_folders_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an input that is left out, another order than the given one, and files of a folder that are none."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.fa").write_text(f">b1\n{OTHER}\n>b2\n{OTHER}\n")
    (folder / "a.faa.gz").write_bytes(gzip.compress(f">a1\n{OTHER}\n".encode()))
    (folder / "c.A3M").write_text(f">query\n{OTHER}\n")
    (folder / "notes.txt").write_text("none of this")
    (folder / ".hidden.fasta").write_text("none of this")
    (folder / "deeper.fasta").mkdir()
    (tmp_path / "no_suffix").write_text(f">single\n{OTHER}\n")
    standard_input(monkeypatch, f">piped\n{OTHER}\n")
    assert names(tmp_path / "no_suffix", folder, Path("-")) == ["single", "a1", "b1", "b2", "c", "piped"]


def rows_of(target: Target) -> list[list[int]]:
    """The rows of its alignments."""
    return [row.tolist() for alignment in target.read() for row in alignment.residues]


def test_an_a3m_file_is_query_and_alignment(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an A3M file, or one through standard input, whose other rows are predicted, or not read; another alignment than
    that of FASTA and folder; and one that the same alignment as a file, or as ranks read it, does not find again."""
    (folder, _), _ = find_targets([workplace.config.fasta], workplace.config.alignments)
    assert len(rows_of(folder)) == 12
    alignment = workplace.config.alignments / "alpha_A" / "uniref90_hits.a3m"
    text = alignment.read_text().replace(">query", ">alpha_A first", 1)
    (file := workplace.root / "alpha_A.a3m").write_text(text)
    (of_file,), _ = find_targets([file], None)
    assert not of_file.notes
    standard_input(monkeypatch, text)
    (piped,), _ = find_targets([Path("-")], None)
    assert any("standard input is A3M: 'alpha_A' and its alignment" in note for note in piped.notes)
    standard_input(monkeypatch, text)
    with as_files([Path("-")], ["-"]) as (inputs, _):
        (of_ranks,), _ = find_targets(inputs, None)
        for one in (of_file, piped, of_ranks):
            assert (one.query, rows_of(one), one.digest) == (folder.query, rows_of(folder), of_file.digest)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f">a\n{OTHER}\n>b\n{OTHER[1:]}-\n", ["a"]),
        (f"#10\t1\n>a\n{OTHER}\n>b\n{OTHER[:5]}ag\n{OTHER[5:]}\n", ["a"]),
        (f">a\n{OTHER}\n>b\n{OTHER[1:]}\n>c\n{OTHER[::-1]}\n", ["a", "b", "c"]),
        (f">a\n{OTHER}\n>b\n{OTHER[::-1]}\n", ["a", "b"]),
        (f">a\n{OTHER}\n>b\n{OTHER[1:]}\n>c\nGS-T\n", ["a", "b", "standard input:6: illegal letter '-'"]),
        (f">x/y\n{OTHER}\n>b\n{OTHER[1:]}-\n", ["standard input: the name 'x/y' has '/'"]),
        (f">ss_pred\nCCC\n>a\n{OTHER}\n>b\n{OTHER[1:]}-\n", ["a"]),
        ("\0\1", ["standard input:1: not a text file"]),
        ("", ["standard input: the file is empty"]),
    ],
)  # fmt: skip
def test_standard_input_is_a3m_if_its_rows_are_aligned(
    monkeypatch: pytest.MonkeyPatch, text: str, found: list[str]
) -> None:
    """Catches an alignment whose rows are predicted, FASTA of which only the first record is, and a traceback."""
    standard_input(monkeypatch, text)
    records, failures = read_inputs([Path("-")])
    said = [record.query.name for record in records] + [failure.reason for failure in failures]
    assert len(said) == len(found)
    assert all(one.startswith(other) for one, other in zip(said, found, strict=True)), said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f">a\n{OTHER}\n>b\n{OTHER[::-1]}\n", [True, False]),
        (f">a\n{OTHER}\n>b\n{OTHER[1:]}\n", [False, False]),
        (f">a\n{OTHER}\n", [False]),
    ],
)
def test_fasta_that_may_be_an_alignment_is_told_so(
    monkeypatch: pytest.MonkeyPatch, text: str, said: list[bool]
) -> None:
    """Catches an alignment without gaps whose rows are predicted one by one without a word, and a word for any FASTA."""
    standard_input(monkeypatch, text)
    records, _ = read_inputs([Path("-")])
    assert [any("save them as NAME.a3m" in note for note in record.notes) for record in records] == said


def test_alignments_of_an_a3m_that_are_not_read_are_named(workplace: Workplace) -> None:
    """Catches an alignment that a user gives and that is left out without a word."""
    (alignment := workplace.root / "alpha_A.a3m").write_text(f">query\n{QUERY}\n")
    (target,), _ = find_targets([alignment], workplace.config.alignments)
    assert any("alpha_A/" in note and " is not read: " in note for note in target.notes)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gap.a3m", f">q\nGS-{OTHER}\n", r"gap\.a3m:1: the first sequence has a gap"),
        ("lower.a3m", f">q\nGSa{OTHER}\n", r"lower\.a3m:1: the first sequence has lower case"),
        ("empty.a3m", f">q\n>hit\n{OTHER}\n", r"empty\.a3m:1: the first sequence is empty"),
        ("x:y.a3m", f">q\n{OTHER}\n", "the name 'x:y' has ':'"),
        ("x.cif", "data_1ABC\n#\n_entry.id 1ABC\n", r"x\.cif:1: a structure, not a FASTA file; write the sequence"),
        ("near.a3m", f"#20,20\n>q\n{OTHER}\n", r"near\.a3m:1: '#20,20' may be ColabFold's line"),
        ("codes.fasta", ">a\nALA GLY SER\n", r"codes\.fasta:1: sequence 'a' has codes of three letters"),
        ("up.fasta", f">../x\n{OTHER}\n", r"up\.fasta:1: the name '../x' begins with '\.'"),
        ("unseen.fasta", f">a\u202eb\n{OTHER}\n", r"unseen\.fasta:1: the name 'a\\u202eb' has letters that cannot"),
        ("huge.fasta", f">{'x' * 5000}\n{OTHER}\n", r"huge\.fasta:1: a name of 5000 characters"),
    ],
    ids=lambda value: value if "." in value and len(value) < 15 else "",
)
def test_a_broken_file_is_named_and_the_others_go_on(tmp_path: Path, name: str, content: str, words: str) -> None:
    """Catches a broken file that ends the run for all others, or that is read as something else."""
    (tmp_path / name).write_text(content)
    (tmp_path / "good.fasta").write_text(f">good\n{OTHER}\n")
    records, (failure,) = read_inputs([tmp_path / name, tmp_path / "good.fasta"])
    assert [record.query.name for record in records] == ["good"]
    with pytest.raises(UserError, match=words):
        raise UserError(failure.reason)


@pytest.mark.parametrize(
    ("letters", "warned"),
    [
        ("ATGAAAGTTCTGGCTGGTGGTTGG", True),
        ("augaaaguucuggcugguggu", True),
        ("ACGTNNNNACGTNNNNACGT", True),
        ("GAGAGAGAGAGAGAGAGAGAGAGA", False),
        ("ATGAAAGTTCTGGCTGGTGGTTGGK", False),
    ],
)
@pytest.mark.parametrize("suffix", [".fasta", ".a3m"])
def test_bases_are_told_from_residues(suffix: str, letters: str, warned: bool, tmp_path: Path) -> None:
    """Catches a gene that is predicted as a protein of A, C, G and T without a word."""
    letters = letters.upper() if suffix == ".a3m" else letters
    (tmp_path / f"x{suffix}").write_text(f">x\n{letters}\n")
    ((record,), failures) = read_inputs([tmp_path / f"x{suffix}"])
    assert not failures
    assert any("'x' looks like DNA or RNA" in note for note in record.notes) == warned


def _chains(record: InputRecord) -> list[tuple[str, str]]:
    return [(chain.name, chain.letters) for chain in record.chains]


def test_colons_stand_between_chains(tmp_path: Path) -> None:
    """Catches chains that are fused to one, a single chain that becomes a complex, and names that go astray."""
    (tmp_path / "x.fasta").write_text(">two\nACu:\nEFG*\n>one\nACD\n>none\nACD::EF\n>end\nACD:\n")
    (two, one), failures = read_inputs([tmp_path / "x.fasta"])
    assert _chains(two) == [("two_A", "ACC"), ("two_B", "EFG")]
    assert two.query.letters == "ACCEFG"
    assert (one.query.letters, one.chains) == ("ACD", ())
    assert [failure.reason.partition("x.fasta:")[2] for failure in failures] == [
        "6: chain 2 of 'none' is empty; write its residues, or remove a ':'",
        "8: chain 2 of 'end' is empty; write its residues, or remove a ':'",
    ]
    with pytest.raises(UserError, match="ACD:EFG: no such file or folder; if it is a sequence, write it into a FASTA"):
        read_inputs([Path("ACD:EFG")])
    (path,) = as_given_files("ACD:EFG", None, None, tmp_path).inputs
    assert [chain.letters for chain in read_inputs([path])[0][0].chains] == ["ACD", "EFG"]


def test_more_chains_than_names(tmp_path: Path) -> None:
    """Catches a complex that no name of one or two letters can count, and an A3M file that asks for a billion chains."""
    (tmp_path / "x.fasta").write_text(f">many\n{':'.join(['AC'] * 703)}\n")
    (tmp_path / "y.a3m").write_text("#2\t999999999\n>101\nAC\n")
    records, failures = read_inputs([tmp_path / "x.fasta", tmp_path / "y.a3m"])
    assert not records
    assert [failure.reason for failure in failures] == [
        "many: 703 chains, but a complex has at most 702; give fewer of them",
        "y: 999,999,999 chains, but a complex has at most 702; give fewer of them",
    ]


def test_the_records_of_a_file_are_one_complex(tmp_path: Path) -> None:
    """Catches records that stay alone, a complex without its file's name, and chains that lose the names of their records."""
    (tmp_path / "1abc.fasta").write_text(">1abc_D first\nACD\n>1abc_E\nEFG:EFG\n")
    (tmp_path / "bad.fasta").write_text(">a\nACD\n>b\nA1C\n")
    (tmp_path / "one.fasta").write_text(">a\nACD\n")
    (record, one), (failure,) = read_inputs(
        [tmp_path / "1abc.fasta", tmp_path / "bad.fasta", tmp_path / "one.fasta"], one_complex=True
    )
    assert record.query.name == "1abc"
    assert _chains(record) == [("1abc_D", "ACD"), ("1abc_E_A", "EFG"), ("1abc_E_B", "EFG")]
    assert (one.query.name, one.chains) == ("one", ())
    assert failure.name == "bad"
    assert "bad.fasta:4: illegal letter '1' at position 2 of sequence 'b'" in failure.reason


def test_tables_of_sequences(tmp_path: Path) -> None:
    """Catches columns that are taken by their place, lines that are counted wrongly, and quoted cells that are not."""
    (tmp_path / "x.csv").write_text('\ufeffsequence, ID,note\nACD:EFG,two,"a,\nb"\n\nacd,one,\nA1,bad,\nAC,two,\n')
    (two, one), failures = read_inputs([tmp_path / "x.csv"])
    assert _chains(two) == [("two_A", "ACD"), ("two_B", "EFG")]
    assert (one.query.name, one.query.letters, one.chains) == ("one", "ACD", ())
    reasons = [failure.reason.partition("x.csv:")[2] for failure in failures]
    assert [reason[:20] for reason in reasons] == ["6: illegal letter '1", "7: the name 'two' wa"]
    for text, reason in (
        ("Name,sequence\na,ACD\n", "x.csv:1: a table without a column 'id': its first line is 'Name,sequence'"),
        ("id,sequence\n", "x.csv: a table without a record"),
        (f"id,sequence\na,{'A' * 200_000}\n", "x.csv:2: not a CSV table"),
        (
            'id,sequence\nb,ACD\na,"ACD\nc,ACD\n',
            "x.csv:3: not a CSV table (unexpected end of data); look for a quotation",
        ),
    ):
        (tmp_path / "x.csv").write_text(text)
        (failure,) = read_inputs([tmp_path / "x.csv"])[1]
        assert reason in failure.reason


def test_one_bad_line_of_a_table(tmp_path: Path) -> None:
    """Catches a line that costs the others, words of FASTA files in its message, and a cell that is read as a sequence because
    a name has a comma."""
    lines = ["a,ACD", "b,", ",ACD", "c", "my,d,ACD", "e,ACD,", 'f,"AC\nD"', "g,A1C"]
    (tmp_path / "x.csv").write_text("\n".join(["id,sequence", *lines]))
    records, failures = read_inputs([tmp_path / "x.csv"])
    assert [(record.query.name, record.query.letters) for record in records] == [(name, "ACD") for name in "aef"]
    for failure, reason in zip(
        failures,
        (
            "3: 'b' has no sequence; write it into the column 'sequence', or remove the line",
            "4: a line without a name; write one into the column 'id', or remove the line",
            "5: 'c' has no sequence",
            "6: 3 cells, but the first line has 2 columns",
            "10: illegal letter '1' at position 2 of sequence 'g'; a sequence has letters only",
        ),
        strict=True,
    ):
        assert f"x.csv:{reason}" in failure.reason
        assert failure.name


def test_separators_and_line_ends_of_a_table(tmp_path: Path) -> None:
    """Catches tables as spreadsheets write them: with semicolons or tabs, carriage returns, a byte-order mark and capitals."""
    for text in (
        "id;sequence;note\na;ACD;1,5\n",
        '"ID"\t"Sequence"\r\na\tACD\r\n',
        "\ufeffSequence;ID\r\nACD;a\r\n",
        "id;sequence\ra;ACD\r",
    ):
        (tmp_path / "x.csv").write_bytes(text.encode())
        (record,), failures = read_inputs([tmp_path / "x.csv"])
        assert not failures
        assert (record.query.name, record.query.letters) == ("a", "ACD")
    (tmp_path / "x.tsv").write_text("id\tsequence\na\tACD\n")
    assert [record.query.letters for record in read_inputs([tmp_path / "x.tsv"])[0]] == ["ACD"]


def test_colabfolds_alignments_of_complexes(tmp_path: Path) -> None:
    """Catches copies that are lost, columns of another chain, and first lines that do not fit the first row."""
    for first in ("#3,2\t2,1", "# 3,2\t2,1", "#3, 2\t2, 1", "#3 ,2 2,1 "):
        (tmp_path / "x.a3m").write_text(f"{first}\n>101\t102\nACDEF\n>h\nACDE-\n")
        ((record,), failures) = read_inputs([tmp_path / "x.a3m"])
        assert not failures
        assert _chains(record) == [("x_A", "ACD"), ("x_B", "ACD"), ("x_C", "EF")]
        assert record.query.letters == "ACDACDEF"
    for first, reason in (
        ("#3,3\t1,1", "x.a3m:1: its first line says 3 + 3 = 6 columns, but its first row has 5"),
        ("#3,2\t1", "x.a3m:1: its first line has 2 lengths, but 1 numbers of copies"),
        ("#3,2\t1,0", "x.a3m:1: its first line has a number of copies of 0"),
        ("#5,0\t1,1", "x.a3m:1: its first line has a length of 0"),
        (
            "#2,1,2\t1,1,1",
            "x.a3m:1: sequences 1 and 3 of the first row are equal; write one of them, and more copies of it",
        ),
    ):
        row = "ACDAC" if first.startswith("#2") else "ACDEF"
        (tmp_path / "x.a3m").write_text(f"{first}\n>101\t102\n{row}\n>h\nACDE-\n")
        (failure,) = read_inputs([tmp_path / "x.a3m"])[1]
        assert reason in failure.reason


def test_a_link_to_nothing_in_a_folder_is_named(tmp_path: Path) -> None:
    """Catches an input that is lost without a word, because its file has been moved."""
    (tmp_path / "good.fasta").write_text(f">good\n{OTHER}\n")
    (tmp_path / "moved.fasta").symlink_to("nowhere")
    records, (failure,) = read_inputs([tmp_path])
    assert [record.query.name for record in records] == ["good"]
    assert "moved.fasta" in failure.reason


def test_the_same_name_twice_names_both_places(workplace: Workplace) -> None:
    """Catches a record that overwrites the result of another one."""
    (other := workplace.root / "more.fasta").write_text(f">gamma\n{OTHER}\n>beta_A\n{OTHER}\n")
    records, (failure,) = read_inputs([workplace.config.sources[0], other])
    assert [record.query.name for record in records] == ["alpha_A", "beta_A", "gamma"]
    assert failure.reason.startswith(f"{other}:3: the name 'beta_A' is that of the record at {workplace.root}")
    assert "targets.fasta:3; rename" in failure.reason


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["empty"], "no file of this folder is FASTA or A3M .*sub-folders are not searched"),
        (["absent"], "absent: no such file or folder"),
        (["x.fasta", "."], r"x\.fasta is given twice"),
    ],
)
def test_an_input_that_cannot_be_meant_is_an_error(tmp_path: Path, given: list[str], words: str) -> None:
    """Catches a misspelt input that is left out, and standard input that is read when it is empty already."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.fasta").write_text(f">x\n{OTHER}\n")
    with pytest.raises(UserError, match=words):
        read_inputs([tmp_path / name for name in given])
    with pytest.raises(UserError, match=r"standard input \(-\) is given twice"):
        read_inputs([Path("-"), Path("-")])


def test_standard_input_reaches_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks, whose standard input is empty, that find nothing to predict."""
    standard_input(monkeypatch, f">piped\n{OTHER}\n")
    with as_files([Path("-")], ["predict", "-", "--seeds=2"]) as ((file,), words):
        assert words == ["predict", str(file), "--seeds=2"]
        assert names(file) == ["piped"]
    assert not file.exists()
    with pytest.raises(UserError, match="only if the command line says '-'"), as_files([Path("-")], ["predict"]):
        pass


def test_a_config_file_and_what_is_printed_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches options of a file that are lost, inputs in a file that an empty command line replaces, and a printed config that
    is another run."""
    seen: list[PredictConfig] = []
    monkeypatch.setattr(command, "run", lambda config, words: seen.append(config) or 0)
    file = tmp_path / "run.yaml"
    file.write_text(f"inputs: [a.fasta, b]\ncheckpoint: x.ckpt\noutput: {tmp_path / 'out'}\nseeds: 4\n")
    assert main(["predict", "--config", str(file), "--recycles", "5"]) == 0
    assert main(["predict", "--config", str(file), "--recycles", "5", "--print_config"]) == 0
    file.write_text(capsys.readouterr().out)
    assert main(["predict", "--config", str(file)]) == 0
    assert main(["predict", "--config", str(file), "c.fasta"]) == 0
    first, again, other = seen
    assert (list(first.inputs), first.seeds, first.recycles) == ([Path("a.fasta"), Path("b")], 4, 5)
    assert again == first
    assert list(other.inputs) == [Path("c.fasta")]
    file.write_text("sedes: 4\n")
    assert main(["predict", "--config", str(file)]) == 2
    assert f"{file}:1: unknown config key 'sedes'. Did you mean 'seeds'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a.fasta", "found 'a.fasta'; write inputs: [a.fasta]"),
        ("[7]", "found '[7]'"),
        ("{a: b}", "found '{a: b}'"),
    ],
)
def test_inputs_of_a_config_file_that_are_no_list(
    written: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches jsonargparse's own words ('str' object does not support item assignment), and its traceback for a mapping."""
    (file := tmp_path / "run.yaml").write_text(f"output: x\ncheckpoint: y\ninputs: {written}\n")
    assert main(["predict", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"evodsp: error: {file}:3: inputs: ")
    assert expected in error


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("sp|P61823|RNAS1_BOVIN Ribonuclease OS=Bos taurus", "P61823"),
        ("tr|A0A024R161|A0A024R161_HUMAN", "A0A024R161"),
        ("gi|15|ref|NP_1|", "gi_15_ref_NP_1"),
    ],
)
def test_headers_of_databases_become_clean_names(header: str, name: str, tmp_path: Path) -> None:
    """Catches a folder of results that a shell takes for three commands."""
    (tmp_path / "a.fasta").write_text(f">{header}\n{OTHER}\n")
    (tmp_path / "a.csv").write_text(f'id,sequence\n"{header.split()[0]}",{OTHER}\n')
    for file in ("a.fasta", "a.csv"):
        assert names(tmp_path / file) == [name]
    (tmp_path / "two.fasta").write_text(f">{header}\n{OTHER}:{QUERY}\n")
    ((record,), _) = read_inputs([tmp_path / "two.fasta"])
    assert [chain.name for chain in record.chains] == [f"{name}_A", f"{name}_B"]


def test_a_part_of_a_name_is_checked(tmp_path: Path) -> None:
    """Catches results that are written above the output folder."""
    (tmp_path / "a.fasta").write_text(f">sp|..|x\n{OTHER}\n>sp|P1|a\n{OTHER}\n>tr|P1|b\n{OTHER}\n")
    records, failures = read_inputs([tmp_path / "a.fasta"])
    assert [record.query.name for record in records] == ["P1"]
    assert ["begins with '.'" in failures[0].reason, "the name 'P1' is that of" in failures[1].reason] == [True, True]
    assert read_inputs([tmp_path / "a.fasta"], one_complex=True)[0] == []


def test_the_position_of_an_illegal_letter(tmp_path: Path) -> None:
    """Catches positions along a line in place of the sequence, blanks that are counted as residues, and residues behind a stop
    codon that are joined to those before it."""
    (tmp_path / "x.fasta").write_text(">a\nACD EFG\nAC-D\n>b\nGST*LLK\n")
    first, second = read_inputs([tmp_path / "x.fasta"])[1]
    assert "x.fasta:3: illegal letter '-' at position 9 of sequence 'a'" in first.reason
    assert "illegal letter '*'" in second.reason


def letters_of(workplace: Workplace, residues: str) -> str:
    """The sequence that is read from a record with these residues."""
    workplace.config.fasta.write_text(f">gamma\n{residues}\n")
    ((target,), failures) = find_targets([workplace.config.fasta], workplace.root)
    assert not failures
    has_note = any("letters that are no amino acid" in note for note in target.notes)
    assert has_note == bool(set("BJOUZ*") & set(residues)), "what was replaced is said, and nothing else"
    return target.query.letters


@pytest.mark.parametrize(
    ("residues", "letters"),
    [("gstLLK", "GSTLLK"), ("GST LL\tK\n\n  GG ", "GSTLLKGG"), ("GST\nLLK* ", "GSTLLK"), ("GBJOUZbjouzK", "GDXXCEDXXCEK")],
    ids=["case", "whitespace", "stop and blank", "ambiguous"],
)  # fmt: skip
def test_letters_as_people_write_them(workplace: Workplace, residues: str, letters: str) -> None:
    """Catches letters that are refused, or that are read otherwise than AlphaFold 2 reads them in an alignment."""
    assert letters_of(workplace, residues) == letters


def test_a_record_without_alignments_runs_alone_and_is_told(workplace: Workplace) -> None:
    """Catches a record that is refused for want of alignments, and a misspelt name that nobody hears of."""
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n>betaA\n{OTHER}\n")
    lines: list[str] = []
    found = predict_records(workplace.change(seeds=1), lines.append)
    assert [result.name for result in found.results] == ["alpha_A", "betaA"]
    assert not any("without alignments" in line for line in lines)  # which stands for the notes of many
    (note,) = [line for line in lines if "predicted from its sequence alone" in line]
    assert "no alignments for 'betaA'" in note
    assert note.endswith("Did you mean 'beta_A'?")
    (targets, _) = find_targets([workplace.config.fasta], workplace.config.alignments)
    assert [target.notes_of_many for target in targets] == [(), ("Did you mean 'beta_A'?",)]
    assert read_json(found.results[1].folder / "timings.json")["alignment_rows"] == 0


def test_a_file_that_is_no_alignment_is_named(workplace: Workplace) -> None:
    """Catches 'no alignments for alpha_A. Did you mean alpha_A?' where the file of this name is of another kind."""
    (workplace.root / "alpha_A.a3m.part").write_text(f">alpha_A\n{QUERY}\n")
    (target, _), _ = find_targets([workplace.config.fasta], workplace.root)
    assert target.notes[-1].endswith(" alpha_A.a3m.part there holds none: alignments are .a3m, .sto or .npz files")


def test_a_file_of_the_records_name_is_its_alignment(workplace: Workplace) -> None:
    """Catches flat alignment files that are ignored, or read otherwise than the same file in a folder; --alignments refused
    when it is the folder of the only query; and an alignment of another protein that is used because its name fits."""
    alignments, flat = workplace.config.alignments, workplace.root / "flat"
    in_folders, _ = find_targets([workplace.config.fasta], alignments)
    expected = [rows_of(target) for target in in_folders]
    flat.mkdir()
    for name in ("alpha_A", "beta_A"):
        shutil.copy(alignments / name / "uniref90_hits.a3m", flat / f"{name}.a3m")
    found, _ = find_targets([workplace.config.fasta], flat)
    assert [rows_of(target) for target in found] == expected
    assert not any(target.notes for target in found)
    (one := workplace.root / "one.fasta").write_text(f">single\n{QUERY}\n")
    (target,), _ = find_targets([one], alignments / "alpha_A")
    assert rows_of(target) == expected[0]
    one.write_text(f">beta_A\n{OTHER[:4]}W{OTHER[5:]}\n")
    (target,), _ = find_targets([one], flat)
    with pytest.raises(UserError, match=r"beta_A\.a3m.*(position|residue) 5"):
        target.read()


def test_the_folder_of_an_earlier_search_has_the_header_as_its_name(workplace: Workplace) -> None:
    """Catches alignments called sp|P61823|RNAS1_BOVIN that are not found for P61823, or taken without a word, and one
    of two such folders taken."""
    workplace.config.fasta.write_text(f">sp|P61823|RNAS1_BOVIN\n{QUERY}\n>beta_A\n{OTHER}\n")
    earlier = workplace.config.alignments / "sp|P61823|RNAS1_BOVIN"
    (workplace.config.alignments / "alpha_A").rename(earlier)
    (target, other), _ = find_targets([workplace.config.fasta], workplace.config.alignments)
    assert (target.query.name, target.alignments) == ("P61823", earlier)
    assert (target.notes, other.notes) == (("'P61823' has the alignments called sp|P61823|RNAS1_BOVIN",), ())
    assert len(target.read()[0]) > 1
    (workplace.config.alignments / "tr|P61823|X.a3m").write_text(f">q\n{QUERY}\n")
    _, (failure,) = find_targets([workplace.config.fasta], workplace.config.alignments)
    assert "sp|P61823|RNAS1_BOVIN and tr|P61823|X may both be those of 'P61823'" in failure.reason


def test_an_input_of_the_flat_folder_itself(workplace: Workplace) -> None:
    """Catches a note that the record's own alignment is not read, and files beside a folder that are left out."""
    flat = workplace.root / "flat"
    flat.mkdir()
    (flat / "alpha_A.a3m").write_text(f"#{len(QUERY)} 1\n>101\n{QUERY}\n")
    (target,), _ = find_targets([flat / "alpha_A.a3m"], flat)
    assert (target.alignments, target.notes) == (flat / "alpha_A.a3m", ())
    (flat / "alpha_A").mkdir()
    (flat / "alpha_A" / "other.a3m").write_text(f">q\n{QUERY}\n")
    (target, *_), _ = find_targets([workplace.config.fasta], flat)
    assert [path.name for path in target.files()] == ["alpha_A.a3m", "other.a3m"]

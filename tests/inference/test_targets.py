"""What a user gives as sequences and alignments, and what is made of it."""

from __future__ import annotations

import pytest

from evodsp.errors import UserError
from evodsp.inference.predict import predict, predict_records
from evodsp.inference.targets import find_targets
from tests.builders.prediction import read_json, silent

from .conftest import OTHER, QUERY, Finished, Workplace


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
    [
        ("gstLLK", "GSTLLK"),
        ("GST LL\tK\n\n  GG ", "GSTLLKGG"),
        ("GSTLLK*", "GSTLLK"),
        ("GST\nLLK* ", "GSTLLK"),
        ("GBJOUZbjouzK", "GDXXCEDXXCEK"),
    ],
    ids=["case", "whitespace", "stop", "stop and blank", "ambiguous"],
)
def test_letters_as_people_write_them(workplace: Workplace, residues: str, letters: str) -> None:
    """Catches letters that are refused, or that are read otherwise than AlphaFold 2 reads them in an alignment."""
    assert letters_of(workplace, residues) == letters


def test_a_stop_within_a_sequence_is_no_end(workplace: Workplace) -> None:
    """Catches residues behind a stop codon that are joined to those before it."""
    workplace.config.fasta.write_text(">gamma\nGST*LLK\n")
    (_, (failure,)) = find_targets([workplace.config.fasta], workplace.root)
    assert "illegal letter '*'" in failure.reason


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


def test_a_file_of_the_records_name_is_its_alignment(workplace: Workplace, predicted: Finished) -> None:
    """Catches flat alignment files that are ignored, or read with another result than the same file in a folder."""
    folders = tuple(result.structure(0).read_bytes() for result in predicted.results)
    flat = workplace.root / "flat"
    flat.mkdir()
    for name in ("alpha_A", "beta_A"):
        (workplace.config.alignments / name / "uniref90_hits.a3m").rename(flat / f"{name}.a3m")
    config = workplace.change(alignments=flat, seeds=1)
    lines: list[str] = []
    found = tuple(result.structure(0).read_bytes() for result in predict(config, lines.append))
    assert found == folders
    assert not any("sequence alone" in line for line in lines)


def test_a_flat_file_of_another_query_is_named(workplace: Workplace) -> None:
    """Catches an alignment of another protein that is used because its name fits."""
    (workplace.root / "gamma.a3m").write_text(f">gamma\n{OTHER}\n")
    workplace.config.fasta.write_text(f">gamma\n{OTHER[:4]}W{OTHER[5:]}\n")
    with pytest.raises(UserError, match=r"gamma\.a3m.*(position|residue) 5"):
        predict(workplace.change(alignments=workplace.root), silent)


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

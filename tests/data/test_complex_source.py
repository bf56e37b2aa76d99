"""Complexes read from files: the chains of an assembly, their alignments, and those that are paired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from evodsp.data.complexes.merging import merge
from evodsp.data.complexes.pairing import BY_ENTRY, BY_SPECIES, PairingRule, say_query_paired
from evodsp.data.sources.opening import ComplexFiles
from evodsp.errors import UserError
from evodsp.geometry.residues import decode
from tests.builders.alignments import archives, archives_in_folders, one_database
from tests.builders.complex_files import write_complex


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return write_complex(tmp_path)


def source(folders: tuple[Path, Path], rule: PairingRule = BY_SPECIES) -> ComplexFiles:
    return ComplexFiles(*folders, rule=rule)


@pytest.mark.parametrize(("rule", "changed"), [(BY_SPECIES, -1), (BY_ENTRY, 0)], ids=["species", "entry"])
def test_rows_are_paired_by_the_rule(folders: tuple[Path, Path], rule: PairingRule, changed: int) -> None:
    """Catches uniprot_hits that count as an alignment of the chain, and a rule that is not asked."""
    parsed = source(folders, rule).parsed("1abc")
    assert parsed.assembly.names == ("A", "B", "C")
    assert parsed.assembly.entities == (0, 0, 1)
    assert [len(chain.msa.msa) for chain in parsed.chains] == [3, 3, 3]
    merged = merge(parsed.chains)
    paired = merged.msa[merged.block == 0]
    assert len(paired) == 2
    first, second = (merged.ids.asym_id == number for number in (1, 3))
    for columns in (first, second):
        differs = np.flatnonzero(paired[0, columns] != paired[1, columns])
        assert differs.tolist() == [changed % columns.sum()]


@pytest.fixture
def nothing_said() -> None:
    """Warnings as in a new process."""
    say_query_paired.cache_clear()


def test_warnings_of_a_large_set_end(caplog: pytest.LogCaptureFixture, nothing_said: None) -> None:
    """Catches a log flooded by thousands of chains without rows for pairing, and one that ends without a word."""
    for number in [*range(30), 3]:
        say_query_paired(f"alignments/{number}", "names")
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said] == [f"alignments/{number}" for number in range(11)]
    assert ["doctor" in line for line in said] == [False] * 10 + [True]


def test_a_chain_without_rows_for_pairing_is_said(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, nothing_said: None
) -> None:
    """Catches a complex whose rows are not paired without a word, because a search was forgotten."""
    (folders[0] / "1abc_C" / "uniprot_hits.a3m").unlink()
    parsed = source(folders).parsed("1abc")
    assert parsed.chains[0].pairing is not None
    assert parsed.chains[2].pairing is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{folders[0] / '1abc_C'}: no rows to pair")


def test_rows_without_names_that_can_be_paired_are_said(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, nothing_said: None
) -> None:
    """Catches a complex whose rows are not paired without a word, because their names are not UniProt's."""
    hits = folders[0] / "1abc_C" / "uniprot_hits.a3m"
    hits.write_text(hits.read_text().replace("|", "."))
    assert source(folders).parsed("1abc").chains[2].pairing is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{folders[0] / '1abc_C'}: no rows to pair")
    assert "with names such as tr|" in said


@pytest.mark.parametrize("pack", [archives, archives_in_folders, one_database])
@pytest.mark.parametrize("rule", [BY_SPECIES, BY_ENTRY], ids=["species", "entry"])
def test_other_layouts_are_read_and_paired_as_files_are(
    folders: tuple[Path, Path],
    tmp_path: Path,
    rule: PairingRule,
    pack: Callable[[Path, dict[str, list[Path]]], None],
) -> None:
    """Catches uniprot_hits that are not found there, or are taken for the MSA, and rows that lose their names."""
    expected = source(folders, rule).parsed("1abc")
    pack(tmp_path / "packed", {folder.name: sorted(folder.iterdir()) for folder in folders[0].iterdir()})
    found = ComplexFiles(tmp_path / "packed", folders[1], rule=rule).parsed("1abc")
    for one, other in zip(found.chains, expected.chains, strict=True):
        assert one.pairing is not None
        assert other.pairing is not None
        assert one.pairing.keys == other.pairing.keys
        np.testing.assert_array_equal(one.pairing.msa, other.pairing.msa)
        np.testing.assert_array_equal(one.msa.msa, other.msa.msa)
    np.testing.assert_array_equal(merge(found.chains).msa, merge(expected.chains).msa)


def test_a_complex_keeps_uniref90(folders: tuple[Path, Path]) -> None:
    """Catches rows of bfd and mgnify that take the places of those of uniref90, of which 17 of 1,526 remained."""
    folder = folders[0] / "1abc_C"
    query = (folder / "family.a3m").read_text().splitlines()[1]
    (folder / "family.a3m").unlink()
    for letter, name, rows in (("W", "uniref90_hits", 1526), ("Y", "bfd_uniref_hits", 3000), ("H", "mgnify_hits", 501)):
        others = [f"{letter}{query[1:7]}{number:012b}{query[19:]}" for number in range(rows - 1)]
        lines = [query, *(other.translate({48: "G", 49: "P"}) for other in others)]
        (folder / f"{name}.a3m").write_text("".join(f">{k}\n{line}\n" for k, line in enumerate(lines)))
    merged = merge(source(folders).parsed("1abc").chains)
    first = merged.msa[merged.block == 2][:, merged.ids.entity_id == 2][:, 0]
    found = Counter(decode(first))
    assert found["W"] == 1525
    assert (found["Y"], found["H"]) == (2048 - 1525 - 2, 0)  # and two paired rows


def test_chains_lie_where_the_file_has_them(folders: tuple[Path, Path]) -> None:
    """Catches coordinates of the first chain in all chains with its sequence."""
    chains = source(folders).parsed("1abc").assembly.chains
    apart = chains[1].positions[chains[1].mask > 0] - chains[0].positions[chains[0].mask > 0]
    np.testing.assert_allclose(apart, np.broadcast_to([40.0, 0, 0], apart.shape), atol=1e-3)


def test_a_sequence_without_alignments_is_named(folders: tuple[Path, Path]) -> None:
    """Catches a copy that needs alignments of its own, and a message that does not say of which chain."""
    for file in (folders[0] / "1abc_A").iterdir():
        file.unlink()
    (folders[0] / "1abc_A").rename(folders[0] / "gone")
    with pytest.raises(UserError, match="no alignments of 1abc_A, 1abc_B"):
        source(folders).parsed("1abc")
    with pytest.raises(UserError, match="2abc"):
        source(folders).parsed("2abc")

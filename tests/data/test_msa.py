"""Merging of alignments against AF2's raw features, and edge cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evodsp.data.records import Alignment
from evodsp.data.sources.msa import MsaFeatures, first_occurrences, letter_profile, merge_alignments, query_only
from evodsp.errors import UserError
from tests.shared import load

# The golden alignments are strings; this is AF2's table for them, independent of evodsp's.
CODES = np.full(256, 20, np.int8)
for code, letters in enumerate(["A", "R", "N", "DB", "CU", "Q", "EZ", *"GHILKMFPSTWYV"]):
    CODES[[ord(letter) for letter in letters]] = code
CODES[ord("-")] = 21


def golden_alignment(path: Path) -> Alignment:
    arrays = load(path)
    letters = arrays["sequences"].view(np.uint8).reshape(len(arrays["sequences"]), -1)
    names = tuple(str(i) for i in range(len(letters)))
    return Alignment(path.name, names, CODES[letters], arrays["deletion_matrix"].astype(np.int32))


def alignment(rows: list[list[int]], deletions: list[list[int]] | None = None, source: str = "a.a3m") -> Alignment:
    residues = np.array(rows, np.int8)
    counts = np.zeros(residues.shape, np.int32) if deletions is None else np.array(deletions, np.int32)
    return Alignment(source, tuple(f"row{i}" for i in range(len(rows))), residues, counts)


def test_two_real_alignments_merge_as_in_af2(golden: Path) -> None:
    """Catches a wrong order of files, the wrong duplicate kept, or deletions of another row: 3,126 rows become 3,057."""
    parts = [golden_alignment(golden / f"featurization/msa_ex_{name}.npz") for name in ("bfd_a3m", "mgnify_sto")]
    raw = load(golden / "features_raw_full.npz")
    to_ours = load(golden / "residue_constants.npz")["map_hhblits_aatype_to_our_aatype"]

    merged = merge_alignments(parts)

    np.testing.assert_array_equal(merged.msa, to_ours[raw["msa"]])
    np.testing.assert_array_equal(merged.deletions, raw["deletion_matrix_int"])
    assert merged.num_alignments == raw["num_alignments"][0]
    assert merged.msa.dtype == np.int8
    assert merged.deletions.dtype == np.int32


def test_profile_is_af2s(golden: Path) -> None:
    transforms = load(golden / "featurization/msa_transforms.npz")
    profile = letter_profile(transforms["msa_corrected"].astype(np.int8))
    np.testing.assert_allclose(profile, transforms["hhblits_profile"], atol=1e-6)


def test_first_of_equal_rows_stays_with_its_deletions() -> None:
    """Catches a sort inside the deduplication that reorders rows or keeps the deletions of a later duplicate."""
    first = alignment([[9, 1, 2], [5, 5, 5], [0, 0, 0]], [[0, 0, 0], [7, 0, 0], [0, 0, 1]])
    second = alignment([[9, 1, 2], [1, 1, 1], [5, 5, 5]], [[8, 8, 8], [0, 2, 0], [3, 3, 3]])
    merged = merge_alignments([first, second])
    np.testing.assert_array_equal(merged.msa, [[9, 1, 2], [5, 5, 5], [0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(merged.deletions, [[0, 0, 0], [7, 0, 0], [0, 0, 1], [0, 2, 0]])


def test_the_profile_counts_a_sequence_once() -> None:
    """Catches a profile of all files' rows: a sequence that two databases hold would count twice."""
    first = alignment([[9, 1], [5, 21], [5, 21]])
    second = alignment([[9, 1], [5, 21], [3, 1]])
    profile = merge_alignments([first, second]).profile
    expected = np.zeros((2, 22), np.float32)
    expected[0, [9, 5, 3]] = 1 / 3
    expected[1, [1, 21]] = 2 / 3, 1 / 3
    np.testing.assert_array_equal(profile, expected)


def test_deduplication_agrees_with_a_dictionary() -> None:
    rows = np.random.default_rng(0).integers(0, 3, (500, 5)).astype(np.int8)
    seen: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        seen.setdefault(row.tobytes(), index)
    np.testing.assert_array_equal(first_occurrences(rows), list(seen.values()))
    # A view whose rows are not contiguous in memory must be compared by its values.
    np.testing.assert_array_equal(first_occurrences(np.asfortranarray(rows)), list(seen.values()))


def test_profile_rows_sum_to_one_and_count_gaps() -> None:
    profile = letter_profile(np.array([[0, 21], [0, 20], [3, 21], [0, 21]], np.int8))
    np.testing.assert_allclose(profile.sum(-1), 1)
    assert profile[0, 0] == 0.75
    assert profile[0, 3] == 0.25
    assert profile[1, 21] == 0.75
    assert profile[1, 20] == 0.25


def test_query_alone() -> None:
    merged = query_only(np.array([4, 20], np.int8))
    assert merged.msa.shape == (1, 2)
    assert not merged.deletions.any()
    assert merged.profile[0, 4] == 1
    assert merged.profile[1, 20] == 1


def test_alignments_of_different_lengths_are_named() -> None:
    with pytest.raises(UserError, match=r"long\.sto: 3 columns, but short\.a3m has 2"):
        merge_alignments([alignment([[1, 2]], source="short.a3m"), alignment([[1, 2, 3]], source="long.sto")])


def test_no_alignment_is_an_error_not_an_empty_msa() -> None:
    with pytest.raises(UserError, match="no alignment"):
        merge_alignments([])


def test_record_refuses_an_msa_without_rows() -> None:
    with pytest.raises(ValueError, match="msa"):
        MsaFeatures(np.zeros((0, 3), np.int8), np.zeros((0, 3), np.int32), np.zeros((3, 22), np.float32))

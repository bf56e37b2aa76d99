"""The comparison of a query with the rows and hits that were searched with it."""

from __future__ import annotations

import numpy as np
import pytest

from evodsp.data.records import ProteinSequence
from evodsp.data.sources.msa import check_alignments, check_query
from evodsp.errors import UserError
from evodsp.geometry.residues import encode
from tests.builders.alignments import make_alignment


def test_a_different_letter_is_named() -> None:
    """Catches a position counted from 0, the two letters exchanged, and only the last difference reported."""
    with pytest.raises(UserError, match=r"^here has 'D' at position 2, q has 'R' \(2 positions differ\); fix it$"):
        check_query("here", encode("ADNC"), "q", encode("ARND"), "fix it")


def test_positions_of_a_part() -> None:
    """Catches the index in the compared part reported as the position in the query."""
    with pytest.raises(UserError, match="has 'W' at position 31, q has 'Y'"):
        check_query("hit", encode("MW"), "q", encode("MY"), "fix it", np.array([3, 30]))


def test_a_gap_in_the_row_is_a_difference() -> None:
    with pytest.raises(UserError, match="has '-' at position 2, q has 'R'"):
        check_query("here", encode("A-"), "q", encode("AR"), "fix it")


def test_unknown_and_ambiguous_letters_match() -> None:
    """X matches any letter on either side; alignments write U as C, B as D and Z as E."""
    check_query("here", np.array([5, 20, 4, 3, 6], np.int8), "q", encode("XAUBZ"), "fix it")


def test_every_alignment_is_checked() -> None:
    """Catches a check of the first alignment only."""
    query = ProteinSequence("q", "ARND")
    good, bad = make_alignment("ARND"), make_alignment("ARNC", source="bad.a3m")
    check_alignments([good, good], query)
    with pytest.raises(
        UserError, match=r"^bad\.a3m: the first row 'row0' has 'C' at position 4, the query 'q' has 'D'"
    ):
        check_alignments([good, bad], query)
    with pytest.raises(UserError, match=r"bad\.a3m: .* the first row of hits\.a3m has 'D'"):
        check_alignments([good, bad])

"""The MSAs of chains become one as in AlphaFold-Multimer's code. `scripts/parity/pairing.py` compares with the code."""

from __future__ import annotations

import numpy as np
import pytest

from evodsp.data.complexes.merging import MergedMsa, merge
from evodsp.data.complexes.pairing import PairingMsa
from evodsp.data.records import ProteinSequence, chain_ids, entities_of
from evodsp.data.sources.msa import MsaFeatures, letter_profile
from evodsp.data.sources.parsed import ChainMsas
from evodsp.errors import UserError
from evodsp.geometry.residues import decode, encode


def chain(name: str, rows: list[str], pairing: list[str] | None = None) -> ChainMsas:
    """A chain with the MSA `rows`; `pairing` has rows such as 'ACD HUMAN'. The deletions are 1, 2, 3, …; of `pairing`, -1, …"""
    letters = np.stack([encode(row) for row in rows])
    deletions = np.arange(1, letters.size + 1, dtype=np.int32).reshape(letters.shape)
    features = MsaFeatures(letters, deletions, letter_profile(letters))
    if pairing is None:
        return ChainMsas(ProteinSequence(name, rows[0]), features)
    words = [[*row.split(), ""][:2] for row in pairing]
    paired = np.stack([encode(letters) for letters, _ in words])
    deletions = -np.arange(1, paired.size + 1, dtype=np.int32).reshape(paired.shape)
    return ChainMsas(
        ProteinSequence(name, rows[0]), features, PairingMsa(paired, deletions, tuple(w[1] for w in words))
    )


ACD = ["ACD", "AAA", "CCC", "DDD", "CCC"], ["ACD", "ACC HUMAN", "AAA RAT"]
EF = ["EF", "--", "FF", "FE"], ["EF", "EE HUMAN"]
CHAINS = [chain("a", *ACD), chain("b", *EF), chain("c", *ACD)]


def rows_of(merged: MergedMsa) -> list[str]:
    return [decode(row) for row in merged.msa]


def test_a_complex_of_two_equal_chains_and_another() -> None:
    """Catches chains that are not regrouped, paired rows that stay in a block, blocks that overlap, and wrong deletions."""
    merged = merge(CHAINS)
    assert rows_of(merged) == [
        "ACDACDEF",
        "ACCACCEE",
        "AAAAAA--",  # both copies of a chain have the species
        "CCCCCC--",
        "DDDDDD--",
        "CCCCCC--",
        "------FF",  # a row of gaps is paired, so it is none of the others
        "------FE",
    ]
    assert merged.deletions.tolist() == [
        [-1, -2, -3, -1, -2, -3, -1, -2],
        [-4, -5, -6, -4, -5, -6, -3, -4],
        [-7, -8, -9, -7, -8, -9, 0, 0],
        [7, 8, 9, 7, 8, 9, 0, 0],
        [10, 11, 12, 10, 11, 12, 0, 0],
        [13, 14, 15, 13, 14, 15, 0, 0],
        [0, 0, 0, 0, 0, 0, 5, 6],
        [0, 0, 0, 0, 0, 0, 7, 8],
    ]
    assert merged.block.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert merged.order() == (0, 2, 1)
    assert (merged.msa.dtype, merged.deletions.dtype) == (np.int8, np.int32)


def test_the_masks_of_a_complex() -> None:
    """Catches a loss on the gaps beside a block, none on gaps of a paired row, and a block's first row as a centre."""
    merged = merge(CHAINS)
    expected = np.ones((8, 8), bool)
    expected[3:6, 6:] = expected[6:, :6] = False
    assert np.array_equal(merged.bert_mask(), expected)


def test_the_numbers_of_residues() -> None:
    """Catches numbers from 0, chains numbered in the order of the file, and residues counted on over chains."""
    ids = merge(CHAINS).ids
    assert ids.asym_id.tolist() == [1, 1, 1, 2, 2, 2, 3, 3]
    assert ids.entity_id.tolist() == [1, 1, 1, 1, 1, 1, 2, 2]
    assert ids.sym_id.tolist() == [1, 1, 1, 2, 2, 2, 1, 1]
    assert ids.residue_index.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    letters = ["AC", "D", "AC", "EEE", "D"]
    entities = entities_of([ProteinSequence(str(k), letter) for k, letter in enumerate(letters)])
    assert [entity.members for entity in entities] == [(0, 2), (1, 4), (3,)]
    assert chain_ids(entities).sym_id.tolist() == [1, 1, 2, 2, 1, 2, 1, 1, 1]
    assert chain_ids(entities).asym_id.tolist() == [1, 1, 2, 2, 3, 4, 5, 5, 5]


def test_the_limits_of_rows() -> None:
    """Catches a limit that counts paired rows of gaps, and a row that comes back because its pair was cut off."""
    # Of the first chain three rows are paired and not gaps, of the second two.
    assert rows_of(merge(CHAINS, most_rows=4, most_paired=3))[3:] == ["CCCCCC--", "------FF", "------FE"]
    assert rows_of(merge(CHAINS, most_rows=3, most_paired=3))[3:] == ["------FF"]
    # The pair with AAA is cut off.
    assert rows_of(merge(CHAINS, most_rows=9, most_paired=2))[2:4] == ["CCCCCC--", "DDDDDD--"]
    assert rows_of(merge(CHAINS, most_rows=1, most_paired=1)) == ["ACDACDEF"]


def test_identical_chains_are_not_paired() -> None:
    """Catches pairs of a homomer with itself, which would leave rows out, and a limit of paired rows that cuts its MSA."""
    merged = merge([CHAINS[0], CHAINS[2]], most_rows=4, most_paired=1)
    assert rows_of(merged) == ["ACDACD", "AAAAAA", "CCCCCC", "DDDDDD"]
    assert merged.deletions[1].tolist() == [4, 5, 6, 4, 5, 6]
    assert merged.block.tolist() == [1] * 4
    assert merged.bert_mask().all()
    assert merged.ids.sym_id.tolist() == [1, 1, 1, 2, 2, 2]


def test_chains_without_rows_for_pairing_pair_their_queries() -> None:
    """Catches a complex whose first row is not all queries, because one chain had no hits."""
    merged = merge([chain("a", ACD[0]), chain("b", *EF)])
    assert rows_of(merged)[0] == "ACDEF"
    assert merged.deletions[0].tolist() == [1, 2, 3, -1, -2]
    assert rows_of(merged)[1:] == ["AAA--", "CCC--", "DDD--", "CCC--", "-----", "---FF", "---FE"]


def test_a_key_with_many_rows_is_left_out() -> None:
    """Catches a limit that does not reach the pairing."""
    many = chain("a", ["AA"], ["AA", "AC RAT", "CA RAT"])
    other = chain("b", ["CC"], ["CC", "CA RAT"])
    assert rows_of(merge([many, other], most_of_a_key=2)) == ["AACC", "ACCA"]
    assert rows_of(merge([many, other], most_of_a_key=1)) == ["AACC"]


def test_mistakes_are_named() -> None:
    """Catches chains that are merged with the MSA of another sequence, and names that stand for two chains."""
    with pytest.raises(UserError, match=r"chains 1 and 3 have the same name 'a'"):
        merge([CHAINS[0], CHAINS[1], chain("a", ["EF"])])
    with pytest.raises(UserError, match=r"a complex without chains"):
        merge([])
    sequence, good = ProteinSequence("a", "ACD"), CHAINS[0]
    assert good.pairing is not None
    with pytest.raises(UserError, match=r"chain 'a': the first row of its MSA has 2 residues, its sequence has 3"):
        ChainMsas(sequence, CHAINS[1].msa)
    with pytest.raises(
        UserError, match=r"chain 'a': the first row of its MSA for pairing has 2 residues, its sequence has 3"
    ):
        ChainMsas(sequence, good.msa, CHAINS[1].pairing)
    with pytest.raises(UserError, match=r"has 'D' at position 3, its sequence has 'E'"):
        ChainMsas(ProteinSequence("a", "ACE"), good.msa)
    for paired, rows in ((0, 5), (6, 5)):
        with pytest.raises(UserError, match=rf"{paired} paired rows of {rows} rows"):
            merge(CHAINS, most_rows=rows, most_paired=paired)

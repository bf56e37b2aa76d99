"""Rows of several chains are paired as AlphaFold-Multimer's code does. `scripts/parity/pairing.py` compares with the code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from evodsp.data.complexes.merging import MergedMsa, merge
from evodsp.data.complexes.pairing import PairingMsa, pair, uniprot_species
from evodsp.data.records import Alignment, ProteinSequence, chain_ids, entities_of
from evodsp.data.sources.msa import MsaFeatures, letter_profile
from evodsp.data.sources.parsed import ChainMsas
from evodsp.errors import UserError
from evodsp.geometry.residues import decode, encode


def msa_of(*rows: str) -> PairingMsa:
    """An MSA of rows such as 'ACD HUMAN'; a row without a second word has no key."""
    words = [[*row.split(), ""][:2] for row in rows]
    letters = np.stack([encode(letters) for letters, _ in words])
    return PairingMsa(letters, np.zeros(letters.shape, np.int32), tuple(key for _, key in words))


@pytest.mark.parametrize(
    ("name", "species"),
    [
        ("sp|P61823|RNAS1_BOVIN/1-150", "BOVIN"),
        ("tr|A0A146SKV9|A0A146SKV9_FUNHE", "FUNHE"),
        ("tr|A0A146SKV9|A0A146SKV9_FUNHE/5-20 Protein_X", "FUNHE"),
        (" sp|P0C2L1|A3X1_9CAUD", "9CAUD"),
        ("sp|P0C2L1_2|A3X1_E", "E"),
        ("tr|Q12345|Q12345_YEAST_17", "YEAST"),
        ("tr|A0A1|A0A1_HUMAN", ""),  # accessions have 6 to 10 letters
        ("tr|A0A146SKV9X|A0A1_HUMAN", ""),
        ("sp|P61823|RNAS1_BOVINE", ""),  # species have 1 to 5
        ("sp|P61823|RNAS1_", ""),
        ("sp|P61823|RNA_S1_BOVIN", ""),
        ("xx sp|P61823|RNAS1_BOVIN", ""),
        ("sp|P61823|RNAS1_BOVIN|x", ""),
        ("UniRef100_P61823", ""),
        ("ref|P61823|RNAS1_BOVIN", ""),
        ("/1-150", ""),
        ("", ""),
    ],
)
def test_the_species_of_a_name(name: str, species: str) -> None:
    """Catches a name that AlphaFold-Multimer recognises and we do not, or the other way round."""
    assert uniprot_species(name) == species


def test_the_most_similar_rows_of_a_species_are_paired() -> None:
    """Catches rows paired in the order of the file, more rows than the chain with the fewest has, and rows without key."""
    first = msa_of("AAAA", "AACC HUMAN", "AAAC HUMAN", "AAAA MOUSE", "AAAA", "ACCC HUMAN")
    second = msa_of("CCCC", "CCCC MOUSE", "CCCC", "ACCC HUMAN", "AACC HUMAN", "CCCC RAT")
    assert pair([first, second], [1, 1]).tolist() == [[0, 0], [3, 1], [1, 4], [2, 3]]


def test_a_species_with_many_rows_in_one_chain_is_left_out() -> None:
    """Catches a limit that is one off, and one that only some chains are held to."""
    first, second = msa_of("AA", *["AA HUMAN"] * 3, *["AA RAT"] * 4), msa_of("CC", "CC HUMAN", "CC RAT")
    for msas, columns in (([first, second], slice(None)), ([second, first], slice(None, None, -1))):
        assert pair(msas, [1, 1], most_of_a_key=4)[:, columns].tolist() == [[0, 0], [1, 1], [4, 2]]
        assert pair(msas, [1, 1], most_of_a_key=3)[:, columns].tolist() == [[0, 0], [1, 1]]
    many = msa_of("AA", *["AA HUMAN"] * 600, *["AA RAT"] * 601)
    assert pair([many, second], [1, 1]).tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("copies", [[1, 1], [1, 2], [1, 1, 1], [2, 1, 3], [12, 12]])
def test_pairs_are_those_of_plain_loops(copies: list[int]) -> None:
    """Catches ranks, starts or counts of the array code that are off by one; the products of 24 chains wrap."""
    rng = np.random.default_rng(len(copies))
    for _ in range(20):
        rows = [
            [
                f"{''.join(rng.choice(list('AC-'), 5))} {rng.choice([*'abcdefgh', ''], p=[0.1] * 8 + [0.2])}"
                for _ in range(rng.integers(1, 60))
            ]
            for _ in copies
        ]
        msas = [msa_of("AAAAA", *of_entity) for of_entity in rows]
        assert pair(msas, copies, most_of_a_key=8).tolist() == brute_force(msas, copies, most=8)


def brute_force(msas: Sequence[PairingMsa], copies: Sequence[int], most: int = 600) -> list[list[int]]:
    found = []
    for key in sorted({key for msa in msas for key in msa.keys} - {""}):
        of_entity = []
        for msa in msas:
            equal = {row: sum(msa.msa[row] == msa.msa[0]) for row, other in enumerate(msa.keys) if other == key}
            of_entity.append(sorted(equal, key=lambda row, equal=equal: (-equal[row], row)))  # type: ignore[misc]
        having = [count for rows, count in zip(of_entity, copies, strict=True) if rows]
        if sum(having) < 2 or max(map(len, of_entity)) > most:
            continue
        for rank in range(min(len(rows) for rows in of_entity if rows)):
            pairs = [rows[rank] if rows else -1 for rows in of_entity]
            product = math.prod(row**count for row, count in zip(pairs, copies, strict=True))
            wrapped = (product + 2**63) % 2**64 - 2**63
            found.append((-sum(having), abs(wrapped), pairs))
    return [[0] * len(msas), *(pairs for *_, pairs in sorted(found, key=lambda pair: pair[:2]))]


def test_the_rows_of_an_alignment() -> None:
    """Catches equal sequences that count twice, deletions or keys of other rows, and a limit after the equal ones are gone."""
    letters = np.stack([encode(row) for row in ("AC", "AA", "AC", "CC", "DD")])
    deletions = np.arange(10, dtype=np.int32).reshape(5, 2)
    alignment = Alignment("a.sto", ("query", "x/1", "y/2", "sp|P61823|RNAS1_BOVIN/1-2", "z/3"), letters, deletions)
    msa = PairingMsa.of(alignment, most_rows=4)
    assert msa.keys == ("", "", "BOVIN")
    assert np.array_equal(msa.msa, letters[[0, 1, 3]])
    assert np.array_equal(msa.deletions, deletions[[0, 1, 3]])
    assert PairingMsa.of(alignment, key=lambda name: name.partition("/")[2]).keys == ("", "1", "1-2", "3")


def test_broken_rows_are_refused() -> None:
    """Catches arrays that do not belong together, which would fail far from here, and an MSA without its query."""
    with pytest.raises(UserError, match=r"letters \(2, 3\), deletions \(2, 3\), 1 keys"):
        PairingMsa(np.zeros((2, 3), np.int8), np.zeros((2, 3), np.int32), ("",))
    with pytest.raises(UserError, match=r"letters \(0, 3\), deletions \(0, 3\), 0 keys"):
        PairingMsa(np.zeros((0, 3), np.int8), np.zeros((0, 3), np.int32), ())


# The MSAs of chains become one as in AlphaFold-Multimer's code. `scripts/parity/pairing.py` compares with the code.


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

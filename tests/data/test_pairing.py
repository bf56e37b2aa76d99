"""Rows of several chains are paired as AlphaFold-Multimer's code does. `scripts/parity/pairing.py` compares with the code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from evodsp.data.complexes.pairing import PairingMsa, pair, uniprot_species
from evodsp.data.records import Alignment
from evodsp.errors import UserError
from evodsp.geometry.residues import encode


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


def test_pairs_of_more_chains_come_first() -> None:
    """Catches an order by row numbers alone, a species of one chain that is paired, and a missing row of gaps."""
    first = msa_of("AAAA", "AAAA RAT", "AAAA HUMAN", "AAAA FLY")
    second = msa_of("CCCC", "CCCC RAT", "CCCC HUMAN")
    third = msa_of("DDDD", "DDDD WORM", "DDDD WORM", "DDDD HUMAN")
    assert pair([first, second, third], [1, 1, 1]).tolist() == [[0, 0, 0], [2, 2, 3], [1, 1, -1]]


def test_copies_of_an_entity_take_part_as_chains() -> None:
    """Catches chains counted as entities: a species that both copies of one sequence have is paired, with gaps beside them."""
    first = msa_of("AAAA", "AAAA RAT", "AAAA HUMAN")
    second = msa_of("CCCC", "CCCC HUMAN", "CCCC FLY")
    assert pair([first, second], [1, 1]).tolist() == [[0, 0], [2, 1]]
    assert pair([first, second], [2, 1]).tolist() == [[0, 0], [2, 1], [1, -1]]
    # Row numbers count once for each copy: 1 x 1 x 4 is before 2 x 2 x 3.
    first, second = msa_of("AA", "AA RAT", "AA FLY"), msa_of("CC", "CC", "CC", "CC FLY", "CC RAT")
    assert pair([first, second], [1, 1]).tolist() == [[0, 0], [1, 4], [2, 3]]
    first, second = (
        msa_of("AA", "AA", "AA RAT", "AA FLY"),
        msa_of("CC", "CC", "CC", "CC", "CC FLY", "CC", "CC", "CC RAT"),
    )
    assert pair([first, second], [1, 1]).tolist() == [[0, 0], [3, 4], [2, 7]]
    assert pair([first, second], [2, 1]).tolist() == [[0, 0], [2, 7], [3, 4]]


def test_a_species_with_many_rows_in_one_chain_is_left_out() -> None:
    """Catches a limit that is one off, and one that only some chains are held to."""
    first, second = msa_of("AA", *["AA HUMAN"] * 3, *["AA RAT"] * 4), msa_of("CC", "CC HUMAN", "CC RAT")
    for msas, columns in (([first, second], slice(None)), ([second, first], slice(None, None, -1))):
        assert pair(msas, [1, 1], most_of_a_key=4)[:, columns].tolist() == [[0, 0], [1, 1], [4, 2]]
        assert pair(msas, [1, 1], most_of_a_key=3)[:, columns].tolist() == [[0, 0], [1, 1]]
    many = msa_of("AA", *["AA HUMAN"] * 600, *["AA RAT"] * 601)
    assert pair([many, second], [1, 1]).tolist() == [[0, 0], [1, 1]]


def test_ties_stay_in_order() -> None:
    """Catches an unstable sort: the result would depend on the processor."""
    rows = [f"A{'CDE'[k % 3]} S{k % 7}" for k in range(200)]
    assert pair([msa_of("AA", *rows)] * 2, [1, 1]).tolist() == brute_force([msa_of("AA", *rows)] * 2, [1, 1])
    first, second = msa_of("AA", "AC HUMAN", "CA HUMAN", "AD HUMAN"), msa_of("CC", "CC HUMAN", "CC HUMAN")
    assert pair([first, second], [1, 1]).tolist() == [[0, 0], [1, 1], [2, 2]]
    # 1 x 4, 2 x 2 and 4 x 1, by name: a, b, c
    first, second = msa_of("AA", "AA c", "AA b", "AA", "AA a"), msa_of("CC", "CC a", "CC b", "CC", "CC c")
    assert pair([first, second], [1, 1]).tolist() == [[0, 0], [4, 1], [2, 2], [1, 4]]


def test_row_0_pairs_the_queries() -> None:
    """Catches a query with a species that is paired with another row only, or comes after that pair."""
    first, second = msa_of("AA HUMAN", "AC HUMAN"), msa_of("CC", "CC HUMAN", "CA HUMAN")
    assert pair([first, second], [1, 1]).tolist() == [[0, 0], [0, 1], [1, 2]]


def test_without_a_shared_species_only_the_queries_are_paired() -> None:
    """Catches a failure where no row has a key, and rows without key that are paired with one another."""
    assert pair([msa_of("AA", "AA FLY"), msa_of("CC", "CC RAT")], [1, 1]).tolist() == [[0, 0]]
    assert pair([msa_of("AA", "AA"), msa_of("CC")], [1, 1]).tolist() == [[0, 0]]


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

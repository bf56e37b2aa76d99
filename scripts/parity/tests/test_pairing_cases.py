"""The cases of `scripts/parity/pairing.py` hold what their names say. The comparison itself needs DeepMind's code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evodsp.data.complexes.merging import merge
from evodsp.data.complexes.pairing import pair
from scripts.parity import pairing
from scripts.parity.data import compare
from scripts.parity.pairing import Drawn

DRAWN = {case.name: pairing.draw(case, np.random.default_rng((0, k))) for k, case in enumerate(pairing.CASES)}


def species_of_pairs(drawn: Drawn) -> set[str]:
    """The species whose rows are paired."""
    merged = merge(drawn.chains)
    msas = [drawn.chains[entity.members[0]].to_pair() for entity in merged.entities]
    rows = pair(msas, [len(entity.members) for entity in merged.entities])
    return {msa.keys[row] for msa, of in zip(msas, rows.T, strict=True) for row in of if row >= 0} - {""}


def test_equal_sides_pass() -> None:
    """Catches a difference reported between equal sides, and a case that is not compared."""
    ours = {name: value for drawn in DRAWN.values() for name, value in pairing.results_of(drawn).items()}
    rows = compare(ours, dict(ours))
    assert all(row.passed and row.measured == 0 for row in rows)
    assert {row.quantity: row.note for row in rows}["msa"] == f"{len(pairing.CASES)} compared"


@pytest.mark.parametrize(
    "quantity",
    [
        "pairs", "msa", "deletion_matrix", "bert_mask", "cluster_bias_mask", "sym_id", "order", "template_aatype",
        "template_all_atom_mask", "template_all_atom_positions",
    ],
)  # fmt: skip
def test_a_planted_difference_is_found(quantity: str) -> None:
    """Catches a quantity that is not compared."""
    ours = pairing.results_of(DRAWN["A, B, B"])
    name = f"{quantity}|A, B, B"
    other = ours[name].astype(np.int64)
    other[(-1,) * other.ndim] += 1
    assert [row.quantity for row in compare({**ours, name: other}, ours) if not row.passed] == [quantity]


def test_cases_hold_what_they_are_named_for() -> None:
    """Catches a case that no longer reaches the rule it was made for, so that the rule is compared nowhere."""
    assert species_of_pairs(DRAWN["no shared species"]) == set()
    assert species_of_pairs(DRAWN["600 and 601 rows of a species"]) == {"HUMAN"}
    assert species_of_pairs(DRAWN["600 rows of a species"]) == {"FULL", "HUMAN"}
    assert "B1" in species_of_pairs(DRAWN["A, B, B"])  # of the copies of B alone
    assert DRAWN["queries with a species"].chains[0].to_pair().keys[0]
    assert DRAWN["chains without hits"].chains[0].pairing is None
    many = DRAWN["more pairs and rows than fit"]
    assert len(merge(many.chains, 2048).msa) > len(merge(many.chains, 64, 32).msa)
    assert (merge(many.chains, 64, 32).block == 0).sum() == 32
    assert merge(DRAWN["chains regrouped"].chains).order() == (0, 3, 1, 4, 2)
    wraps = DRAWN["products wrap"]
    rows = pair([wraps.chains[0].to_pair(), wraps.chains[1].to_pair()], [10, 10])
    assert max(abs(int(a)) ** 10 * abs(int(b)) ** 10 for a, b in rows) > 2**63


def test_files_have_more_rows_than_are_kept(tmp_path: Path) -> None:
    """Catches files whose order and numbers of rows decide nothing, so that a wrong order would compare equal."""
    pairing.write_files(tmp_path, np.random.default_rng(0))
    found = pairing.results_of_files(tmp_path)
    assert len(found["chain msa|files"]) == 10_000 + 699 + 500
    kept = [(found["bert_mask|files"] & (found["asym_id|files"] == chain)).any(1).sum() for chain in (1, 2)]
    assert kept == [2048, 60 + 699 + 299 + 500]

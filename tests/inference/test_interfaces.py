"""Scores of interfaces against loops over pairs of residues, and against numbers of other programs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from evodsp.inference.interfaces import Interface, interfaces_of, read_pair_scores
from evodsp.inference.pages.target_page import _interface_rows
from evodsp.inference.structure_files import spans_of

LENGTHS = (34, 21, 9)


@dataclasses.dataclass
class Prediction:
    """The arguments of `interfaces_of`."""

    pae: np.ndarray
    chains: np.ndarray
    beta: np.ndarray
    beta_mask: np.ndarray
    plddt: np.ndarray

    @staticmethod
    def draw(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Prediction:
        """Chains in one ball, as float32. Errors have two decimals, as in files, so that some are at a cutoff."""
        rng = np.random.default_rng(seed)
        chains = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        size = len(chains)
        pae = np.round(31 * rng.random((size, size)) ** 2, 2)
        pae[rng.random((size, size)) < 0.2] = 15
        pae[rng.random((size, size)) < 0.02] = 12
        beta = 12 * rng.normal(size=(size, 3))
        known = (rng.random(size) > 0.1).astype(np.float32)
        plddt = 60 + 40 * rng.random(size)
        return Prediction(pae.astype(np.float32), chains, beta.astype(np.float32), known, plddt.astype(np.float32))

    def interfaces(self, pae_cutoff: float = 15.0) -> tuple[Interface, ...]:
        return interfaces_of(self.pae, self.chains, self.beta, self.beta_mask, self.plddt, pae_cutoff)


def scale(residues: int) -> float:
    return max(1.0, 1.24 * (residues - 15) ** (1 / 3) - 1.8) if residues > 26 else 1.0


def loops(given: Prediction, chain: int, partner: int, pae_cutoff: float) -> Interface:
    """The scores of one interface, pair by pair, in Python's numbers."""
    own = [i for i, number in enumerate(given.chains) if number == chain]
    others = [j for j, number in enumerate(given.chains) if number == partner]
    pae = given.pae.astype(float).tolist()
    close = [[j for j in others if pae[i][j] < pae_cutoff] for i in own]
    placed = sum(map(bool, close)) + len({j for row in close for j in row})

    def best(d0_of: int | None) -> float:
        scores = [0.0]
        for i, row in zip(own, close, strict=True):
            d0 = scale(len(row) if d0_of is None else d0_of)
            if row:
                scores.append(sum(1 / (1 + (pae[i][j] / d0) ** 2) for j in row) / len(row))
        return max(scores)

    known = given.beta_mask > 0
    beta = given.beta.astype(float).tolist()
    contacts = [(i, j) for i in own for j in others if known[i] and known[j] and math.dist(beta[i], beta[j]) <= 8]
    pdockq = pdockq2 = 0.0
    if contacts:
        touching = {i for i, _ in contacts} | {j for _, j in contacts}
        plddt = sum(float(given.plddt[i]) for i in touching) / len(touching)
        mean = sum(1 / (1 + (pae[i][j] / 10) ** 2) for i, j in contacts) / len(contacts)
        pdockq = 0.724 / (1 + math.exp(-0.052 * (plddt * math.log10(len(contacts)) - 152.611))) + 0.018
        pdockq2 = 1.31 / (1 + math.exp(-0.075 * (plddt * mean - 84.733))) + 0.005
    low = [(12 - pae[i][j]) / 12 for i in own for j in others if pae[i][j] < 12]
    return Interface(
        chain,
        partner,
        len(contacts),
        ipsae=best(None),
        ipsae_d0chn=best(len(own) + len(others)),
        ipsae_d0dom=best(placed),
        pdockq=pdockq,
        pdockq2=pdockq2,
        lis=sum(low) / len(low) if low else 0.0,
    )


def close(found: Interface, expected: Interface) -> None:
    values = dataclasses.asdict(expected)
    assert dataclasses.asdict(found) == {name: pytest.approx(value, rel=1e-12) for name, value in values.items()}


@pytest.mark.parametrize("pae_cutoff", [15.0, 10.0, 3.0])
def test_interfaces_are_those_of_loops(pae_cutoff: float) -> None:
    """Catches errors read in the other direction, a d0 of the wrong residues, a pair at a cutoff that counts or does not,
    residues in several contacts that count several times, and unknown positions in contact."""
    given = Prediction.draw()
    found = given.interfaces(pae_cutoff)
    pairs = [(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)]
    assert [(x.chain, x.partner) for x in found] == pairs
    for interface, pair in zip(found, pairs, strict=True):
        assert interface.contacts > 3
        close(interface, loops(given, *pair, pae_cutoff))


def test_d0_has_a_least_value() -> None:
    """Catches NaN below 15 residues, d0 below 1 Å, and the 1.04 Å that earlier versions of ipSAE's program had there."""
    for residues in (1, 14, 15, 26, 27, 40):
        given = Prediction.draw(lengths=(2, residues))
        given.pae[:] = 2.0
        d0 = max(1.0, 1.24 * (max(residues, 26) - 15) ** (1 / 3) - 1.8)
        assert given.interfaces()[0].ipsae == pytest.approx(1 / (1 + (2 / d0) ** 2), rel=1e-12)
        assert given.interfaces()[1].ipsae == pytest.approx(1 / 5, rel=1e-12)


def test_pairs_at_eight_angstrom_are_in_contact() -> None:
    """Catches `<` for `<=` and a distance of CB atoms that leaves out an axis."""
    given = Prediction.draw(lengths=(1, 3))
    given.beta[:] = [[0, 0, 0], [0, 0, 8], [0, 8.01, 0], [8.01, 0, 0]]
    given.beta_mask[:] = 1
    assert given.interfaces()[0].contacts == 1


def test_chains_that_do_not_touch() -> None:
    """Catches NaN, and the logarithm of 0, where no pair of residues counts."""
    given = Prediction.draw(lengths=(5, 6))
    given.beta[5:] += 1000
    given.pae[:] = 31
    nothing = {"contacts": 0, "ipsae": 0, "ipsae_d0chn": 0, "ipsae_d0dom": 0, "pdockq": 0, "pdockq2": 0, "lis": 0}
    for interface in given.interfaces():
        assert {name: getattr(interface, name) for name in nothing} == nothing


def test_one_chain_and_padding_have_no_interfaces() -> None:
    """Catches padding, whose number is 0, as a chain of its own."""
    given = Prediction.draw()
    before = given.interfaces()
    given.chains[given.chains == 3] = 0
    assert given.interfaces() == (before[0], before[2])
    given.chains[given.chains == 2] = 0
    assert given.interfaces() == ()


def test_the_higher_direction_of_a_pair_is_shown(tmp_path: Path) -> None:
    """Catches ipSAE or pDockQ2 of the lower direction, or of the first or the second one, on the page of a complex, and clashes
    beside the scores of another pair."""
    pairs = {"A-B": (0.25, 0.75), "A-C": (0.625, 0.125), "B-C": (0.5, 0.375)}
    there = {pair: values[0] for pair, values in pairs.items()}
    back = {pair[::-1]: values[1] for pair, values in pairs.items()}
    content = {"pairwise_iptm": there, "ipsae": there | back, "pdockq": there, "pdockq2": there | back}
    (tmp_path / "x.json").write_text(json.dumps({**content, "contacts": dict.fromkeys(pairs, 3)}))
    scores = read_pair_scores(tmp_path / "x.json", "ABC")
    found = {one.chains: (one.ipsae, one.pdockq2) for one in scores}
    assert found == {"A-B": (0.75, 0.75), "A-C": (0.625, 0.625), "B-C": (0.5, 0.5)}
    rows = _interface_rows(scores, {(0, 2): 1234}, spans_of((5, 4, 3)))
    assert {row[0]: row[-1] for row in rows} == {"A-B": "0", "A-C": "1,234", "B-C": "0"}

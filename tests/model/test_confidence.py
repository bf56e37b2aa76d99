"""pLDDT, predicted aligned error and predicted TM-scores, against AlphaFold2's numbers and independent formulas."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.model.heads import (
    ComplexConfidence,
    compute_complex_confidence,
    compute_contact_weights,
    compute_contacts,
    compute_pae,
    compute_plddt,
    compute_ptm,
    highest_pae,
)
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group
from tests.ranks import RankPool
from tests.shared import load

LENGTHS = (13, 24, 4)
PADDING = 3


def test_plddt_is_alphafolds(golden: Path) -> None:
    """Catches bin edges used as centres, which would shift every score by 1."""
    reference = load(golden / "losses_functions.npz")
    plddt = compute_plddt(torch.from_numpy(reference["in/logits_predicted_lddt"]))
    expected = torch.from_numpy(reference["confidence/plddt"])
    torch.testing.assert_close(plddt.double(), expected, rtol=1e-5, atol=0)


def test_pae_and_ptm_are_alphafolds(golden: Path) -> None:
    """Catches bin edges used as centres, a wrong width of the last bin, and a wrong scale of the TM-score."""
    reference = load(golden / "losses_functions.npz")
    logits = torch.from_numpy(reference["in/logits_predicted_aligned_error"])[None]
    expected = torch.from_numpy(reference["confidence/predicted_aligned_error"])
    torch.testing.assert_close(compute_pae(logits)[0], expected, rtol=1e-5, atol=0)
    assert highest_pae(64) == float(reference["confidence/max_predicted_aligned_error"])
    ptm = compute_ptm(logits, torch.ones(1, logits.shape[1]))
    assert ptm.item() == pytest.approx(float(reference["confidence/ptm"]), rel=1e-5)


def test_padding_does_not_change_ptm(golden: Path) -> None:
    """Catches padded residues that count in the length or in the mean, or that are chosen as the best frame."""
    logits = torch.from_numpy(load(golden / "losses_functions.npz")["in/logits_predicted_aligned_error"])[None]
    padded = torch.zeros_like(logits)
    padded[..., 0] = 50  # errors of 0 with certainty: a padded frame would be the best
    padded[:, :64, :64] = logits[:, :64, :64]
    mask = (torch.arange(72) < 64).float()[None]
    expected = compute_ptm(logits[:, :64, :64], torch.ones(1, 64))
    torch.testing.assert_close(compute_ptm(padded, mask), expected)


@pytest.mark.parametrize("residues", [5, 17, 22])
def test_ptm_of_a_short_chain(residues: int) -> None:
    """Catches a wrong d0 of short chains: NaN below 15 residues, negative up to 17, or a minimum length other than 19."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(residues + 2, residues + 2, 64)).astype(np.float32)
    logits[..., :3] += 3  # errors below 1.5 Å, where the score depends on d0 most
    mask = np.arange(residues + 2) < residues
    d0 = 1.24 * (max(residues, 19) - 15) ** (1 / 3) - 1.8
    best = 0.0
    for frame in range(residues):
        scores = []
        for atom in range(residues):
            weights = np.exp(logits[frame, atom].astype(np.float64))
            errors = [(k + 0.5) * 0.5 for k in range(64)]
            scores.append(sum(w / (1 + (e / d0) ** 2) for w, e in zip(weights, errors, strict=True)) / weights.sum())
        best = max(best, float(np.mean(scores)))
    ptm = compute_ptm(torch.from_numpy(logits)[None], torch.from_numpy(mask)[None].float())
    assert ptm.item() == pytest.approx(best, rel=1e-5)


@dataclasses.dataclass
class Complex:
    """What the confidence of a complex is computed from: the arguments of `compute_complex_confidence`."""

    logits: Tensor
    contacts: Tensor
    mask: Tensor
    chains: Tensor

    @staticmethod
    def draw(lengths: tuple[int, ...] = LENGTHS, padding: int = PADDING, seed: int = 0) -> Complex:
        """Two samples in float64. Padded residues have errors of 0 with certainty and are in contact with all others."""
        rng = np.random.default_rng(seed)
        residues = sum(lengths)
        size = residues + padding
        logits, contacts = np.zeros((2, size, size, 64)), np.ones((2, size, size))
        logits[..., 0] = 50
        logits[:, :residues, :residues] = 2 * rng.normal(size=(2, residues, residues, 64))
        logits[:, :residues, :residues, :12] += rng.normal(size=(2, residues, residues, 1)) + 1
        contacts[:, :residues, :residues] = rng.random((2, residues, residues)) ** 6
        chains = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding])
        return Complex(
            *map(torch.from_numpy, (logits, contacts, 1.0 * np.stack([chains > 0] * 2), np.stack([chains] * 2)))
        )

    def confidence(self, exchange: Exchange = LocalExchange(), number: int = len(LENGTHS)) -> ComplexConfidence:
        rows = exchange.owned(self.mask.shape[-1])
        of_rows = self.logits[:, rows], self.contacts[:, rows]
        return compute_complex_confidence(*of_rows, self.mask, self.chains, number, exchange=exchange)


def best(
    logits: np.ndarray, frames: list[int], residues: list[int], d0_of: int, pair: np.ndarray, chains: np.ndarray | None
) -> float:
    """The highest weighted mean of expected TM-score terms over `frames`, one pair of residues after another.

    `pair`: weights. `chains`: only pairs of residues of different chains count; None: all do.
    """
    d0 = 1.24 * (max(d0_of, 19) - 15) ** (1 / 3) - 1.8
    terms = 1 / (1 + ((np.arange(64) + 0.5) * 0.5 / d0) ** 2)
    found = [0.0]
    for frame in frames:
        total, weight = 0.0, 1e-8
        for residue in residues:
            if chains is None or chains[frame] != chains[residue]:
                odds = np.exp(logits[frame, residue])
                total += pair[frame, residue] * (odds @ terms) / odds.sum()
                weight += pair[frame, residue]
        found.append(total / weight)
    return max(found)


def test_the_confidence_of_a_complex_is_that_of_loops() -> None:
    """Catches pairs within a chain in ipTM, a d0 of the wrong residues, rows that are normalised by all residues, a pair's
    score of one direction, and padding that counts."""
    subject = Complex.draw()
    found = subject.confidence()
    for sample in range(2):
        logits, contacts, chains = (x[sample].numpy() for x in (subject.logits, subject.contacts, subject.chains))
        ones, every = np.ones_like(contacts), np.flatnonzero(chains).tolist()
        of = [np.flatnonzero(chains == number).tolist() for number in (1, 2, 3)]
        size = len(every)
        expected = {
            "ptm": best(logits, every, every, size, ones, None),
            "iptm": best(logits, every, every, size, ones, chains),
            "actifptm": best(logits, every, every, size, contacts, chains),
            "chain_ptm": [best(logits, own, own, len(own), ones, None) for own in of],
        }
        for name, weight in (("pair_iptm", ones), ("pair_actifptm", contacts)):
            pairs = np.zeros((3, 3))
            for a, b in itertools.combinations(range(3), 2):
                both = of[a] + of[b]
                pairs[a, b] = pairs[b, a] = best(logits, both, both, size, weight, chains)
            expected[name] = pairs
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(found, name)[sample].numpy(), value, rtol=1e-12, err_msg=name)
        ranking = 0.8 * expected["iptm"] + 0.2 * expected["ptm"]
        assert found.ranking_confidence[sample].item() == pytest.approx(ranking, rel=1e-12)


def values(confidence: ComplexConfidence) -> dict[str, Tensor]:
    return {field.name: getattr(confidence, field.name) for field in dataclasses.fields(confidence)}


def confidence_on_rank(group: Group, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    return values(Complex.draw(lengths).confidence(ShardedExchange(Group(group)), len(lengths)))


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_confidence_of_a_complex_over_ranks(pool: RankPool, ranks: int) -> None:
    """Catches a best frame of one rank's rows, and chains of columns taken for those of a rank's rows."""
    lengths = (12, 24, 4, 20)  # ranks begin within chains
    one = values(Complex.draw(lengths).confidence(number=len(lengths)))
    for found in pool.run(ranks, confidence_on_rank, lengths):
        for name, value in found.items():
            torch.testing.assert_close(value, one[name], rtol=1e-14, atol=0, msg=name)


def test_one_chain_has_no_interfaces() -> None:
    """Catches 0 / 0 without pairs of chains, and a pTM of complexes that is not that of chains."""
    subject = Complex.draw(lengths=(30,))
    found = subject.confidence(number=1)
    ptm = compute_ptm(subject.logits, subject.mask)
    for name, value in values(found).items():
        assert torch.equal(value.flatten(), ptm if name in ("ptm", "chain_ptm") else torch.zeros_like(ptm)), name
    assert torch.equal(found.ranking_confidence, 0.2 * ptm)


def test_chains_without_contacts() -> None:
    """Catches 0 / 0 where no contact is expected, and a chain that is not there."""
    subject = Complex.draw()
    subject.contacts.zero_()
    found = subject.confidence(number=4)
    assert not found.actifptm.any()
    assert not found.pair_actifptm.any()
    assert (found.iptm > 0).all()
    assert (found.chain_ptm[:, :3] > 0).all()
    assert not torch.cat([found.chain_ptm[:, 3:], found.pair_iptm[:, 3]], -1).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_confidence_of_a_complex_in_lower_precision(dtype: torch.dtype) -> None:
    """Catches sums in half precision: only the logits may be rounded."""
    subject = Complex.draw()
    subject.logits = subject.logits.to(dtype)
    exact = dataclasses.replace(subject, logits=subject.logits.double()).confidence()
    for name, value in values(subject.confidence()).items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), getattr(exact, name), rtol=2e-6, atol=0, msg=name)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is created; views do not count."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.elements = max(self.elements, result.numel())
        return result


def test_the_probabilities_of_all_pairs_are_never_in_memory() -> None:
    """Catches probabilities or scores of all pairs and bins, which are as large as the logits."""
    subject = Complex.draw(lengths=(40, 60), padding=0)
    with Largest() as largest:
        subject.confidence(number=2)
    assert largest.elements == 2 * 64 * 100 * 64  # 64 rows of two samples


def test_weights_of_contacts_count_the_bin_of_eight() -> None:
    """Catches actifpTM with other weights than ColabFold's: the bin from 7.94 to 8.25 Å counts, those beyond do not."""
    logits = torch.full((1, 1, 3, 64), -1e4)
    for column, bin_ in enumerate((18, 19, 20)):  # up to 7.94, 8.25 and 8.56 Å
        logits[..., column, bin_] = 0
    assert compute_contacts(logits, 2.3125, 21.6875).flatten().tolist() == [1, 0, 0]
    assert compute_contact_weights(logits, 2.3125, 21.6875).flatten().tolist() == [1, 1, 0]
    # With an edge at 8 Å, no bin holds it, and the next one does not count.
    assert compute_contact_weights(logits, -9.0, 53.0).flatten().tolist() == [0, 0, 0]
    assert compute_contact_weights(logits, -10.0, 52.0).flatten().tolist() == [1, 0, 0]

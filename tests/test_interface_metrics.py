"""Scores of interfaces beside their definitions, written out as loops."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from Bio.SVDSuperimposer import SVDSuperimposer

from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import ATOM_ORDER
from evodsp.metrics import ChainAtoms, TrueInterface, interface_lddt_ca

BACKBONE = ("N", "CA", "C", "O")


def random_chain(length: int, seed: int, shift: float = 0.0) -> ChainAtoms:
    """A walk of residues with a third of the atoms of atom37; the third residue has none."""
    random = torch.Generator().manual_seed(seed)
    trace = (2 * torch.randn(length, 1, 3, generator=random)).cumsum(0) + shift
    positions = (trace + 1.5 * torch.randn(length, 37, 3, generator=random)).double()
    mask = torch.rand(length, 37, generator=random) < 0.3
    mask[:, ATOM_ORDER["CA"]] = True
    mask[2] = False
    return ChainAtoms(positions, mask)


def perturbed(chain: ChainAtoms, seed: int, scale: float = 1.0) -> ChainAtoms:
    """The chain with other positions, and without the atoms of some residues."""
    random = torch.Generator().manual_seed(seed)
    moved = chain.positions + scale * torch.randn(chain.positions.shape, generator=random)
    mask = chain.mask & (torch.rand(len(chain.mask), 1, generator=random) < 0.8)
    return ChainAtoms(moved, mask)


def nearest(first: ChainAtoms, second: ChainAtoms, i: int, j: int) -> float:
    """The smallest distance between atoms of two residues."""
    atoms = [chain.positions[k][chain.mask[k]].numpy() for chain, k in ((first, i), (second, j))]
    return min((float(np.linalg.norm(one - other)) for one in atoms[0] for other in atoms[1]), default=math.inf)


def backbone(true: ChainAtoms, predicted: ChainAtoms, residues: list[int]) -> tuple[list, list]:
    """The backbone atoms of these residues that both have: predicted and true."""
    atoms = [(i, ATOM_ORDER[name]) for i in residues for name in BACKBONE]
    both = [(i, a) for i, a in atoms if true.mask[i, a] and predicted.mask[i, a]]
    return [predicted.positions[i, a].tolist() for i, a in both], [true.positions[i, a].tolist() for i, a in both]


def superposed(predicted: list, true: list) -> SVDSuperimposer:
    found = SVDSuperimposer()
    found.set(np.array(true), np.array(predicted))
    found.run()
    return found


def written_out(first, second, predicted_first, predicted_second) -> tuple[int, int, float, float]:
    """Contacts, recovered ones, and both RMSDs in Å."""
    pairs = [(i, j) for i in range(len(first.mask)) for j in range(len(second.mask))]
    contacts = [pair for pair in pairs if nearest(first, second, *pair) < 5]
    recovered = sum(nearest(predicted_first, predicted_second, *pair) < 5 for pair in contacts)
    there = [(i, j) for i, j in pairs if predicted_first.mask[i].any() and predicted_second.mask[j].any()]
    near = [pair for pair in there if nearest(first, second, *pair) < 10]
    one = backbone(first, predicted_first, sorted({i for i, _ in near}))
    other = backbone(second, predicted_second, sorted({j for _, j in near}))
    interface = superposed(one[0] + other[0], one[1] + other[1]).get_rms()
    chains = [(first, predicted_first), (second, predicted_second)]
    lengths = [int(true.mask.any(1).sum()) for true, _ in chains]
    receptor, ligand = chains if lengths[0] > lengths[1] else chains[::-1]
    rotation, shift = superposed(*backbone(*receptor, list(range(len(receptor[0].mask))))).get_rotran()
    predicted, true = map(np.array, backbone(*ligand, list(range(len(ligand[0].mask)))))
    return len(contacts), recovered, interface, np.sqrt(((predicted @ rotation + shift - true) ** 2).sum(-1).mean())


@pytest.mark.parametrize("lengths", [(9, 7), (7, 9), (8, 8)])
def test_an_interface_scores_what_the_definition_says(lengths: tuple[int, int]) -> None:
    """Catches contacts of atoms that are not there, RMSDs over other atoms, and the wrong chain as the receptor."""
    first, second = (random_chain(length, seed, seed) for seed, length in enumerate(lengths))
    one, other = perturbed(first, 3), perturbed(second, 4)
    interface = TrueInterface.between(first, second)
    assert interface is not None
    found = interface.score(one, other)
    contacts, recovered, interface_rmsd, ligand_rmsd = written_out(first, second, one, other)
    assert 0 < recovered < contacts
    assert (found.contacts, found.recovered) == (contacts, recovered)
    assert found.interface_rmsd == pytest.approx(interface_rmsd, abs=1e-6)
    assert found.ligand_rmsd == pytest.approx(ligand_rmsd, abs=1e-6)
    terms = recovered / contacts, 1 / (1 + (interface_rmsd / 1.5) ** 2), 1 / (1 + (ligand_rmsd / 8.5) ** 2)
    assert found.dockq == pytest.approx(sum(terms) / 3, abs=1e-6)


def test_distances_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches contacts that are lost between pieces of a long chain."""
    first, second = random_chain(30, 0), random_chain(30, 1, 2)
    whole = TrueInterface.between(first, second)
    monkeypatch.setattr("evodsp.metrics._PAIRS_AT_ONCE", 1000)
    pieces = TrueInterface.between(first, second)
    assert whole is not None
    assert pieces is not None
    assert torch.equal(whole.near, pieces.near)
    assert torch.equal(whole.contacts, pieces.contacts)


def test_a_perfect_interface_and_one_that_is_missing() -> None:
    """Catches a score that depends on where the prediction lies, one of a chain that is not there, and contacts of chains that
    do not touch."""
    first, second = random_chain(9, 0), random_chain(7, 1, 1)
    interface = TrueInterface.between(first, second)
    assert interface is not None
    motion = Rigid.from_quaternion(torch.tensor([0.5, 0.5, -0.5, 0.5]).double(), torch.tensor([9.0, 1.0, 2.0]).double())
    moved = [ChainAtoms(motion.apply(chain.positions), chain.mask) for chain in (first, second)]
    assert interface.score(*moved).dockq == pytest.approx(1.0)
    away = replace(second, positions=second.positions + 200)
    assert interface.score(first, away).dockq < 0.01
    gone = replace(second, mask=torch.zeros_like(second.mask))
    lost = interface.score(first, gone)
    assert (lost.contacts, lost.recovered, lost.dockq) == (len(interface.contacts), 0, 0.0)
    assert TrueInterface.between(first, away) is None


def test_residues_near_one_that_is_not_predicted_are_not_of_the_interface() -> None:
    """Catches an RMSD over residues that are near nothing of the prediction, which the program leaves out."""

    def on_a_line(*places: float) -> ChainAtoms:
        positions = torch.randn(len(places), 37, 3, generator=torch.Generator().manual_seed(0)).double()
        positions[..., 0] += torch.tensor(places)[:, None]
        mask = torch.zeros(len(places), 37, dtype=torch.bool)
        mask[:, [ATOM_ORDER[name] for name in BACKBONE]] = True
        return ChainAtoms(positions, mask)

    first, second = on_a_line(0, 40), on_a_line(4, 48)
    interface = TrueInterface.between(first, second)
    assert interface is not None
    assert interface.near.tolist() == [[True, False], [False, True]]
    wrong = replace(first, positions=on_a_line(0, 60).positions)
    assert interface.score(wrong, second).interface_rmsd > 1
    lacking = replace(second, mask=second.mask & torch.tensor([[True], [False]]))
    assert interface.score(wrong, lacking).interface_rmsd == pytest.approx(0, abs=1e-6)


def test_interface_lddt_counts_distances_between_chains_alone() -> None:
    """Catches distances within a chain, residues without a CA, another cutoff, and a score where nothing counts."""
    random = torch.Generator().manual_seed(0)
    true = 8 * torch.randn(30, 3, generator=random).double()
    predicted = true + torch.randn(30, 3, generator=random)
    mask = (torch.rand(30, generator=random) < 0.8).double()
    chain = torch.tensor([1] * 12 + [2] * 10 + [3] * 8)
    kept = counted = 0.0
    for i in range(30):
        for j in range(30):
            distance = math.dist(true[i].tolist(), true[j].tolist())
            if chain[i] != chain[j] and mask[i] * mask[j] > 0 and distance < 15:
                error = abs(distance - math.dist(predicted[i].tolist(), predicted[j].tolist()))
                counted += 1
                kept += sum(error < threshold for threshold in (0.5, 1, 2, 4)) / 4
    assert 0.3 < kept / counted < 0.9
    found = interface_lddt_ca(predicted[None], true[None], mask[None], chain[None])
    assert found.tolist() == [pytest.approx(kept / counted)]
    assert float(interface_lddt_ca(true, true, mask, chain)) == 1
    assert interface_lddt_ca(predicted, true + 100 * chain[:, None], mask, chain).isnan()
    assert interface_lddt_ca(predicted, true, mask, torch.ones_like(chain)).isnan()

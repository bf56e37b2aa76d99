"""The losses of complexes: FAPE within and across chains, chains that are too near, and violations between chains."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from evodsp.config import LossConfig
from evodsp.errors import UserError
from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import RESTYPE_ATOM14_MASK, RESTYPE_ATOM14_RADIUS, RESTYPE_ORDER
from evodsp.losses import structure
from evodsp.losses.structure import (
    backbone_fape,
    backbone_fape_by_chain,
    chain_centre_loss,
    frame_aligned_point_error,
    unique_residue_numbers,
)
from evodsp.losses.total import CHAIN, total_loss
from evodsp.losses.violation import find_violations
from evodsp.parallel.exchange import LocalExchange
from tests.builders.labelled_batch import (
    CHAIN_WEIGHTS,
    HEADS,
    RESIDUES,
    WEIGHTS,
    Source,
    batch_of,
    leaves_of,
    output_of,
)

# Numbers beyond the number of residues (14), of which two leave the same rest, in no order; and padding.
CHAIN_NUMBERS = torch.tensor([[900] * 4 + [2] * 5 + [30] * 3 + [0] * 2, [1] * 13 + [0]])


@dataclasses.dataclass(frozen=True)
class Backbones:
    """Frames [T, B, R] and true frames [B, R], their mask, and the share of clamped errors; float64, in Å."""

    rotation: Tensor
    translation: Tensor
    true: Rigid
    mask: Tensor
    fraction: Tensor

    @property
    def predicted(self) -> Rigid:
        return Rigid(self.rotation, self.translation)


def backbones(iterations: int = 3) -> Backbones:
    """Errors lie on both sides of 10 and of 25 Å; some residues of each chain are not resolved."""
    source, (samples, residues) = Source(3), CHAIN_NUMBERS.shape

    def rotations(*shape: int) -> Tensor:
        return torch.linalg.qr(source.normal(*shape, 3, 3)).Q

    true = Rigid(rotations(samples, residues), source.normal(samples, residues, 3, scale=10))
    rotation = rotations(iterations, samples, residues)
    translation = true.translation + source.normal(iterations, samples, residues, 3, scale=8)
    mask = source.mask(samples, residues) * (CHAIN_NUMBERS > 0)
    return Backbones(rotation, translation, true, mask, torch.tensor([1.0, 0.6], dtype=torch.float64))


def formula(x: Backbones, clamps: tuple[float, float], floored: bool) -> list[Tensor]:
    """Both means from arrays of all pairs."""

    def seen(frames: Rigid) -> Tensor:
        vectors = frames.translation[..., None, :, :] - frames.translation[..., None, :]
        return torch.einsum("...fij,...fai->...faj", frames.rotation, vectors)

    squared = (seen(x.predicted) - seen(x.true)).square().sum(-1)
    # Where the error is the floor it has no slope; `where` keeps the root's infinite slope at 0 out of the gradient.
    far = squared > 1e-8
    distance = torch.where(far, squared.where(far, 1.0).sqrt(), 1e-4) if floored else (squared + 1e-4).sqrt()
    same = CHAIN_NUMBERS[:, :, None] == CHAIN_NUMBERS[:, None]
    both = x.mask[:, :, None] * x.mask[:, None]
    means = []
    for kind, clamp, unit in ((same, clamps[0], 10), (~same, clamps[1], 20)):
        fraction = x.fraction[:, None, None]
        error = fraction * distance.clamp(max=clamp) + (1 - fraction) * distance
        means.append(((error * both * kind).sum((-1, -2)) / unit / (1e-4 + (both * kind).sum((-1, -2)))).mean(0))
    return means


@pytest.mark.parametrize("chunk", [1, 40, 10**6])
@pytest.mark.parametrize("floored", [False, True])
def test_both_fapes_and_their_gradients_are_the_formulas(monkeypatch, chunk: int, floored: bool) -> None:
    """Catches pairs sorted wrongly, a clamp or unit of the other kind, one mean over all pairs, and gradients mixed up."""
    monkeypatch.setattr(structure, "CPU_PAIRS", chunk)
    x = backbones()
    x.rotation.requires_grad_()
    x.translation.requires_grad_()
    found = backbone_fape_by_chain(
        x.predicted, x.true, x.mask, CHAIN_NUMBERS, x.fraction, 25.0, LocalExchange(), floored
    )
    expected = formula(x, (10.0, 25.0), floored)
    assert found[1][1] == 0  # the second sample has one chain
    for kind, (ours, wanted) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-15)
        weights = torch.tensor([2.0, 0.5 + kind], dtype=torch.float64)
        gradients = [
            torch.autograd.grad((y * weights).sum(), (x.rotation, x.translation), retain_graph=True)
            for y in (ours, wanted)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * float(other.abs().max()))
    both = [torch.autograd.grad(sum(y).sum(), x.translation)[0] for y in (found, expected)]
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)


def test_errors_below_the_floor_have_no_slope() -> None:
    """Catches rounding noise times the floor's slope, 1 / eps: each CA in its own frame has an error of 0."""
    x = backbones(1)
    frames, points = x.predicted[0], x.translation[0].clone().requires_grad_()
    loss = frame_aligned_point_error(frames, frames, x.mask, points, points.detach() + 1e-5, x.mask, floored=True)
    torch.testing.assert_close(loss, torch.full_like(loss, 1e-5), rtol=1e-4, atol=0)
    assert (torch.autograd.grad(loss.sum(), points)[0] == 0).all()


def test_a_complex_of_one_chain_has_the_loss_of_a_single_chain() -> None:
    """Catches another number, or gradient, of a single chain among complexes: equal to the bit, term by term."""
    results = []
    for chain in ({}, {CHAIN: torch.ones(2, 2, RESIDUES, dtype=torch.long)}):
        leaves = {name: x.requires_grad_() for name, x in leaves_of(2).items()}
        loss, terms = total_loss(output_of(leaves, LocalExchange()), {**batch_of(2), **chain}, WEIGHTS, HEADS)
        loss.backward()
        results.append((terms, [x.grad for x in leaves.values() if x.grad is not None]))
    (terms, gradients), (others, other_gradients) = results
    assert terms == others
    assert all(map(torch.equal, gradients, other_gradients))
    one_chain = {**batch_of(2), CHAIN: torch.ones(2, 2, RESIDUES, dtype=torch.long)}
    more = total_loss(output_of(leaves_of(2), LocalExchange()), one_chain, CHAIN_WEIGHTS, HEADS)[1]
    assert more["interface_fape"] == more["chain_centre"] == 0


def test_terms_read_the_chains_of_the_last_cycle() -> None:
    """Catches a term that reads another tensor, and `interface_clamp` that is not handed on."""
    batch, leaves = batch_of(1, chains=True), leaves_of(1)
    output = output_of(leaves, LocalExchange())
    for clamp in (4.0, 30.0):
        weights = dataclasses.replace(CHAIN_WEIGHTS, interface_clamp=clamp)
        _, terms = total_loss(output, batch, weights, HEADS)
        truth, mask = Rigid.from_flat12(batch["rigidgroups_gt_frames"][:, :, 0]), batch["backbone_affine_mask"]
        chain, fraction = batch[CHAIN][:, -1], batch["use_clamped_fape"]
        found = backbone_fape_by_chain(output.structure.backbone, truth, mask, chain, fraction, clamp)
        assert [terms["backbone_fape"], terms["interface_fape"]] == [x.mean() for x in found]
        assert terms["backbone_fape"] != backbone_fape(output.structure.backbone, truth, mask, fraction).mean()
        ca = output.structure.positions[:, :, 1], batch["all_atom_positions"][:, :, 1], batch["all_atom_mask"][:, :, 1]
        assert terms["chain_centre"] == chain_centre_loss(*ca, chain).mean() > 0


def test_terms_of_complexes_ask_for_complexes() -> None:
    """Catches an IndexError for a user who gives a single chain's model a weight of complexes."""
    output = output_of(leaves_of(1), LocalExchange())
    for name in ("interface_fape", "chain_centre"):
        with pytest.raises(UserError, match=f"no asym_id, which the loss terms {name} need: give complexes with"):
            total_loss(output, batch_of(1), dataclasses.replace(LossConfig(), **{name: 1.0}), HEADS)


def test_chain_centres_are_those_of_loops() -> None:
    """Catches unordered pairs, a mean without the diagonal, unresolved chains that count, and a slack of the wrong sign."""
    source, (samples, residues) = Source(8), CHAIN_NUMBERS.shape
    chain = CHAIN_NUMBERS.clone()
    chain[1, 3:7], chain[1, 7:10], chain[1, 10] = 5, 7, 6
    ca, true_ca = (source.normal(samples, residues, 3, scale=scale) for scale in (3, 20))
    mask = source.mask(samples, residues) * (chain > 0)
    mask[1, 10] = 0  # chain 6 has no resolved residue
    expected = []
    for b in range(samples):
        resolved = [number for number in chain[b].unique() if mask[b, chain[b] == number].any()]
        centres = [[x[b][(chain[b] == number) & (mask[b] > 0)].mean(0) for number in resolved] for x in (ca, true_ca)]
        total = 0.0
        for i, j in itertools.permutations(range(len(resolved)), 2):
            predicted, true = (float((c[i] - c[j]).norm()) for c in centres)
            total += min(0.05 * (predicted - true + 4), 0) ** 2
        expected.append(total / len(resolved) ** 2)
    assert min(expected) > 0.01
    found = chain_centre_loss(ca, true_ca, mask, chain)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)
    assert torch.autograd.gradcheck(lambda x: chain_centre_loss(x, true_ca, mask, chain), ca.requires_grad_())


def test_chains_in_one_place_have_a_finite_gradient() -> None:
    """Catches the infinite slope of the square root at zero: an untrained model puts all residues at the origin."""
    true_ca = Source(0).normal(2, 14, 3, scale=20)
    for mask in (torch.ones(2, 14), torch.zeros(2, 14)):
        ca = torch.zeros(2, 14, 3, requires_grad=True)
        loss = chain_centre_loss(ca, true_ca, mask, CHAIN_NUMBERS)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert ca.grad is not None
        assert ca.grad.isfinite().all()


def test_residue_numbers_are_unique_and_small() -> None:
    """Catches bonds across chains, a gap that closes, equal numbers in two chains, and numbers that float32 cannot hold."""
    index = torch.tensor([[0, 1, 4, 5, 0, 1, 2, 3, 7]])
    chain = torch.tensor([[1, 1, 1, 1, 2, 2, 70000, 70000, 70000]])
    assert unique_residue_numbers(index, chain).tolist() == [[0, 1, 3, 4, 6, 7, 9, 10, 12]]


def _complex() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two crowded chains: equal numbers, a number that follows on the last of the chain before, and cysteines in both."""
    source = Source(4)
    chain, index = torch.tensor([[1] * 5 + [2] * 6]), torch.tensor([[0, 1, 2, 4, 5, 6, 7, 0, 1, 2, 5]])
    aatype = source.integers(20, *chain.shape)
    aatype[:, [1, 8]] = RESTYPE_ORDER["C"]
    mask = torch.from_numpy(RESTYPE_ATOM14_MASK).double()[aatype]
    return source.normal(*chain.shape, 14, 3, scale=2.5), mask * source.mask(*mask.shape), index, aatype, chain


def test_clashes_across_chains_are_those_of_all_pairs() -> None:
    """Catches atoms of equal numbers in two chains that may overlap, and a C and an N atom of two chains taken for bonded."""
    atom14, mask, index, aatype, chain = _complex()
    atoms = [(r, a) for r in range(chain.shape[1]) for a in range(14) if mask[0, r, a]]
    radius = torch.from_numpy(RESTYPE_ATOM14_RADIUS).double()[aatype[0]]
    expected = torch.zeros_like(mask[0])
    across = 0
    for (r, a), (s, b) in itertools.combinations(atoms, 2):
        one_chain = chain[0, r] == chain[0, s]
        step = int(index[0, s] - index[0, r])
        bonded = one_chain and ((step, a, b) == (1, 2, 0) or (step, a, b) == (-1, 0, 2))
        if r == s or bonded or a == b == 5:
            continue
        overlap = max(float(radius[r, a] + radius[s, b] - 1.5 - (atom14[0, r, a] - atom14[0, s, b]).norm()), 0)
        expected[r, a] += overlap
        expected[s, b] += overlap
        across += overlap > 0 and not one_chain and step in (0, 1)
    assert across > 10
    found = find_violations(atom14, mask, unique_residue_numbers(index, chain), aatype)
    torch.testing.assert_close(found.clash_atom_loss[0], expected, rtol=1e-6, atol=1e-8)


def test_chains_are_not_bonded() -> None:
    """Catches a peptide bond from the last residue of a chain to the next chain's first, where its number follows."""
    atom14, mask, index, aatype, chain = _complex()
    whole = find_violations(atom14, mask, unique_residue_numbers(index, chain), aatype)
    parts = [
        find_violations(atom14[:, here], mask[:, here], index[:, here], aatype[:, here])
        for here in (slice(0, 5), slice(5, 11))
    ]
    steps = index.diff(dim=1)[0]
    exist = mask[0, :-1, 2] * mask[0, 1:, 0] * (steps == 1)
    counts = exist[:4].sum(), exist[5:].sum()
    assert exist[4] == 1  # between the chains
    expected = sum(n * part.bond_loss for n, part in zip(counts, parts, strict=True)) / sum(counts)
    torch.testing.assert_close(whole.bond_loss, expected, rtol=1e-5, atol=0)


def test_violations_of_a_batch_know_its_chains() -> None:
    """Catches the numbers within chains handed to the violations."""
    batch, output = batch_of(1, chains=True), output_of(leaves_of(1), LocalExchange())
    known = total_loss(output, batch, CHAIN_WEIGHTS, HEADS)[1]["violation"]
    alike = {name: value for name, value in batch.items() if name != CHAIN}
    apart = {**alike, "residue_index": batch["residue_index"] + 100 * batch[CHAIN]}
    unknown, expected = (total_loss(output, x, WEIGHTS, HEADS)[1]["violation"] for x in (alike, apart))
    torch.testing.assert_close(known, expected, rtol=1e-12, atol=0)
    assert known != unknown

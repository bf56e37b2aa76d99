"""Synthetic alignments: columns that co-vary at contacts, sequences that fit their fold, insertions that are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evodsp.data.formats import parse_a3m, parse_stockholm
from evodsp.data.records import Chain
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.geometry.residues import ATOM_ORDER, RESTYPE_ORDER
from evodsp.rng import Draws
from scripts.examples.synthetic import sequences
from scripts.examples.synthetic.alignments import Homologs, draw_homologs, to_a3m, to_stockholm
from scripts.examples.synthetic.backbone import backbone_jacobian, build_backbone
from scripts.examples.synthetic.folding import superpose
from scripts.examples.synthetic.sequences import PottsModel, burial, contact_map, make_potts_model

BUNDLED = Path(__file__).resolve().parents[4] / "data"
CHAINS = ("s001_A", "s006_A", "s011_A")


def _store() -> ChainFiles:
    return ChainFiles(BUNDLED / "alignments", BUNDLED / "mmcif_files")


def _contacts(chain: Chain) -> np.ndarray:
    glycine = np.array([letter == "G" for letter in chain.sequence])
    ca, cb = chain.positions[:, ATOM_ORDER["CA"]], chain.positions[:, ATOM_ORDER["CB"]]
    return contact_map(np.where(glycine[:, None], ca, cb).astype(np.float64))


def _mutual_information(rows: np.ndarray) -> np.ndarray:
    """[L, L] in nats over the sequences without a gap in either column, with the average product correction."""
    count, length = rows.shape
    one_hot = (rows[..., None] == np.arange(20)).astype(np.float64).reshape(count, -1)
    joint = (one_hot.T @ one_hot).reshape(length, 20, length, 20)
    joint = joint / joint.sum((1, 3), keepdims=True)
    product = joint.sum(3, keepdims=True) * joint.sum(1, keepdims=True)
    information = np.where(joint > 0, joint * np.log(np.maximum(joint, 1e-12) / np.maximum(product, 1e-12)), 0)
    information = information.sum((1, 3))
    np.fill_diagonal(information, 0)
    average = information.sum(0) / (length - 1)
    return information - np.outer(average, average) / average.mean()


@pytest.mark.parametrize("key", CHAINS)
def test_columns_in_contact_share_information(key: str) -> None:
    """Catches alignments without a signal of the fold: couplings lost in sampling, or columns shifted in the files."""
    store = _store()
    rows = np.concatenate([a.residues for a in store.alignments(key)])
    contacts = _contacts(store.chain(key))
    information = _mutual_information(rows)
    apart = np.abs(np.subtract.outer(np.arange(len(contacts)), np.arange(len(contacts)))) >= 4
    inside, background = information[contacts & apart], information[~contacts & apart]
    assert inside.mean() > background.mean() + background.std()
    first, second = np.nonzero(np.triu(apart))
    best = np.argsort(-information[first, second])[: len(contacts) // 2]
    precision = contacts[first, second][best].mean()
    assert precision > 4 * contacts[first, second].mean()
    assert precision > 0.5


def test_information_needs_the_couplings() -> None:
    """Control of the test above: without couplings the same measure finds no contacts."""
    chain = _store().chain("s001_A")
    contacts = _contacts(chain)
    draws = Draws.root(7)
    fields = draws.at("fields").gumbel(len(chain), 20)
    model = PottsModel(fields, np.zeros((len(chain), len(chain), 20, 20)), contacts)
    rows = model.sample(np.zeros((190, len(chain)), dtype=np.int64), 3, draws)
    information = _mutual_information(rows)
    apart = np.abs(np.subtract.outer(np.arange(len(chain)), np.arange(len(chain)))) >= 4
    background = information[~contacts & apart]
    assert abs(information[contacts & apart].mean() - background.mean()) < 0.3 * background.std()


def test_gibbs_sampling_draws_from_the_model() -> None:
    """Catches a biased sampler: frequencies of a two-residue model against its exact distribution."""
    draws = Draws.root(1)
    pair = draws.at("pair").gumbel(20, 20)
    couplings = np.zeros((2, 2, 20, 20))
    couplings[0, 1], couplings[1, 0] = pair, pair.T
    model = PottsModel(draws.at("fields").gumbel(2, 20), couplings, np.array([[False, True], [True, False]]))
    rows = model.sample(np.zeros((20_000, 2), dtype=np.int64), 12, draws.at("gibbs"))
    exact = np.exp(model.fields[0][:, None] + model.fields[1] + pair)
    exact /= exact.sum()
    found = np.zeros((20, 20))
    np.add.at(found, (rows[:, 0], rows[:, 1]), 1 / len(rows))
    assert np.abs(found - exact).sum() / 2 < 0.06


def test_rate_zero_keeps_a_sequence() -> None:
    """Catches a query that differs from its chain."""
    model = PottsModel(np.zeros((5, 20)), np.zeros((5, 5, 20, 20)), np.zeros((5, 5), dtype=bool))
    start = np.arange(10).reshape(2, 5)
    rows = model.sample(start, 4, Draws.root(0), np.array([0.0, 1.0]))
    np.testing.assert_array_equal(rows[0], start[0])
    assert (rows[1] != start[1]).any()


def test_sequences_carry_the_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches sequences without a pattern: core like surface, left-handed residues other than glycine, proline in helices."""
    monkeypatch.setattr(sequences, "PREFERENCE", 0.0)  # what all families have in common
    torsions = np.deg2rad(np.array([[-63.0, -42.0]] * 20 + [[58.0, 38.0]] * 2 + [[-118.0, 132.0]] * 20))
    backbone = build_backbone(torsions)
    structure = "H" * 20 + "LL" + "E" * 20
    model = make_potts_model(structure, torsions, backbone[:, 1], backbone[:, 4], Draws.root(2))
    rows = model.sample(np.zeros((200, 42), dtype=np.int64), 10, Draws.root(3))
    assert (rows[:, 20:22] == RESTYPE_ORDER["G"]).all()
    assert not (rows[:, :20] == RESTYPE_ORDER["P"]).any()
    assert not (rows[:, 22:] == RESTYPE_ORDER["P"]).any()
    hydrophobic = np.isin(rows, [RESTYPE_ORDER[letter] for letter in "VILMFAWC"]).mean(0)
    hidden = burial(backbone[:, 1], backbone[:, 4])
    assert hydrophobic[hidden == 1].mean() > hydrophobic[hidden == 0].mean() + 0.3


def test_a3m_and_stockholm_say_the_same() -> None:
    """Catches a writer that shifts or loses insertions: both files must parse to the drawn alignment."""
    length, count = 30, 40
    draws = Draws.root(4)
    model = PottsModel(draws.at("fields").gumbel(length, 20), np.zeros((length, length, 20, 20)), np.eye(length) > 1)
    loop = np.arange(length) % 6 < 3
    query = (draws.at("query").uniform(length) * 20).astype(np.int64)
    homologs = draw_homologs(model, query, loop, "s001_A", "SYN", count, draws)
    expected = np.where(homologs.present, homologs.residues, 21)
    # Deletions are counted at the column that follows.
    deletions = np.zeros((count, length), dtype=int)
    deletions[:, 1:] = homologs.inserted[:, :-1]
    assert deletions.any()
    assert (expected == 21).any()
    for text, parse in ((to_a3m(homologs), parse_a3m), (to_stockholm(homologs), parse_stockholm)):
        alignment = parse("made", text.encode())
        np.testing.assert_array_equal(alignment.residues, expected)
        np.testing.assert_array_equal(alignment.deletions, deletions)
        assert tuple(alignment.names) == homologs.names


def test_insertions_are_written_after_their_column() -> None:
    """The text itself, in the smallest case."""
    homologs = Homologs(
        ("q", "h"),
        np.array([[0, 1, 2], [0, 1, 2]]),
        np.array([[True, True, True], [True, False, True]]),
        np.array([[0, 0, 0], [2, 0, 0]]),
        np.array([[[0, 0]] * 3, [[4, 5]] * 3]),
    )
    assert to_a3m(homologs) == ">q\nARN\n>h\nAcq-N\n"
    lines = to_stockholm(homologs).splitlines()
    assert [line.split()[-1] for line in lines[2:5]] == ["A..RN", "Acq-N", "x..xx"]


def test_backbone_jacobian_is_the_derivative() -> None:
    """Catches wrong derivatives, with which the minimisation still converges, slowly: compare with finite differences."""
    torsions = Draws.root(5).uniform(9, 2) * 6 - 3
    jacobian = backbone_jacobian(build_backbone(torsions))
    for residue, kind in ((0, 0), (0, 1), (4, 0), (4, 1), (8, 0), (8, 1)):
        step = np.zeros((9, 2))
        step[residue, kind] = 1e-6
        slope = (build_backbone(torsions + step) - build_backbone(torsions - step)) / 2e-6
        # phi of the first residue rotates the chain about a bond that `build_backbone` uses as its coordinate system.
        if (residue, kind) != (0, 0):
            np.testing.assert_allclose(jacobian[..., kind * 9 + residue], slope, atol=1e-6)


def test_superposition_is_no_reflection() -> None:
    """Catches a superposition that allows mirror images."""
    points = Draws.root(6).uniform(12, 3)
    turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    np.testing.assert_allclose(superpose(points @ turn + 3, points), points, atol=1e-12)
    assert np.abs(superpose(points * [1, 1, -1], points) - points).max() > 0.1

"""Relaxation of structures by OpenMM, alone and in a prediction."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import gemmi
import numpy as np
import pytest
import torch

from evodsp.data.formats.mmcif import read_chain
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_ORDER, CA, RESTYPES_WITH_X
from evodsp.inference import relaxation
from evodsp.inference.predict import predict
from evodsp.inference.relaxation import _check_chain, relax
from evodsp.inference.results import read_result
from evodsp.inference.structure_files import PredictedStructure
from tests.builders.pages import ROOT
from tests.builders.prediction import silent

from .conftest import OTHER, QUERY, Workplace

CPU = torch.device("cpu")


def structure(noise: float = 0.0, name: str = "s005", residues: int | None = None) -> PredictedStructure:
    """A bundled structure, or its first residues, each atom moved at random."""
    chain = read_chain(ROOT / "data" / "mmcif_files" / f"{name}.cif", "A")
    mask = chain.mask.astype(np.float32)
    mask[:, ATOM_ORDER["OXT"]] = 0
    moved = chain.positions + noise * np.random.default_rng(0).normal(size=chain.positions.shape)
    return PredictedStructure(
        name=name,
        aatype=np.array([RESTYPES_WITH_X.index(letter) for letter in chain.sequence[:residues]]),
        positions=(moved * mask[..., None]).astype(np.float32)[:residues],
        mask=mask[:residues],
        plddt=np.full(len(chain), 80, np.float32)[:residues],
    )


FIRST_TEN = "".join(RESTYPES_WITH_X[code] for code in structure().aatype[:10])


def test_violations_go_and_the_fold_stays() -> None:
    """Catches springs that hold violations fast, springs that hold nothing, atoms that change places, and chance."""
    broken, good = structure(noise=0.3), structure()
    found = relax(broken, CPU)
    assert found.violations_before["any"] > 40
    assert found.violations_after == {"bond": 0, "clash": 0, "within": 0, "any": 0}
    assert found.energy_after < found.energy_before
    assert 0.3 < found.rmsd < 0.7, "the noise is 0.5 Å"
    np.testing.assert_array_equal(found.structure.mask, broken.mask)
    from_truth = np.linalg.norm(found.structure.positions[:, CA] - good.positions[:, CA], axis=-1)
    assert np.sqrt((from_truth**2).mean()) < 0.45, "nearer to the truth than the noise"
    kept = relax(good, CPU)
    assert kept.violations_before["any"] == 0
    assert kept.rmsd < 0.25
    assert kept.rounds == 1
    few = []
    for seed in (1, 2):
        random.seed(seed)
        few.append(relax(structure(noise=0.3, residues=14), CPU).structure.positions)
    np.testing.assert_array_equal(*few)


@pytest.mark.verify
def test_springs_hold_atoms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches springs in the wrong unit, a thousand times too weak or too strong."""
    good = structure(residues=14)  # of longer ones a loose one takes seconds
    with monkeypatch.context() as weak:
        weak.setattr(relaxation, "_STIFFNESS", 0.01)
        loose = relax(good, CPU).rmsd
    with monkeypatch.context() as strong:
        strong.setattr(relaxation, "_STIFFNESS", 10_000.0)
        tight = relax(good, CPU).rmsd
    assert tight < 0.05 < relax(good, CPU).rmsd < 0.3 < loose


def test_chains_of_a_complex_are_not_bonded() -> None:
    """Catches a bond from one chain's end to the next one's beginning, and a chain without its last oxygen."""
    from openmm import app

    one = structure(residues=9)
    moved = one.positions + np.float32([25, 0, 0]) * one.mask[..., None]
    both = {name: np.concatenate([getattr(one, name)] * 2) for name in ("aatype", "mask", "plddt")}
    pair = replace(one, **both, positions=np.concatenate([one.positions, moved]), lengths=(9, 9))
    found = relax(pair, CPU)
    assert found.violations_before["bond"] == found.violations_after["any"] == 0
    assert found.rmsd < 0.5
    assert found.structure.lengths == (9, 9)
    ends = found.structure.positions[[8, 9], CA]
    assert np.linalg.norm(ends[0] - ends[1]) > 15
    topology, _ = relaxation._Chain(pair, CPU)._heavy(app)
    assert [len([*chain.residues()]) for chain in topology.chains()] == [9, 9]
    assert sum(atom.name == "OXT" for atom in topology.atoms()) == 2
    # Chains of one residue have no next one to be near to.
    _check_chain(replace(pair, lengths=(1,) * 18, positions=pair.positions * 10))


def test_what_cannot_be_relaxed_is_said() -> None:
    """Catches a chain with a gap that is joined across it, and OpenMM's own exception."""
    gap = structure()
    gap.aatype[10] = 20
    with pytest.raises(UserError, match="residue 11 is X and has no atoms"):
        relax(gap, CPU)
    lost = structure()
    lost.positions[3, CA] = np.nan
    with pytest.raises(UserError, match="s005: 1 of 48 residues have coordinates that are not finite numbers"):
        relax(lost, CPU)


@pytest.mark.parametrize("scale", [0, 0.1, 1e-3, 5, 1e6])
def test_coordinates_that_are_no_protein_are_named(scale: float) -> None:
    """Catches 'math domain error' and 'cannot convert float NaN', and minutes of minimising, for an untrained model's blob."""
    blob = structure()
    blob.positions[:] *= scale
    with pytest.raises(UserError, match=r"s005: 48 of 48 residues have a CA atom on top .* train the model further"):
        relax(blob, CPU)


def test_a_chain_with_a_gap_is_a_protein() -> None:
    """Catches a chain that is not relaxed although no more than half of its residues stand at a gap, and one that is tried."""
    for residues, refused in ((4, False), (3, True)):
        broken = structure(residues=residues)
        broken.positions[2:] += 100
        with pytest.raises(UserError, match="2 of 3 residues have") if refused else nullcontext():
            _check_chain(broken)


def test_an_untrained_model_keeps_its_prediction(workplace: Workplace) -> None:
    """Catches a structure that relaxation cannot mend and that costs the record, or later ones."""
    lines: list[str] = []
    results = predict(workplace.change(seeds=1, relax="best"), lines.append)
    assert [line for line in lines if "not relaxed: " in line and "are no protein" in line], lines
    assert [result.name for result in results] == ["alpha_A", "beta_A"]


def test_hydrogens_that_cannot_be_placed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches errors of Python's mathematics, which OpenMM lets through where a few atoms coincide."""
    from openmm.app import Modeller

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(Modeller, "addHydrogens", fail)
    with pytest.raises(UserError, match="s005: OpenMM cannot place hydrogens, probably because atoms lie on top"):
        relax(structure(), CPU)


def test_a_platform_that_fails_costs_no_prediction(
    workplace: Workplace, folded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an error of OpenMM, such as that of a GPU which it cannot use, that ends the run with the next records."""
    workplace.config.fasta.write_text(f">y\n{FIRST_TEN}\n>z\n{FIRST_TEN}\n")
    real = relaxation._Chain._platform
    monkeypatch.setattr(relaxation._Chain, "_platform", lambda *given: (real(*given)[0], {"NoSuchProperty": "1"}))
    lines: list[str] = []
    results = predict(workplace.change(alignments=None, seeds=1, relax="best"), lines.append)
    assert [result.name for result in results] == ["y", "z"]
    assert sum("not relaxed: " in line and "OpenMM could not relax it" in line for line in lines) == 2
    assert files(workplace, "y") == set()


def test_atoms_in_one_place_part() -> None:
    """Catches an energy that is no number, in a file that must be JSON."""
    one = structure(residues=24)
    one.positions[3, CA] = one.positions[4, CA] = one.positions[5, CA]
    found = relax(one, CPU)
    assert found.energy_before is None
    assert found.violations_before["any"] == 4
    assert found.violations_after["any"] == 0


def files(workplace: Workplace, name: str) -> set[str]:
    return {path.name for path in (workplace.config.output / name).iterdir() if "relaxed" in path.name}


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The untrained model predicts this chain: its own structures are beyond repair."""
    monkeypatch.setattr("evodsp.inference.seeds.structure_of", _straight)


def _straight(target: Any, *_: Any) -> PredictedStructure:
    whole, length = structure(), len(target.query)
    part = {name: getattr(whole, name)[:length] for name in ("positions", "mask", "plddt")}
    if "X" in target.query.letters:
        part["mask"][target.query.letters.index("X")] = 0
        aatype = np.array([RESTYPES_WITH_X.index(letter) for letter in target.query.letters])
        return PredictedStructure(name=target.query.name, aatype=aatype, **part)
    return PredictedStructure(name=target.query.name, aatype=whole.aatype[:length], **part)


def test_a_prediction_is_relaxed_and_kept(workplace: Workplace, folded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches --relax that is ignored where everything is kept, a relaxation that needs the model again, that replaces the
    prediction, that is lost by more seeds, or that another format makes again or writes from the atoms before it."""
    workplace.config.fasta.write_text(f">x\n{QUERY}\n>y\n{FIRST_TEN}\n")
    config = workplace.change(alignments=None, seeds=1)
    predict(config, silent)
    lines: list[str] = []
    with monkeypatch.context() as kept:
        kept.setattr("evodsp.inference.jobs.load_model", lambda *_: pytest.fail("the model was loaded"))
        other, result = predict(replace(config, relax="best"), lines.append)
    assert result.kept
    assert files(workplace, "y") == {"seed_0_relaxed.cif", "seed_0_relaxed.json"}
    assert files(workplace, "x") == set()
    assert any("not relaxed: x: residue 11 is X" in line for line in lines)
    assert sum("seed_0 relaxed: " in line for line in lines) == 1
    assert json.loads((result.folder / "seed_0_relaxed.json").read_text())["violations_after"]["any"] == 0
    assert "Relaxation" in (result.folder / "report.html").read_text()
    assert "Relaxation" not in (other.folder / "report.html").read_text()
    before = (result.folder / "seed_0_relaxed.cif").read_bytes()
    with monkeypatch.context() as kept:
        real = relaxation.relax
        kept.setattr(relaxation, "relax", lambda one, *_: pytest.fail("again") if one.name == "y" else real(one, CPU))
        more: list[str] = []
        predict(replace(config, relax="best", format="pdb"), more.append)
    assert "  seed_0 relaxed before; seed_0_relaxed.pdb written from seed_0_relaxed.cif" in more
    read = [
        gemmi.read_structure(str(result.folder / name))[0]["A"]
        for name in ("seed_0_relaxed.cif", "seed_0_relaxed.pdb", "seed_0.pdb")
    ]
    positions = [[atom.pos.tolist() for residue in chain for atom in residue] for chain in read]
    assert positions[0] == positions[1] != positions[2]
    assert [residue.name for residue in read[0]] == [residue.name for residue in read[2]]
    more.clear()
    predict(replace(config, seeds=2, relax="all"), more.append)
    relaxed = {f"seed_{n}_relaxed.{kind}" for n in (0, 1) for kind in ("cif", "json")}
    assert files(workplace, "y") == relaxed | {"seed_0_relaxed.pdb"}
    assert (result.folder / "seed_0_relaxed.cif").read_bytes() == before
    assert sum("relaxed: " in line and "not relaxed" not in line for line in more) == 1
    assert len(read_result(result.folder).mean_plddt) == 2


def test_without_openmm_nothing_begins(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches hours of prediction before the missing package is named."""
    workplace.config.fasta.write_text(f">y\n{OTHER}\n")
    monkeypatch.setattr(relaxation, "find_spec", lambda name: None)
    before = workplace.snapshot()
    with pytest.raises(UserError, match=r"needs OpenMM, .* pip install 'evodsp\[relax\]'"):
        predict(workplace.change(alignments=None, relax="best"), silent)
    assert workplace.snapshot() == before

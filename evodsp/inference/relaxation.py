"""Relaxation of predicted structures (AlphaFold2's supplement, 1.8.6): a force field removes violations, springs keep the rest.

OpenMM, an extra (`pip install 'evodsp[relax]'`), minimises the energy of AMBER99SB with hydrogens, while springs of
10 kcal/mol/Å² hold every heavy atom where it was predicted. Residues with violations then lose their springs, and the energy is
minimised again, at most three times in all. Hydrogens are not kept. The same structure gives the same result on one machine.

pdbfixer, which AlphaFold2 uses before, is not needed: a prediction has all heavy atoms but the last oxygen of each chain. The
chains of a complex are not bonded to one another, but for disulphide bridges.
Shapes: R residues, atom37 order.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float

from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.geometry.frames import atom37_to_atom14
from evodsp.geometry.residues import ATOM_ORDER, ATOM_TYPES, CA, RESTYPE_1TO3
from evodsp.inference.results import Format, Key, PredictionResult, read_structure, relaxed_name, stem
from evodsp.inference.structure_files import Origin, PredictedStructure, structure_text
from evodsp.losses.structure import unique_residue_numbers
from evodsp.losses.violation import violating_residues
from evodsp.printing import one_line

Which = Literal["best", "all"]
NOT_RELAXED = "not relaxed"
_FORCE_FIELD = "amber99sb.xml"
_STIFFNESS = 10.0
"""kcal/mol/Å²."""
_TOLERANCE = 10.0
"""kJ/mol/nm: the root mean square force at which a minimisation ends."""
_ROUNDS = 3
_KCAL = 4.184
"""kJ/mol."""
_TOO_NEAR, _TOO_FAR = 2.0, 8.0
"""Least distance of two CA atoms, and largest distance of neighbouring ones, Å. Even cis peptides have 2.9, trans ones 3.8."""
_OXT = 1.25
"""Length of both bonds of a carboxylate, Å."""


@dataclass(frozen=True)
class Relaxed:
    """A relaxed structure, and how it differs from the predicted one."""

    structure: PredictedStructure
    violations_before: Mapping[str, int]
    """Residues with each kind of violation (`violating_residues`), and with any."""
    violations_after: Mapping[str, int]
    energy_before: float | None
    """kJ/mol, hydrogens already in their places; huge where atoms clash, None where they coincide."""
    energy_after: float
    rmsd: float
    """RMSD of the heavy atoms from before, Å."""
    rounds: int
    seconds: float

    @property
    def line(self) -> str:
        """For the log."""
        before, after = self.violations_before["any"], self.violations_after["any"]
        return (
            f"relaxed: {before} to {after} residues with violations, moved by {self.rmsd:.2f} Å, {self.seconds:.1f} s"
        )


def check_openmm() -> None:
    """Raise UserError if OpenMM is not installed."""
    if find_spec("openmm") is None:
        raise UserError("--relax needs OpenMM, which is not installed; run: pip install 'evodsp[relax]'")


def missing_relaxations(result: PredictionResult, which: Which) -> list[Key]:
    """The predictions of a target that are still to be relaxed. A prediction that failed is tried again."""
    keys = [result.best] if which == "best" else list(result.mean_plddt)
    return [key for key in keys if not (result.folder / relaxed_name(key, result.format)).is_file()]


def relax_prediction(result: PredictionResult, key: Key, device: torch.device) -> str:
    """Relax one prediction; writes its structure and <stem>_relaxed.json beside it. Returns a line for the log.

    A prediction that has been relaxed in another format is written from that file. The line names a structure that cannot be
    relaxed; the prediction stays as it is.
    """
    target = result.folder / relaxed_name(key, result.format)
    there = (result.folder / relaxed_name(key, other) for other in get_args(Format))
    if earlier := next((path for path in there if path.is_file()), None):
        write_text(target, structure_text(read_structure(result, key, earlier), result.format, Origin()))
        return f"{stem(key)} relaxed before; {target.name} written from {earlier.name}"
    try:
        relaxed = relax(read_structure(result, key), device)
        text = structure_text(relaxed.structure, result.format, Origin())
    except UserError as error:
        return f"{NOT_RELAXED}: {error}"
    facts = {name: value for name, value in vars(relaxed).items() if name != "structure"}
    write_text(result.folder / f"{stem(key)}_relaxed.json", json.dumps(facts, indent=2) + "\n")
    write_text(target, text)
    return f"{stem(key)} {relaxed.line}"


def relax(structure: PredictedStructure, device: torch.device) -> Relaxed:
    """The structure after relaxation. `device`: a GPU is used if OpenMM has CUDA.

    Raises UserError for a chain with residues X, which have no atoms, for coordinates that are no protein, and for an energy
    that is not finite.
    """
    if "X" in structure.sequence:
        place = structure.sequence.index("X") + 1
        raise UserError(
            f"{structure.name}: residue {place} is X and has no atoms, so the chain has a gap; leave it out"
        )
    _check_chain(structure)
    with _openmm_errors(structure.name):
        return _relaxed(structure, device)


def _check_chain(structure: PredictedStructure) -> None:
    """Raise UserError for coordinates that are no protein. The minimiser may try for minutes, or fail with a riddle."""
    ca = structure.positions[:, CA].astype(np.float64)
    bad = ~np.isfinite(structure.positions).all((1, 2))
    what = "coordinates that are not finite numbers"
    if not bad.any():
        near = np.array([(np.linalg.norm(ca - one, axis=-1) < _TOO_NEAR).sum() > 1 for one in ca])
        torn = np.linalg.norm(np.diff(ca, axis=0), axis=-1) > _TOO_FAR
        torn[[chain.start - 1 for chain in structure.chains[1:]]] = False
        bad = near.copy()
        bad[1:] |= torn
        bad[:-1] |= torn
        if 2 * bad.sum() <= len(ca):
            return
        what = "a CA atom on top of another residue's, or far from the next one's"
    raise UserError(
        f"{structure.name}: {bad.sum():,} of {len(ca):,} residues have {what}. These coordinates are no protein (an "
        f"untrained model's are not), and relaxation cannot mend them. The prediction is kept; train the model further, "
        f"or leave out --relax"
    )


@contextmanager
def _openmm_errors(name: str) -> Iterator[None]:
    """Turn errors of OpenMM (numbers that are not finite, a GPU that it cannot use) into one line."""
    from openmm import OpenMMException

    try:
        yield
    except OpenMMException as error:
        reason = one_line(str(error))
        raise UserError(
            f"{name}: OpenMM could not relax it ({reason}); the prediction is kept, --relax tries again"
        ) from error


def _relaxed(structure: PredictedStructure, device: torch.device) -> Relaxed:
    begun = time.perf_counter()
    before = _violations(structure, structure.positions)
    chain = _Chain(structure, device)
    free = np.zeros(len(structure.aatype), bool)
    energy_before, energy_after, rounds = float("nan"), float("nan"), 0
    positions = structure.positions
    while rounds < _ROUNDS:
        start, energy_after, positions = chain.minimise(free)
        energy_before = start if rounds == 0 else energy_before
        rounds += 1
        broken = _violations(structure, positions)["any"] & ~free
        if not broken.any():
            break
        free |= broken
    both = structure.mask > 0.5
    moved = (positions - structure.positions)[both]
    return Relaxed(
        replace(structure, positions=positions.astype(np.float32)),
        {kind: int(residues.sum()) for kind, residues in before.items()},
        {kind: int(residues.sum()) for kind, residues in _violations(structure, positions).items()},
        energy_before if np.isfinite(energy_before) else None,
        energy_after,
        float(np.sqrt((moved**2).sum(-1).mean())),
        rounds,
        time.perf_counter() - begun,
    )


class _Chain:
    """A chain with hydrogens in OpenMM. Its positions are those of the last minimisation."""

    def __init__(self, structure: PredictedStructure, device: torch.device) -> None:
        import openmm
        from openmm import app, unit

        self._structure, self._openmm, self._unit = structure, openmm, unit
        topology, positions = self._heavy(app)
        field = app.ForceField(_FORCE_FIELD)
        modeller = app.Modeller(topology, positions * 0.1 * unit.nanometer)
        topology.createDisulfideBonds(modeller.positions)
        platform, options = self._platform(device)
        with _repeatable(platform, options):
            try:
                modeller.addHydrogens(field, platform=platform)
            except (ValueError, ArithmeticError) as error:
                raise UserError(
                    f"{structure.name}: OpenMM cannot place hydrogens, probably because atoms lie on top of one another "
                    f"({error}); the prediction is kept"
                ) from error
        system = field.createSystem(modeller.topology, constraints=app.HBonds)
        self._spring = openmm.CustomExternalForce("0.5 * k * ((x - x0)^2 + (y - y0)^2 + (z - z0)^2)")
        for name in ("k", "x0", "y0", "z0"):
            self._spring.addPerParticleParameter(name)
        atoms = [atom for atom in modeller.topology.atoms() if atom.element.symbol != "H"]
        start = np.array(modeller.positions.value_in_unit(unit.nanometer))
        self._heavy_atoms = [(atom.index, atom.residue.index, ATOM_ORDER.get(atom.name)) for atom in atoms]
        for index, _, _ in self._heavy_atoms:
            self._spring.addParticle(index, [0.0, *start[index]])
        self._start = start
        system.addForce(self._spring)
        self._context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform, options)
        self._context.setPositions(modeller.positions)

    def minimise(self, free: Bool[np.ndarray, " R"]) -> tuple[float, float, Float[np.ndarray, "R 37 3"]]:
        """Minimise the energy; residues that are `free` have no springs. Energies before and after (kJ/mol), positions in Å."""
        stiffness = _STIFFNESS * _KCAL * 100  # kJ/mol/nm²
        for number, (index, residue, _) in enumerate(self._heavy_atoms):
            self._spring.setParticleParameters(
                number, index, [0.0 if free[residue] else stiffness, *self._start[index]]
            )
        self._spring.updateParametersInContext(self._context)
        before = self._energy()
        self._openmm.LocalEnergyMinimizer.minimize(self._context, _TOLERANCE, 0)
        after = self._energy()
        found = self._context.getState(getPositions=True).getPositions(asNumpy=True)
        found = found.value_in_unit(self._unit.angstrom)
        if not (np.isfinite(after) and np.isfinite(found).all()):
            raise UserError(
                f"{self._structure.name}: the energy is not finite after the minimisation; the prediction is kept"
            )
        positions = self._structure.positions.astype(np.float64).copy()
        for index, residue, slot in self._heavy_atoms:
            if slot is not None and self._structure.mask[residue, slot] > 0.5:
                positions[residue, slot] = found[index]
        return before, after, positions

    def _energy(self) -> float:
        state = self._context.getState(getEnergy=True)
        return float(state.getPotentialEnergy().value_in_unit(self._unit.kilojoule_per_mole))

    def _heavy(self, app: Any) -> tuple[Any, Float[np.ndarray, "atoms 3"]]:
        """The topology of the heavy atoms, and their positions in Å."""
        one, topology, positions = self._structure, app.Topology(), []
        chains = {chain.start: chain.name for chain in one.chains}
        last = {chain.end - 1 for chain in one.chains}
        for number, letter in enumerate(one.sequence):
            if number in chains:
                chain = topology.addChain(chains[number])
            residue = topology.addResidue(RESTYPE_1TO3[letter], chain)
            for slot in np.flatnonzero(one.mask[number] > 0.5):
                name = ATOM_TYPES[slot]
                topology.addAtom(name, app.Element.getBySymbol(name[0]), residue)
                positions.append(one.positions[number, slot].astype(np.float64))
            if number in last and one.mask[number, ATOM_ORDER["OXT"]] <= 0.5:
                topology.addAtom("OXT", app.Element.getBySymbol("O"), residue)
                positions.append(_last_oxygen(*(one.positions[number, ATOM_ORDER[name]] for name in ("CA", "C", "O"))))
        topology.createStandardBonds()
        return topology, np.array(positions)

    def _platform(self, device: torch.device) -> tuple[Any, dict[str, str]]:
        platform = self._openmm.Platform
        names = {platform.getPlatform(number).getName() for number in range(platform.getNumPlatforms())}
        if device.type == "cuda" and "CUDA" in names:
            options = {"DeviceIndex": str(device.index or 0), "Precision": "mixed", "DeterministicForces": "true"}
            return platform.getPlatformByName("CUDA"), options
        threads = {"Threads": str(torch.get_num_threads()), "DeterministicForces": "true"}
        return platform.getPlatformByName("CPU"), threads


@contextmanager
def _repeatable(platform: Any, options: Mapping[str, str]) -> Iterator[None]:
    """Within this context OpenMM places hydrogens repeatably: from seeded random numbers, with the platform's options.

    It draws the first places from Python's random numbers, and makes a context that takes no options but defaults.
    """
    state, defaults = random.getstate(), {name: platform.getPropertyDefaultValue(name) for name in options}
    random.seed(0)
    for name, value in options.items():
        platform.setPropertyDefaultValue(name, value)
    try:
        yield
    finally:
        random.setstate(state)
        for name, value in defaults.items():
            platform.setPropertyDefaultValue(name, value)


def _last_oxygen(
    ca: Float[np.ndarray, " 3"], c: Float[np.ndarray, " 3"], o: Float[np.ndarray, " 3"]
) -> Float[np.ndarray, " 3"]:
    """The place of OXT, Å: O mirrored at the axis through CA and C, in their plane."""
    axis = (c - ca).astype(np.float64)
    axis /= np.linalg.norm(axis)
    bond = (o - c).astype(np.float64)
    mirrored = 2 * (bond @ axis) * axis - bond
    return c + _OXT * mirrored / np.linalg.norm(mirrored)


def _violations(
    structure: PredictedStructure, positions: Float[np.ndarray, "R 37 3"]
) -> dict[str, Bool[np.ndarray, " R"]]:
    """The residues with violations, by kind; `any` marks the residues with at least one kind."""
    aatype = torch.as_tensor(np.asarray(structure.aatype, np.int64))
    to14 = partial(atom37_to_atom14, aatype=aatype)
    atom14 = to14(torch.from_numpy(np.asarray(positions, np.float64)))
    mask = to14(torch.from_numpy(structure.mask).double())
    chain = torch.repeat_interleave(torch.tensor([len(one) for one in structure.chains]))[None]
    numbers = unique_residue_numbers(torch.arange(len(aatype))[None], chain)[0]
    found = violating_residues(atom14, mask, numbers, aatype)
    named = {kind: residues.numpy() for kind, residues in found.items()}
    return {**named, "any": np.logical_or.reduce(list(named.values()))}

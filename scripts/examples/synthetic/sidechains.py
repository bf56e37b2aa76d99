"""Side chains on a backbone: rotamers placed by AF2's rigid groups, chosen so that no two atoms clash.

The candidates of a residue are the staggered rotamers of its type, with small deviations; the ones that fit the backbone best
are kept. Coordinate descent over the residues, from several starts, finds a combination. If even the best one clashes, the
larger of the two residues is replaced by a smaller relative (leucine by valine, …), as evolution does.

Shapes: R residues, K rotamers of each, 14 atoms. Å, radians.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64

from evodsp.geometry.frames import Rigid, frames_to_atom14, torsion_angles_to_frames
from evodsp.geometry.residues import (
    RESTYPE_1TO3,
    RESTYPE_ATOM14_MASK,
    RESTYPE_NAME_TO_ATOM14_NAMES,
    RESTYPE_ORDER,
    RESTYPES,
)
from evodsp.rng import Draws
from scripts.examples.synthetic.backbone import CA, C, N, O

KEPT_ROTAMERS = 10
CLASH = 2.6
"""Heavy atoms of two residues that are not bonded to each other must be at least this far apart, in Å."""

_STAGGERED = (-65.0, 180.0, 62.0)
_FLAT = (90.0, 60.0, -60.0)
# chi angles in degrees of each type's rotamers: staggered, except next to planar groups and rings.
_CHOICES: dict[str, tuple[tuple[float, ...], ...]] = {
    "S": (_STAGGERED,), "C": (_STAGGERED,), "T": (_STAGGERED,), "V": (_STAGGERED,),
    "I": (_STAGGERED, _STAGGERED), "L": (_STAGGERED, (180.0, 62.0, -65.0)),
    "M": (_STAGGERED, _STAGGERED, (180.0, 70.0, -70.0)),
    "F": (_STAGGERED, _FLAT), "Y": (_STAGGERED, _FLAT), "W": (_STAGGERED, (90.0, -90.0, 0.0)), "H": (_STAGGERED, (-70.0, 80.0)),
    "D": (_STAGGERED, (-30.0, 0.0, 30.0)), "N": (_STAGGERED, (-40.0, 0.0, 40.0, 180.0)),
    "E": (_STAGGERED, _STAGGERED, (-20.0, 20.0)), "Q": (_STAGGERED, _STAGGERED, (-40.0, 40.0)),
    "K": (_STAGGERED, _STAGGERED, (180.0,), (180.0,)), "R": (_STAGGERED, _STAGGERED, (180.0,), (180.0, 85.0, -85.0)),
}  # fmt: skip
# Proline: with AF2's rigid groups these two puckers close the ring (N-CD 1.47 Å).
_PROLINE = ((26.0, -22.0), (-22.0, 24.0))
_DEVIATIONS = (-14.0, 0.0, 14.0)
# What replaces a residue that has no room.
_SMALLER = dict(zip("RNDCQEHILKMFPSTWYV", "KSSSNDNVVELLAASFFA", strict=True))
_ATOM_NAMES = np.array([RESTYPE_NAME_TO_ATOM14_NAMES[RESTYPE_1TO3[letter]] for letter in RESTYPES])
_POLAR = np.isin(np.char.ljust(_ATOM_NAMES, 1).astype("U1"), ["N", "O"])


def place_side_chains(
    types: Int64[np.ndarray, " R"],
    backbone: Float64[np.ndarray, "R 6 3"],
    draws: Draws,
    bonded: Bool[np.ndarray, " R-1"] | None = None,
) -> tuple[Int64[np.ndarray, " R"], Float64[np.ndarray, "R 14 3"]]:
    """The sequence, in which residues without room are replaced by smaller ones, and all its heavy atoms.

    `types`: amino acids 0..19. `backbone`: from `build_backbone`. `bonded`: whether a residue is bonded to the next one;
    without it all are, as in a single chain.
    """
    types = types.copy()
    bonded = np.ones(len(types) - 1, dtype=bool) if bonded is None else bonded
    for attempt in range(len(types)):
        atoms = _pack(types, backbone, draws.at(attempt), bonded)
        clashing = _larger_of_clashing(types, atoms, bonded)
        if len(clashing) == 0:
            break
        types[clashing] = [RESTYPE_ORDER[_SMALLER[RESTYPES[t]]] for t in types[clashing]]
    return types, atoms


def closest_approach(
    types: Int64[np.ndarray, " R"], atoms: Float[np.ndarray, "R 14 3"], bonded: Bool[np.ndarray, " R-1"] | None = None
) -> Float[np.ndarray, "R R"]:
    """Smallest distance between heavy atoms of two residues in Å; infinite on the diagonal.

    Between bonded residues, atoms near the peptide bond are not counted: bond geometry fixes their distances. `bonded`: as in
    `place_side_chains`.
    """
    residues = len(types)
    present = RESTYPE_ATOM14_MASK[types] > 0
    spread = np.where(present[..., None], atoms, np.nan)
    between = np.linalg.norm(spread[:, None, :, None] - spread[None, :, None, :], axis=-1)
    between = np.where(np.isnan(between), np.inf, between)
    index = np.arange(residues - 1)[slice(None) if bonded is None else bonded]
    # Between bonded residues only atoms beyond CB count (slots 0-4 are N, CA, C, O, CB; proline's ring is bonded to its N).
    beyond = np.arange(14) >= 5
    beyond = beyond & (types != RESTYPE_ORDER["P"])[:, None]
    counted = beyond[index, :, None] | beyond[index + 1, None, :]
    ring = (types[index + 1] == RESTYPE_ORDER["P"])[:, None, None]
    counted &= ~(ring & ~beyond[index, :, None])
    between[index, index + 1] = np.where(counted, between[index, index + 1], np.inf)
    between[index + 1, index] = np.swapaxes(between[index, index + 1], 1, 2)
    closest = between.min((2, 3))
    np.fill_diagonal(closest, np.inf)
    return closest


def all_atoms(
    types: Int64[np.ndarray, "..."], chi: Float64[np.ndarray, "... 4"], backbone: Float64[np.ndarray, "... 6 3"]
) -> Float64[np.ndarray, "... 14 3"]:
    """atom14 positions: N, CA, C and O of the backbone, side chains by AF2's rigid groups (algorithm 24) on its frames.

    (AF2's tables have an N and a C for each type, up to 0.05 Å apart; with these the peptide bonds would not be exact.)
    """
    ca, c, n = (torch.from_numpy(np.ascontiguousarray(backbone[..., kind, :])) for kind in (CA, C, N))
    frames = Rigid.from_three_points(2 * ca - c, ca, n)  # so that C lies on the positive x axis
    # AF2's order: omega, phi, psi, chi1..chi4; the first three place no side chain.
    angles = np.concatenate([np.zeros((*types.shape, 3)), chi], -1)
    sin_cos = torch.from_numpy(np.stack([np.sin(angles), np.cos(angles)], -1))
    kinds = torch.from_numpy(types)
    atoms = frames_to_atom14(torsion_angles_to_frames(frames, sin_cos, kinds), kinds).numpy()
    atoms[..., :4, :] = backbone[..., [N, CA, C, O], :]
    return atoms


def _pack(types: np.ndarray, backbone: np.ndarray, draws: Draws, bonded: np.ndarray) -> Float64[np.ndarray, "R 14 3"]:
    """Atoms of the best combination of rotamers that was found."""
    residues = len(types)
    atoms, single = _fitting_rotamers(types, backbone, bonded)
    present = RESTYPE_ATOM14_MASK[types] > 0
    pair = _rotamer_energies(types, atoms, present, bonded)
    found: list[tuple[float, np.ndarray]] = []
    for start in range(4):
        # The first start has the best rotamer of each residue by itself, the others have random ones.
        choice = (draws.at(start).uniform(residues) * (KEPT_ROTAMERS if start else 1)).astype(int)
        for _ in range(12):
            before = choice.copy()
            for i in range(residues):
                choice[i] = (single[i] + pair[i, :, np.arange(residues), choice].sum(0)).argmin()
            if (choice == before).all():
                break
        chosen = np.arange(residues)
        total = single[chosen, choice].sum() + pair[chosen[:, None], choice[:, None], chosen, choice].sum() / 2
        found.append((float(total), choice))
    best = min(found, key=lambda item: item[0])[1]
    return atoms[np.arange(residues), best]


def _fitting_rotamers(types: np.ndarray, backbone: np.ndarray, bonded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The KEPT_ROTAMERS of each residue that fit the backbone best: atoms [R, K, 14, 3] and energies [R, K], best first."""
    chosen_atoms, chosen_energy = [], []
    main = backbone[:, [N, CA, C, O]].reshape(-1, 3)
    main_residue = np.repeat(np.arange(len(types)), 4)
    for i, kind in enumerate(types):
        chi, strain = _rotamers(RESTYPES[kind])
        count = len(chi)
        atoms = all_atoms(np.full(count, kind), chi, np.repeat(backbone[i : i + 1], count, 0))
        side = atoms[:, 5:][:, RESTYPE_ATOM14_MASK[kind, 5:] > 0]
        # Proline's ring is bonded to the preceding residue.
        others = main_residue != i
        if RESTYPES[kind] == "P" and i and bonded[i - 1]:
            others &= main_residue != i - 1
        distance = np.linalg.norm(side[:, :, None] - main[others], axis=-1)
        energy = strain + _repulsion(distance, 3.2).sum((1, 2))
        within = np.linalg.norm(side[:, :, None] - backbone[i, [N, C, O]], axis=-1)
        energy += 0.0 if RESTYPES[kind] == "P" else _repulsion(within, 2.8).sum((1, 2))
        order = np.argsort(energy, kind="stable")[np.arange(KEPT_ROTAMERS) % count]
        chosen_atoms.append(atoms[order])
        chosen_energy.append(energy[order])
    return np.stack(chosen_atoms), np.stack(chosen_energy)


def _rotamers(letter: str) -> tuple[Float64[np.ndarray, "K 4"], Float64[np.ndarray, " K"]]:
    """chi angles in radians of all candidates, and the strain of their deviations from the ideal."""
    if letter in "AG":
        return np.zeros((1, 4)), np.zeros(1)
    if letter == "P":
        chi, strain = np.array(_PROLINE), np.zeros(len(_PROLINE))
    else:
        ideal = np.array(list(itertools.product(*_CHOICES[letter])))
        # Only the first two angles deviate; deviations of the others gain no room.
        steps = [_DEVIATIONS if n < 2 else (0.0,) for n in range(ideal.shape[1])]
        shift = np.array(list(itertools.product(*steps)))
        chi = (ideal[:, None] + shift).reshape(len(ideal) * len(shift), -1)
        strain = np.tile(0.1 * (shift != 0).sum(1), len(ideal))
    return np.deg2rad(np.pad(chi, ((0, 0), (0, 4 - chi.shape[1])))), strain.astype(np.float64)


def _rotamer_energies(
    types: np.ndarray, atoms: np.ndarray, present: np.ndarray, bonded: np.ndarray
) -> Float64[np.ndarray, "R K R K"]:
    """Repulsion between the side chains of two residues, for each pair of their rotamers."""
    residues = len(types)
    energy = np.zeros((residues, KEPT_ROTAMERS, residues, KEPT_ROTAMERS))
    reach = 7.5  # CB to the far end of a side chain, roughly
    cb = atoms[:, 0, 4] + np.where(present[:, 4, None], 0.0, atoms[:, 0, 1])  # CA for glycine
    close = np.triu(np.linalg.norm(cb[:, None] - cb, axis=-1) < 2 * reach, 1)
    contact = np.where(_POLAR[types][:, :, None, None] & _POLAR[types], 2.8, 3.4)
    for i, j in zip(*np.nonzero(close), strict=True):
        a, b = np.nonzero(present[i, 4:])[0] + 4, np.nonzero(present[j, 4:])[0] + 4
        if j == i + 1 and bonded[i]:  # their CB atoms have a fixed distance
            a, b = a[a > 4], b[b > 4]
        if len(a) == 0 or len(b) == 0:
            continue
        distance = np.linalg.norm(atoms[i][:, None, a, None] - atoms[j][None, :, None, b], axis=-1)
        energy[i, :, j] = _repulsion(distance, contact[i][a][:, j][:, b]).sum((2, 3))
        energy[j, :, i] = energy[i, :, j].T
    return energy


def _repulsion(distance: np.ndarray, contact: np.ndarray | float) -> np.ndarray:
    """Zero beyond the contact distance, then quadratic: 10 at 1 Å below it."""
    return 10.0 * np.square(np.maximum(contact - distance, 0.0))


def _larger_of_clashing(types: np.ndarray, atoms: np.ndarray, bonded: np.ndarray) -> np.ndarray:
    """Residues to replace: of each clashing pair the one with more atoms, if a smaller relative exists."""
    first, second = np.nonzero(np.triu(closest_approach(types, atoms, bonded) < CLASH))
    size = RESTYPE_ATOM14_MASK[types].sum(-1)
    size[[RESTYPES[t] not in _SMALLER for t in types]] = 0
    larger = np.where(size[first] >= size[second], first, second)
    return np.unique(larger[size[larger] > 0])

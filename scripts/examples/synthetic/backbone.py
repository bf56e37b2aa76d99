"""Backbones of ideal geometry from their torsion angles, and the derivatives of their atoms by the angles.

Bond lengths, bond angles and omega = 180° are fixed. Only phi and psi vary, so the geometry stays ideal whatever an optimiser
does. The motion from one residue's frame to the next depends only on (psi_i, phi_{i+1}). All these motions are computed at
once and multiplied by a parallel prefix product (log2 R rounds of batched 3 x 3 products).

Shapes: R residues. Angles in radians, lengths in Å.
Source of the constants: Engh and Huber (1991, 2001), as in AlphaFold2's violation terms and alanine's rigid group.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float64

C_N_LENGTH = 1.329
N_CA_LENGTH = 1.459
CA_C_LENGTH = 1.525
N_CA_C_ANGLE = math.radians(111.0)
CA_C_N_ANGLE = math.radians(116.57)
C_N_CA_ANGLE = math.radians(121.35)
OMEGA = math.pi

# Atoms of a backbone array [R, 6, 3]. The centroid represents the side chain: on the line CA-CB, at the middle of a leucine.
N, CA, C, O, CB, CENTROID = range(6)  # noqa: E741

# In the residue's frame (CA at the origin, C on the positive x axis, N in the xy plane).
_N = np.array([N_CA_LENGTH * math.cos(N_CA_C_ANGLE), N_CA_LENGTH * math.sin(N_CA_C_ANGLE), 0.0])
_C = np.array([CA_C_LENGTH, 0.0, 0.0])
_CB = np.array([-0.529, -0.774, -1.205])
_CENTROID = _CB * (2.4 / 1.526)
# C=O in the frame whose x axis runs from CA to C.
_C_TO_O = np.array([0.627, 1.062])


def build_backbone(torsions: Float64[np.ndarray, "R 2"]) -> Float64[np.ndarray, "R 6 3"]:
    """Atoms N, CA, C, O, CB, centroid for (phi, psi), in the frame of the first residue.

    phi of the first residue has no effect; psi of the last one only places its O.
    """
    phi, psi = torsions[:, 0], torsions[:, 1]
    step_rotation, step_translation = _steps(psi[:-1], phi[1:])
    rotation, translation = _prefix_products(
        np.concatenate([np.eye(3)[None], step_rotation]), np.concatenate([np.zeros((1, 3)), step_translation])
    )
    local = np.empty((len(phi), 6, 3))
    local[:, N], local[:, CA], local[:, C], local[:, CB], local[:, CENTROID] = _N, 0.0, _C, _CB, _CENTROID
    # Looking along CA -> C, N is at angle 0, the next N at psi, and O opposite to it.
    local[:, O, 0] = _C[0] + _C_TO_O[0]
    local[:, O, 1], local[:, O, 2] = -np.cos(psi) * _C_TO_O[1], -np.sin(psi) * _C_TO_O[1]
    return np.einsum("rij,raj->rai", rotation, local) + translation[:, None]


def backbone_jacobian(atoms: Float64[np.ndarray, "R 6 3"]) -> Float64[np.ndarray, "R 6 3 T"]:
    """Derivative of each atom by each of the T = 2 R torsions (phi of all residues, then psi), in Å per radian.

    A torsion rotates all later atoms about its bond: derivative = axis x (atom - a point on the axis).
    """
    residues = len(atoms)
    origin = np.concatenate([atoms[:, CA], atoms[:, CA]])
    axis = np.concatenate([atoms[:, CA] - atoms[:, N], atoms[:, C] - atoms[:, CA]])
    axis /= np.linalg.norm(axis, axis=-1, keepdims=True)
    velocity = np.cross(axis, atoms[:, :, None] - origin)
    return np.moveaxis(velocity * _moves(residues)[..., None], 2, 3)


def _moves(residues: int) -> Bool[np.ndarray, "R 6 T"]:
    """Which atoms a torsion rotates: all atoms after its bond, counted from the start of the chain."""
    atom_residue, torsion_residue = np.arange(residues)[:, None, None], np.arange(residues)
    later = np.repeat(atom_residue > torsion_residue, 6, 1)
    same = np.repeat(atom_residue == torsion_residue, 6, 1)
    after_phi = np.isin(np.arange(6), [C, O, CB, CENTROID])[:, None]
    after_psi = (np.arange(6) == O)[:, None]
    return np.concatenate([later | (same & after_phi), later | (same & after_psi)], -1)


def _steps(psi: np.ndarray, phi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next residue's frame in this residue's frame: rotations [S, 3, 3] and translations [S, 3]."""
    n0, ca0, c0 = (np.broadcast_to(x, (len(psi), 3)) for x in (_N, np.zeros(3), _C))
    n1 = _place_atom(n0, ca0, c0, C_N_LENGTH, CA_C_N_ANGLE, psi)
    ca1 = _place_atom(ca0, c0, n1, N_CA_LENGTH, C_N_CA_ANGLE, np.full_like(psi, OMEGA))
    c1 = _place_atom(c0, n1, ca1, CA_C_LENGTH, N_CA_C_ANGLE, phi)
    x = (c1 - ca1) / CA_C_LENGTH
    y = n1 - ca1
    y = y - (y * x).sum(-1, keepdims=True) * x
    y = y / np.linalg.norm(y, axis=-1, keepdims=True)
    return np.stack([x, y, np.cross(x, y)], -1), ca1


def _place_atom(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, length: float, angle: float, torsion: np.ndarray
) -> np.ndarray:
    """The point d with |cd| = length, angle b-c-d and torsion a-b-c-d."""
    axis = (c - b) / np.linalg.norm(c - b, axis=-1, keepdims=True)
    normal = np.cross(b - a, axis)
    normal = normal / np.linalg.norm(normal, axis=-1, keepdims=True)
    across = np.cos(torsion)[:, None] * np.cross(normal, axis) + np.sin(torsion)[:, None] * normal
    return c + length * (-math.cos(angle) * axis + math.sin(angle) * across)


def _prefix_products(rotation: np.ndarray, translation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Products of the rigid motions 0..i for every i (Hillis and Steele's scan)."""
    shift = 1
    while shift < len(rotation):
        left_r, left_t = rotation[:-shift], translation[:-shift]
        right_r, right_t = rotation[shift:], translation[shift:]
        moved = left_t + (left_r @ right_t[..., None])[..., 0]
        translation = np.concatenate([translation[:shift], moved])
        rotation = np.concatenate([rotation[:shift], left_r @ right_r])
        shift *= 2
    return rotation, translation

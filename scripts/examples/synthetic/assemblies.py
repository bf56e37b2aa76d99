"""Two backbones packed against each other: one is turned, and moved along a line until it touches the other one.

Chains lie with the mean of their CA atoms at the origin before they are docked. Many directions and rotations are tried;
those with the largest interfaces are refined, and kept if their interfaces differ. In a symmetric dimer the rotation is a
half turn about an axis at a right angle to the line, so that the same motion takes the second copy back to the first.

Shapes: R and Q residues of the two chains. Å, radians.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64

from evodsp.rng import Draws
from scripts.examples.synthetic.backbone import CA
from scripts.examples.synthetic.folding import CONTACT, normal

STARTS, REFINED, STEPS, STEP = 400, 32, 40, 0.15
"""Random poses; the best of them that are refined, the steps of each refinement, and their size."""
NEAR = 10.0
"""CA atoms of residues of two chains that are near each other are nearer than this."""
CLOSEST_CA = 4.0
"""CA atoms of two chains are at least this far apart, also where other atoms may overlap."""
MOST_SHARED = 0.2
"""Interfaces differ if they share at most this part of their pairs of near residues."""
_ROTATION_NOISE, _DIRECTION_NOISE = np.deg2rad(2.0), np.deg2rad(1.5)


@dataclass(frozen=True)
class Pose:
    """How a chain lies beside another: turned by `rotation`, then moved along the unit vector `direction` by `distance`, or
    further if it would overlap."""

    rotation: Float64[np.ndarray, "3 3"]
    direction: Float64[np.ndarray, "3"]
    distance: float = -np.inf

    def place(
        self, first: Float64[np.ndarray, "R 6 3"], second: Float64[np.ndarray, "Q 6 3"], overlap: float = 0.0
    ) -> Float64[np.ndarray, "Q 6 3"]:
        """The second chain at its place beside the first. `overlap`: how much nearer than contact atoms may come."""
        turned = second @ self.rotation.T
        distance = max(self.distance, _touching_distance(first, turned, self.direction, overlap))
        return turned + distance * self.direction

    def settled(self, first: Float64[np.ndarray, "R 6 3"], second: Float64[np.ndarray, "Q 6 3"]) -> Pose:
        """The pose with the distance at which these two chains touch."""
        return replace(self, distance=_touching_distance(first, second @ self.rotation.T, self.direction))

    def shaken(self, draws: Draws) -> Pose:
        """A pose that differs a little, as those of related complexes do."""
        direction = self.direction + _DIRECTION_NOISE * normal(draws.at("direction"), 3)
        turn = _ROTATION_NOISE * normal(draws.at("rotation"), 3)
        angle = float(np.linalg.norm(turn))
        rotation = _rotation(turn / angle, angle) @ self.rotation
        return replace(self, rotation=rotation, direction=direction / np.linalg.norm(direction))


def dock(
    first: Float64[np.ndarray, "R 6 3"], second: Float64[np.ndarray, "Q 6 3"], count: int, symmetric: bool, draws: Draws
) -> list[Pose]:
    """`count` poses with large and different interfaces, the largest one first.

    `symmetric`: for copies of one chain, related by two-fold axes. If there are not enough different ones, others follow.
    """
    starts = [normal(draws.at("start", number), 5, 3) for number in range(STARTS)]
    sizes = [_interface_size(first, second, _pose(start, symmetric)) for start in starts]
    found: list[tuple[int, Pose]] = []
    for number in np.argsort(-np.array(sizes), kind="stable")[:REFINED].tolist():
        place, size = starts[number], sizes[number]
        for step in range(STEPS):
            moved = place + STEP * normal(draws.at("step", number, step), 5, 3)
            moved_size = _interface_size(first, second, _pose(moved, symmetric))
            if moved_size > size:
                place, size = moved, moved_size
        found.append((size, _pose(place, symmetric)))
    found.sort(key=lambda pair: -pair[0])
    poses = [pose for _, pose in found]
    pairs = [ca_distances(first, pose.place(first, second)) < NEAR for pose in poses]
    kept: list[int] = []
    for number in range(len(poses)):
        if all(_shared(pairs[number], pairs[other]) <= MOST_SHARED for other in kept):
            kept.append(number)
    others = [number for number in range(len(poses)) if number not in kept]
    return [poses[number].settled(first, second) for number in [*kept, *others][:count]]


def ca_distances(
    first: Float64[np.ndarray, "R 6 3"], second: Float64[np.ndarray, "Q 6 3"]
) -> Float64[np.ndarray, "R Q"]:
    """Distances between the CA atoms of two chains."""
    return np.linalg.norm(first[:, None, CA] - second[None, :, CA], axis=-1)


def centred(atoms: Float64[np.ndarray, "R 6 3"]) -> Float64[np.ndarray, "R 6 3"]:
    """The chain with the mean of its CA atoms at the origin."""
    return atoms - atoms[:, CA].mean(0)


def _interface_size(first: np.ndarray, second: np.ndarray, pose: Pose) -> int:
    """The number of pairs of residues that are near each other."""
    return int((ca_distances(first, pose.place(first, second)) < NEAR).sum())


def _shared(one: Bool[np.ndarray, "R Q"], other: Bool[np.ndarray, "R Q"]) -> float:
    """The part of the near pairs of one of two poses that both have."""
    return float((one & other).sum() / max(1, (one | other).sum()))


def _pose(numbers: Float64[np.ndarray, "5 3"], symmetric: bool) -> Pose:
    """The pose that normally distributed numbers stand for: all rotations and directions are equally likely."""
    direction = numbers[0] / np.linalg.norm(numbers[0])
    if symmetric:
        axis = numbers[1] - (numbers[1] @ direction) * direction
        return Pose(_rotation(axis / np.linalg.norm(axis), np.pi), direction)
    q, r = np.linalg.qr(numbers[2:])
    q = q * np.sign(np.diag(r))
    return Pose(q * np.linalg.det(q), direction)


def _rotation(axis: Float64[np.ndarray, "3"], angle: float) -> Float64[np.ndarray, "3 3"]:
    """The rotation about a unit vector (Rodrigues)."""
    x, y, z = axis
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def _touching_distance(
    first: Float64[np.ndarray, "R 6 3"],
    second: Float64[np.ndarray, "Q 6 3"],
    direction: Float64[np.ndarray, "3"],
    overlap: float = 0.0,
) -> float:
    """How far along the unit vector `direction` the second chain lies when it touches the first from outside.

    Two atoms x apart are at their smallest distance c where |x - t direction| = c; the largest such t of all pairs counts.
    """
    one, other = first.reshape(-1, 3), second.reshape(-1, 3)
    along = (one @ direction)[:, None] - other @ direction
    squared = np.square(one).sum(-1)[:, None] + np.square(other).sum(-1) - 2 * one @ other.T
    smallest = CONTACT - overlap
    smallest[CA, CA] = CLOSEST_CA
    reach = np.square(np.tile(smallest, (len(first), len(second)))) - (squared - np.square(along))
    return float(np.where(reach >= 0, along + np.sqrt(np.maximum(reach, 0.0)), -np.inf).max())

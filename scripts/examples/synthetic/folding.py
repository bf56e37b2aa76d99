"""From a blueprint to a compact backbone: Levenberg-Marquardt on phi and psi.

The objective is a sum of squares: torsions in the allowed regions of the Ramachandran map, no overlaps, the blueprint's
hydrogen bonds, the radius of gyration of real proteins (2.2 N^0.38 Å, Skolnick et al. 1997) and, while the fold forms, the
distance to the blueprint's sketch. Bond lengths and angles are fixed.

Shapes: R residues, T = 2 R torsions, K residuals. Å, radians.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from evodsp.rng import Draws
from scripts.examples.synthetic.backbone import CA, N, O, backbone_jacobian, build_backbone
from scripts.examples.synthetic.blueprint import Blueprint

# Centres of the allowed regions (phi, psi) in degrees.
HELIX_REGION = (-63.0, -42.0)
STRAND_REGION = (-118.0, 132.0)
# Regions allowed in loops: helix, strand, polyproline II, bridge, and the left-handed ones (for glycine).
LOOP_REGIONS = np.array([(-65, -40), (-115, 130), (-70, 145), (-90, 0), (58, 38), (85, 10)], dtype=np.float64)

CONTACT = np.array(
    [
        [3.10, 3.50, 3.50, 2.80, 3.40, 3.40],
        [3.50, 3.80, 3.70, 3.30, 3.80, 3.80],
        [3.50, 3.70, 3.60, 3.20, 3.70, 3.70],
        [2.80, 3.30, 3.20, 3.00, 3.40, 3.40],
        [3.40, 3.80, 3.70, 3.40, 3.80, 3.80],
        [3.40, 3.80, 3.70, 3.40, 3.80, 4.20],
    ]
)
"""Smallest distances in Å between atoms of residues that are not neighbours; order N, CA, C, O, CB, centroid."""
HYDROGEN_BOND = 2.9


@dataclass(frozen=True)
class Weights:
    """Factors of the residuals (not of their squares)."""

    target: float
    bonds: float
    overlap: float
    torsions: float = 1.0
    size: float = 80.0


@dataclass(frozen=True)
class Goals:
    """The targets of the objective.

    `target`: positions of the CA atoms of `target_mask`, up to superposition. `regions`: preferred (phi, psi); a deviation of
    `region_width` costs 1. `hydrogen_bonds`: pairs (residue of N, residue of O).
    """

    regions: Float64[np.ndarray, "R 2"]
    region_width: Float64[np.ndarray, " R"]
    target: Float64[np.ndarray, "R 3"]
    target_mask: Bool[np.ndarray, " R"]
    hydrogen_bonds: Int64[np.ndarray, "K 2"]


# Every variant is fitted to its sketch. The best third is refined further, with a falling weight of the sketch.
_SKETCHING = ((20, Weights(target=1.0, bonds=0.0, overlap=0.0)), (12, Weights(target=1.0, bonds=1.5, overlap=0.7)))
_SETTLING = (
    (15, Weights(target=0.7, bonds=2.0, overlap=1.0)),
    (40, Weights(target=0.5, bonds=5.0, overlap=3.0)),
    (40, Weights(target=0.15, bonds=5.0, overlap=12.0)),
)
_JUDGE = Weights(target=0.7, bonds=4.0, overlap=5.0)


def expected_radius_of_gyration(residues: int) -> float:
    """Radius of gyration of a globular protein's CA atoms, in Å."""
    return float(2.2 * residues**0.38)


def fold(blueprint: Blueprint, draws: Draws) -> Float64[np.ndarray, "R 2"]:
    """phi and psi in radians of the best of the blueprint's variants."""
    goals = [_blueprint_goals(blueprint, v, draws.at("regions", v)) for v in range(len(blueprint.sketch))]
    sketched = [(_through(_SKETCHING, goal.regions, goal), goal) for goal in goals]
    sketched.sort(key=lambda pair: cost(pair[0], pair[1], _SKETCHING[-1][1]))
    settled = [(_through(_SETTLING, *pair), pair[1]) for pair in sketched[: max(1, len(sketched) // 3)]]
    return min(settled, key=lambda pair: cost(pair[0], pair[1], _JUDGE))[0]


def _through(stages: tuple[tuple[int, Weights], ...], torsions: np.ndarray, goals: Goals) -> Float64[np.ndarray, "R 2"]:
    for steps, weights in stages:
        torsions = minimise(torsions, goals, weights, steps)
    return torsions


def vary(
    blueprint: Blueprint, torsions: Float64[np.ndarray, "R 2"], draws: Draws, low: float = 0.45, high: float = 0.8
) -> Float64[np.ndarray, "R 2"]:
    """A relative of a backbone: the RMSD of its CA atoms after superposition is between `low` and `high` Å.

    The fold is bent as a whole, its helices and strands are shifted and rotated a little as rigid bodies, and the chain is
    relaxed again. The resulting distance depends on the fold, so the size of the changes is adjusted a few times if needed.
    """
    original = build_backbone(torsions)[:, CA]
    amount, middle = high, (low + high) / 2
    found: list[tuple[float, np.ndarray]] = []
    for _ in range(6):
        relative = _relax(blueprint, torsions, _push(blueprint, original, amount, draws), draws.at("torsions"))
        distance = rmsd(build_backbone(relative)[:, CA], original)
        found.append((abs(distance - middle), relative))
        if low <= distance <= high:
            break
        amount *= float(np.clip(middle / distance, 0.6, 1.5))
    return min(found, key=lambda pair: pair[0])[1]


def rmsd(a: Float64[np.ndarray, "P 3"], b: Float64[np.ndarray, "P 3"]) -> float:
    """Root mean square distance after superposition, in Å."""
    return float(np.sqrt(np.square(superpose(a, b) - b).sum(-1).mean()))


def _push(blueprint: Blueprint, ca: np.ndarray, amount: float, draws: Draws) -> Float64[np.ndarray, "R 3"]:
    """Target positions of the CA atoms: bent by about `amount` Å, with each helix and strand moved by about as much."""
    # A sheet can only bend: hydrogen bonds prevent shifts of single strands.
    across = (ca - ca.mean(0)) / 10.0
    target = ca + 0.7 * amount * np.einsum("xij,ri,rj->rx", normal(draws.at("bend"), 3, 3, 3), across, across)
    for number, (start, stop) in enumerate(blueprint.elements()):
        here = draws.at("element", number)
        shift = amount * normal(here.at("shift"), 3)
        turn = np.deg2rad(4.0 * amount) * normal(here.at("turn"), 3)
        middle = target[start:stop].mean(0)
        target[start:stop] += shift + np.cross(turn, target[start:stop] - middle)
    return target


def _relax(blueprint: Blueprint, torsions: np.ndarray, target: np.ndarray, draws: Draws) -> Float64[np.ndarray, "R 2"]:
    """The backbone moved towards the target as far as overlaps, hydrogen bonds and torsions allow."""
    goals = Goals(
        regions=torsions + np.deg2rad(4.0) * normal(draws, *torsions.shape),
        region_width=np.deg2rad(np.where(blueprint.is_a("H"), 8.0, 15.0)),
        target=target,
        target_mask=~blueprint.is_a("L"),
        hydrogen_bonds=blueprint.hydrogen_bonds,
    )
    for steps, weights in ((20, Weights(2.0, 1.0, 3.0)), (40, Weights(0.5, 3.0, 12.0))):
        torsions = minimise(torsions, goals, weights, steps)
    return torsions


def minimise(
    torsions: Float64[np.ndarray, "R 2"], goals: Goals, weights: Weights, steps: int
) -> Float64[np.ndarray, "R 2"]:
    """At most `steps` steps of Levenberg-Marquardt; a step changes no torsion by more than 20°."""
    damping, now = 1.0, cost(torsions, goals, weights)
    residuals, jacobian = _residuals(torsions, goals, weights, derivative=True)
    for _ in range(steps):
        normal = jacobian.T @ jacobian
        move = np.linalg.solve(normal + damping * np.eye(len(normal)), -(jacobian.T @ residuals))
        move *= min(1.0, np.deg2rad(20.0) / np.abs(move).max())
        candidate = torsions + move.reshape(2, -1).T
        value = cost(candidate, goals, weights)
        if value < now:
            small = now - value < 1e-4 * now
            torsions, now, damping = candidate, value, max(damping / 3, 1e-3)
            if small:
                break
            residuals, jacobian = _residuals(torsions, goals, weights, derivative=True)
        else:
            damping *= 4
            if damping > 1e6:
                break
    return torsions


def cost(torsions: Float64[np.ndarray, "R 2"], goals: Goals, weights: Weights) -> float:
    """Sum of squared residuals."""
    residuals, _ = _residuals(torsions, goals, weights, derivative=False)
    return float(residuals @ residuals)


def overlap(atoms: Float64[np.ndarray, "R 6 3"]) -> float:
    """Sum of squared overlaps between atoms of residues two or more apart, in Å^2."""
    _, _, _, depth = _overlaps(atoms)
    return float(depth @ depth)


def superpose(
    moving: Float64[np.ndarray, "P 3"], fixed: Float64[np.ndarray, "P 3"], carried: np.ndarray | None = None
) -> np.ndarray:
    """`moving` superposed onto `fixed` (Kabsch, proper rotation). `carried`: the points [..., 3] that move in its place."""
    centre_m, centre_f = moving.mean(0), fixed.mean(0)
    u, _, vt = np.linalg.svd((moving - centre_m).T @ (fixed - centre_f))
    u[:, 2] *= np.sign(np.linalg.det(u @ vt))
    return ((moving if carried is None else carried) - centre_m) @ u @ vt + centre_f


def _residuals(
    torsions: np.ndarray, goals: Goals, weights: Weights, derivative: bool
) -> tuple[Float64[np.ndarray, " K"], Float64[np.ndarray, "K T"]]:
    """All residuals, and their derivatives by the torsions if `derivative` (otherwise no columns)."""
    residues = len(torsions)
    atoms = build_backbone(torsions)
    moves = backbone_jacobian(atoms) if derivative else np.zeros((residues, 6, 3, 0))
    rows, slopes = [], []

    away = np.remainder(torsions - goals.regions + np.pi, 2 * np.pi) - np.pi
    factor = weights.torsions / np.concatenate([goals.region_width, goals.region_width])
    rows.append(away.T.reshape(-1) * factor)
    slopes.append(np.diag(factor) if derivative else np.zeros((2 * residues, 0)))

    if weights.target:
        ca, mask = atoms[:, CA], goals.target_mask
        rows.append(weights.target * (ca[mask] - superpose(goals.target[mask], ca[mask])).reshape(-1))
        slopes.append(weights.target * moves[mask, CA].reshape(len(rows[-1]), -1))

    if weights.bonds:
        donor, acceptor = goals.hydrogen_bonds.T
        between = atoms[donor, N] - atoms[acceptor, O]
        distance = np.linalg.norm(between, axis=-1)
        stretch = distance - HYDROGEN_BOND
        # Weighted as in a Cauchy loss: a bond that cannot form must not break the others.
        pull = weights.bonds / np.sqrt(1 + np.square(stretch / 2.0))
        rows.append(pull * stretch)
        along = (between / distance[:, None] * pull[:, None])[:, None]
        slopes.append((along @ (moves[donor, N] - moves[acceptor, O]))[:, 0])

    if weights.overlap:
        first, second, direction, depth = _overlaps(atoms)
        rows.append(weights.overlap * depth)
        flat = moves.reshape(residues * 6, 3, -1)
        slopes.append(-weights.overlap * (direction[:, None] @ (flat[first] - flat[second]))[:, 0])

    centred = atoms[:, CA] - atoms[:, CA].mean(0)
    size = np.sqrt(np.square(centred).sum(-1).mean())
    ratio = size / expected_radius_of_gyration(residues)
    excess = max(0.0, ratio - 1.03) - max(0.0, 0.94 - ratio)
    rows.append(np.array([weights.size * excess]))
    slope = np.einsum("rx,rxt->t", centred, moves[:, CA]) / (residues * size * expected_radius_of_gyration(residues))
    slopes.append(weights.size * float(excess != 0) * slope[None])
    return np.concatenate(rows), np.concatenate(slopes)


def _overlaps(atoms: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of overlapping atoms (flat indices), the unit vectors between them and the depths of the overlaps."""
    residues = len(atoms)
    first, second = np.triu_indices(residues, 2)
    # Residues whose CA atoms are further apart have no contact; skipping them saves most of the work.
    near = np.square(atoms[first, CA] - atoms[second, CA]).sum(-1) < 10.0**2
    first, second = first[near], second[near]
    between = atoms[first][:, :, None] - atoms[second][:, None]
    distance = np.sqrt(np.square(between).sum(-1))
    pair, a, b = np.nonzero(distance < CONTACT)
    gap = distance[pair, a, b]
    return first[pair] * 6 + a, second[pair] * 6 + b, between[pair, a, b] / gap[:, None], CONTACT[a, b] - gap


def normal(draws: Draws, *shape: int) -> np.ndarray:
    """Standard normal numbers (Box and Muller)."""
    radius = np.sqrt(-2 * np.log1p(-draws.at("radius").uniform(*shape)))
    return radius * np.cos(2 * np.pi * draws.at("angle").uniform(*shape))


def _blueprint_goals(blueprint: Blueprint, variant: int, draws: Draws) -> Goals:
    regions = LOOP_REGIONS[(draws.uniform(len(blueprint.structure)) * len(LOOP_REGIONS)).astype(int)]
    regions[blueprint.is_a("H")] = HELIX_REGION
    regions[blueprint.is_a("E")] = STRAND_REGION
    width = np.select([blueprint.is_a("H"), blueprint.is_a("E")], [8.0, 12.0], 25.0)
    sketch = blueprint.sketch[variant]
    return Goals(
        regions=np.deg2rad(regions),
        region_width=np.deg2rad(width),
        target=np.nan_to_num(sketch),
        target_mask=np.isfinite(sketch[:, 0]),
        hydrogen_bonds=blueprint.hydrogen_bonds,
    )

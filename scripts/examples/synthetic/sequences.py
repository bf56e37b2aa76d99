"""Sequences for a fold, from a Potts model: fields give the preferences of positions, couplings make contacts co-vary.

Fields: frequencies of amino acids in helices, strands and loops, buried or exposed, plus a random preference of the family,
which makes its members homologous. Couplings between residues in contact: hydrophobic beside hydrophobic, opposite charges,
large beside small, and a random pairing for each contact; with charge and size alone most contacts would show no signal.
Sequences are drawn by Gibbs sampling, for all sequences and all mutually uncoupled positions at once.

Shapes: R residues, S sequences, 20 amino acids in AF2's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from evodsp.geometry.residues import RESTYPE_ORDER, RESTYPES
from evodsp.rng import Draws

CONTACT_DISTANCE = 8.0
PREFERENCE, COUPLING = 1.0, 1.6

# Rows in AF2's order A R N D C Q E G H I L K M F P S T W Y V.
_HELIX = np.array(
    [1.4, 1.0, 0.7, 0.9, 0.5, 1.2, 1.5, 0.25, 0.7, 0.9, 1.4, 1.2, 1.2, 0.8, 0.02, 0.7, 0.6, 0.5, 0.7, 0.8]
)
_STRAND = np.array(
    [0.7, 0.9, 0.5, 0.4, 0.8, 0.9, 0.7, 0.4, 0.9, 1.7, 1.1, 0.8, 1.0, 1.3, 0.02, 0.8, 1.4, 0.9, 1.4, 1.9]
)
_LOOP = np.array([0.7, 0.9, 1.5, 1.5, 0.4, 0.8, 0.8, 1.6, 0.8, 0.4, 0.5, 1.0, 0.4, 0.5, 1.6, 1.4, 1.1, 0.4, 0.6, 0.5])
_BURIED = np.array(
    [1.5, 0.1, 0.15, 0.1, 0.7, 0.15, 0.1, 0.7, 0.3, 2.6, 3.0, 0.08, 1.3, 1.7, 0.5, 0.4, 0.5, 0.5, 0.8, 2.6]
)
_EXPOSED = np.array(
    [0.9, 1.5, 1.3, 1.6, 0.15, 1.5, 2.2, 1.0, 0.8, 0.3, 0.4, 2.1, 0.3, 0.2, 1.0, 1.3, 1.2, 0.15, 0.4, 0.4]
)
HYDROPHOBICITY = np.array(  # Kyte and Doolittle (1982), over 4.5
    [1.8, -4.5, -3.5, -3.5, 2.5, -3.5, -3.5, -0.4, -3.2, 4.5, 3.8, -3.9, 1.9, 2.8, -1.6, -0.8, -0.7, -0.9, -1.3, 4.2]
) / 4.5  # fmt: skip
CHARGE = np.array([0, 1, 0, -1, 0, 0, -1, 0, 0.1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0])
# Side chain volume, standardised (after Zamyatnin 1972).
_VOLUME = np.array([89, 174, 114, 111, 109, 144, 138, 60, 153, 167, 167, 169, 163, 190, 113, 89, 116, 228, 194, 140.0])
_SIZE = (_VOLUME - _VOLUME.mean()) / _VOLUME.std()
_GLYCINE, _PROLINE = RESTYPE_ORDER["G"], RESTYPE_ORDER["P"]


@dataclass(frozen=True)
class PottsModel:
    """log P(s) = sum_i fields[i, s_i] + sum_{i<j} couplings[i, j, s_i, s_j] + constant. `contacts` are the coupled pairs."""

    fields: Float64[np.ndarray, "R 20"]
    couplings: Float64[np.ndarray, "R R 20 20"]
    contacts: Bool[np.ndarray, "R R"]

    def heated(self, temperature: float) -> PottsModel:
        """The model at another temperature: the higher it is, the less a position prefers some letters."""
        return PottsModel(self.fields / temperature, self.couplings / temperature, self.contacts)

    def sample(
        self, start: Int64[np.ndarray, "S R"], sweeps: int, draws: Draws, rate: Float64[np.ndarray, " S"] | float = 1.0
    ) -> Int64[np.ndarray, "S R"]:
        """Gibbs sampling from `start`. In each sweep every residue of a sequence is redrawn with probability `rate`."""
        sequences = len(start)
        state = start.copy()
        one_hot = np.eye(20)[state]
        for sweep in range(sweeps):
            for number, positions in enumerate(self._colours()):
                here = draws.at(sweep, number)
                logits = one_hot.reshape(sequences, -1) @ self._incoming(positions)
                logits = logits.reshape(sequences, len(positions), 20) + self.fields[positions]
                weight = np.exp(logits - logits.max(-1, keepdims=True)).cumsum(-1)
                level = here.at("letter").uniform(sequences, len(positions), 1) * weight[..., -1:]
                drawn = (level >= weight).sum(-1)
                redraw = (
                    here.at("redraw").uniform(sequences, len(positions)) < np.broadcast_to(rate, sequences)[:, None]
                )
                state[:, positions] = np.where(redraw, drawn, state[:, positions])
                one_hot[:, positions] = np.eye(20)[state[:, positions]]
        return state

    def _incoming(self, positions: np.ndarray) -> np.ndarray:
        """[R * 20, P * 20]: matrix from the one-hot letters of all positions to the logits at `positions`."""
        residues = len(self.fields)
        return self.couplings[:, positions].transpose(0, 2, 1, 3).reshape(residues * 20, len(positions) * 20)

    def _colours(self) -> list[np.ndarray]:
        """Groups of positions without couplings inside a group (greedy colouring)."""
        colour = np.full(len(self.fields), -1)
        for i in np.argsort(-self.contacts.sum(1), kind="stable"):
            taken = set(colour[self.contacts[i]].tolist())
            colour[i] = next(c for c in range(len(colour)) if c not in taken)
        return [np.nonzero(colour == c)[0] for c in range(colour.max() + 1)]


def make_potts_model(
    structure: str,
    torsions: Float64[np.ndarray, "R 2"],
    ca: Float64[np.ndarray, "R 3"],
    cb: Float64[np.ndarray, "R 3"],
    draws: Draws,
) -> PottsModel:
    """The model of one family. `structure`: R letters H, E, L; `torsions`: phi and psi in radians; atoms in Å."""
    table = np.stack([{"H": _HELIX, "E": _STRAND, "L": _LOOP}[letter] for letter in structure])
    hidden = burial(ca, cb)[:, None]
    fields = np.log(table) + hidden * np.log(_BURIED) + (1 - hidden) * np.log(_EXPOSED)
    fields += PREFERENCE * draws.at("taste").gumbel(*fields.shape)
    phi = np.rad2deg(torsions[:, 0])
    loop = np.array([letter == "L" for letter in structure])
    # Left-handed residues are glycines. Proline's ring fixes phi, and its nitrogen forms no hydrogen bond.
    fields[:, _PROLINE] -= 30.0 * ~(loop & (np.abs(phi + 65) < 15))
    left = loop & (phi > 0) & (phi < 150)
    fields[left] -= 30.0
    fields[left, _GLYCINE] += 30.0

    contacts = contact_map(cb)
    first, second = np.nonzero(np.triu(contacts))
    pairing = draws.at("pairing")
    left_sign = np.sign(pairing.at(0).uniform(len(first), 20) - 0.5)
    right_sign = np.sign(pairing.at(1).uniform(len(first), 20) - 0.5)
    chemistry = (
        0.5 * np.outer(HYDROPHOBICITY, HYDROPHOBICITY) - 0.8 * np.outer(CHARGE, CHARGE) - 0.25 * np.outer(_SIZE, _SIZE)
    )
    strength = COUPLING / np.sqrt(np.maximum(1.0, contacts.sum(1) / 3))
    pair = (chemistry + 0.8 * left_sign[:, :, None] * right_sign[:, None, :]) * np.sqrt(
        strength[first] * strength[second]
    )[:, None, None]
    couplings = np.zeros((len(structure), len(structure), 20, 20))
    couplings[first, second] = pair
    couplings[second, first] = pair.transpose(0, 2, 1)
    return PottsModel(fields, couplings, contacts)


def contact_map(cb: Float64[np.ndarray, "R 3"]) -> Bool[np.ndarray, "R R"]:
    """Pairs of residues, three or more apart, whose CB atoms are nearer than 8 Å."""
    apart = np.abs(np.subtract.outer(np.arange(len(cb)), np.arange(len(cb)))) >= 3
    return (np.linalg.norm(cb[:, None] - cb[None], axis=-1) < CONTACT_DISTANCE) & apart


def burial(ca: Float64[np.ndarray, "R 3"], cb: Float64[np.ndarray, "R 3"]) -> Float64[np.ndarray, " R"]:
    """0 (exposed) to 1 (buried), by the rank of the number of CA atoms within 12 Å in the direction of the side chain."""
    to_others = ca[None] - ca[:, None]
    ahead = (to_others * (cb - ca)[:, None]).sum(-1) > 0
    count = (ahead & (np.linalg.norm(to_others, axis=-1) < 12.0)).sum(-1)
    rank = np.argsort(np.argsort(count, kind="stable"), kind="stable") / (len(ca) - 1)
    # The upper two fifths of the ranks are core, the lower two fifths surface.
    return np.clip((rank - 0.4) / 0.2, 0.0, 1.0)


def to_letters(types: np.ndarray) -> str:
    """One-letter codes of amino acid numbers 0..19."""
    return "".join(RESTYPES[t] for t in types)

"""Compare the losses of complexes live with those of DeepMind's JAX code, term by term.

    .venv/bin/python -m scripts.parity.chain_losses --alphafold .venv-parity/bin/python [--seed 0]

The model's outputs and labels are random: three chains, with padding and atoms that are not resolved. The exit code is 1 if a
difference is larger than allowed, and 2 if DeepMind's side could not run. What DeepMind's code lacks (chain centres), and what
it does otherwise (atoms of equal numbers in two chains), is compared with formulas in tests/losses.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch
from torch import Tensor

from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import RESTYPE_ATOM14_MASK
from evodsp.losses.structure import backbone_fape_by_chain, sidechain_fape, unique_residue_numbers
from evodsp.losses.violation import find_violations, violation_loss

from . import table
from .compare import deepminds_side, program

LENGTHS, PADDING, ITERATIONS = (23, 31, 14), 6, 4
DEEPMINDS_CLAMP = 1000.0
"""Å"""


def draw(seed: int) -> dict[str, np.ndarray]:
    """Outputs and labels in float32, Å, without a batch axis. Errors of FAPE lie on both sides of the clamps."""
    rng, residues = np.random.default_rng(seed), sum(LENGTHS) + PADDING
    chain = np.repeat(np.arange(len(LENGTHS) + 1), (*LENGTHS, PADDING))
    chain = np.where(chain < len(LENGTHS), chain + 1, 0)
    real = chain > 0
    aatype = np.where(real, rng.integers(0, 20, residues), 20)
    exists = RESTYPE_ATOM14_MASK[aatype] * real[:, None]

    def nearest_rotations(matrices: np.ndarray) -> np.ndarray:
        u, _, v = np.linalg.svd(matrices)
        return u * np.stack([np.ones_like(d := np.linalg.det(u @ v)), np.ones_like(d), d], -1)[..., None, :] @ v

    def rotations(*shape: int, around: np.ndarray | float = 0.0, scale: float = 1.0) -> np.ndarray:
        return nearest_rotations(around + scale * rng.standard_normal((*shape, 3, 3)))

    def positions(*shape: int, scale: float) -> np.ndarray:
        return scale * rng.standard_normal((*shape, 3))

    def observed(mask: np.ndarray) -> np.ndarray:
        return mask * (rng.random(mask.shape) > 0.2)

    backbone, frames, atoms = (
        positions(residues, scale=12),
        positions(residues, 8, scale=9),
        positions(residues, 14, scale=9),
    )
    true_rotations, true_frame_rotations, numbers = rotations(residues), rotations(residues, 8), np.arange(residues)
    arrays = {
        "asym_id": chain,
        "aatype": aatype,
        "index_apart": numbers + 50 * chain,
        "index_following": numbers,
        "exists": exists,
        "backbone_mask": observed(1.0 * real),
        "frame_mask": observed(np.repeat(1.0 * real[:, None], 8, 1)),
        "atom_mask": observed(exists),
        "true_backbone_rotation": true_rotations,
        "true_backbone_translation": backbone,
        "backbone_rotation": rotations(ITERATIONS, residues, around=true_rotations, scale=0.3),
        "backbone_translation": backbone + positions(ITERATIONS, residues, scale=5),
        "true_frame_rotation": true_frame_rotations,
        "true_frame_translation": frames,
        "frame_rotation": rotations(residues, 8, around=true_frame_rotations, scale=0.3),
        "frame_translation": frames + positions(residues, 8, scale=5),
        "true_atom14": atoms,
        "atom14": atoms + positions(residues, 14, scale=2),
    }
    return {name: x.astype(np.int32 if x.dtype.kind == "i" else np.float32) for name, x in arrays.items()}


def evodsp_side(subject: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The terms, and gradients of each by the predicted positions, under the other side's names."""
    x = {name: torch.from_numpy(values)[None] for name, values in subject.items()}
    for name in ("backbone_rotation", "backbone_translation"):
        x[name] = x[name].movedim(0, 1)  # iterations, batch
    for name in ("backbone_translation", "frame_translation", "atom14"):
        x[name].requires_grad_()
    backbone, truth = (Rigid(x[f"{of}_rotation"], x[f"{of}_translation"]) for of in ("backbone", "true_backbone"))
    by_chain = backbone, truth, x["backbone_mask"], x["asym_id"], None
    within, across = backbone_fape_by_chain(*by_chain, interface_clamp=DEEPMINDS_CLAMP, floored=True)
    frames, true_frames = (Rigid(x[f"{of}_rotation"], x[f"{of}_translation"]) for of in ("frame", "true_frame"))
    index, following = (unique_residue_numbers(x[f"index_{name}"], x["asym_id"]) for name in ("apart", "following"))
    found = find_violations(x["atom14"], x["exists"], index, x["aatype"])
    terms = {
        "backbone_fape": within,
        "interface_fape": across,
        "interface_fape_30": backbone_fape_by_chain(*by_chain, floored=True)[1],
        "sidechain_fape": sidechain_fape(
            frames, true_frames, x["frame_mask"], x["atom14"], x["true_atom14"], x["atom_mask"], floored=True
        ),
        "violation": violation_loss(found, x["exists"]),
    }
    results: dict[str, Tensor] = {
        **terms,
        "bonds": found.bond_loss,
        "angles ca-c-n": found.angle_ca_c_n_loss,
        "angles c-n-ca": found.angle_c_n_ca_loss,
        "clashes": found.clash_atom_loss,
        "within residues": found.within_atom_loss,
        "clashes, numbers that follow": find_violations(
            x["atom14"], x["exists"], following, x["aatype"]
        ).clash_atom_loss,
    }
    for name, term in terms.items():
        by = [key for key in ("backbone_translation", "frame_translation", "atom14") if reaches(name, key)]
        gradients = torch.autograd.grad(term.sum(), [x[key] for key in by], retain_graph=True)
        results |= {f"gradient/{name}/{key}": value for key, value in zip(by, gradients, strict=True)}
    return {name: value.detach().numpy() for name, value in results.items()}


def reaches(term: str, tensor: str) -> bool:
    """Whether a term depends on a tensor of predicted positions."""
    return tensor in {"violation": ("atom14",), "sidechain_fape": ("frame_translation", "atom14")}.get(
        term, ("backbone_translation",)
    )


def rows(ours: table.Arrays, theirs: table.Arrays) -> list[table.Row]:
    """One row per quantity of the other side: the largest difference, relative to the largest value."""
    found = []
    for name, values in sorted(theirs.items()):
        largest = float(np.abs(values).max())
        away = float(np.abs(ours[name].reshape(values.shape) - values).max()) / largest
        found.append(table.Row(name, away, table.LOSS_TERM, f"relative to {largest:.5g}"))
    return found


def run(options: argparse.Namespace) -> bool:
    subject = draw(options.seed)
    theirs = deepminds_side(options.alphafold, "alphafold_chain_losses_side", subject)
    found = rows(evodsp_side(subject), theirs)
    print(f"losses of complexes, seed {options.seed}: {LENGTHS} residues and {PADDING} padded ones")
    print(table.text(found))
    return all(row.passed for row in found)


def main(arguments: list[str] | None = None) -> int:
    what = "Compare the losses of complexes live with DeepMind's JAX code."
    return program(run, what, "the outputs and labels", arguments)


if __name__ == "__main__":
    sys.exit(main())

"""DeepMind's side of the comparison of the losses of complexes, on the arrays of one .npz file, its outputs to another.

    .venv-parity/bin/python scripts/parity/alphafold_chain_losses_side.py SUBJECT.npz RESULT.npz

The functions of the package's `folding_multimer` are used as they are, but for the deviation of the CA-C-N angle (see
`alphafold_side.py`). The package's multimer model refuses to compute its loss as a whole, so terms are called one by one,
as that model would call them.
"""

from __future__ import annotations

from typing import Any

import alphafold_side as side  # type: ignore[import-not-found]  # first: it stubs what the package lacks, or ends if the package is not installed
import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import numpy as np
from alphafold.model import (  # type: ignore[import-not-found]
    all_atom_multimer,
    config,
    folding_multimer,
    geometry,
)
from peer_calls import serve  # type: ignore[import-not-found]

CLAMPS = {"interface_fape": None, "interface_fape_30": 30.0}
"""Å; None: DeepMind's own."""


def rigids(rotation: Any, translation: Any) -> Any:
    return geometry.Rigid3Array(geometry.Rot3Array.from_array(rotation), geometry.Vec3Array.from_array(translation))


def fapes(subject: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """The terms made of frame-aligned point errors. `predicted`: what gradients are taken by."""
    sizes = config.model_config("model_1_multimer_v3").model.heads.structure_module
    mask, same = subject["backbone_mask"], subject["asym_id"][:, None] == subject["asym_id"][None]
    truth = rigids(subject["true_backbone_rotation"], subject["true_backbone_translation"])
    backbone = rigids(subject["backbone_rotation"], predicted["backbone_translation"])

    def mean(settings: Any, pair_mask: Any) -> Any:
        return folding_multimer.backbone_loss(truth, mask, mask, backbone, settings, pair_mask)[0]

    terms = {"backbone_fape": mean(sizes.intra_chain_fape, same)}
    for name, clamp in CLAMPS.items():
        settings = sizes.interface_fape.copy_and_resolve_references()
        settings.atom_clamp_distance = clamp or settings.atom_clamp_distance
        terms[name] = mean(settings, 1.0 - same)
    terms["sidechain_fape"] = folding_multimer.sidechain_loss(
        rigids(subject["true_frame_rotation"], subject["true_frame_translation"]),
        subject["frame_mask"],
        geometry.Vec3Array.from_array(subject["true_atom14"]),
        subject["atom_mask"],
        rigids(subject["frame_rotation"][None], predicted["frame_translation"][None]),
        geometry.Vec3Array.from_array(predicted["atom14"][None]),
        sizes,
    )["loss"]
    return terms


def violations(subject: dict[str, Any], residue_index: Any, atom14: Any) -> dict[str, Any]:
    sizes = config.model_config("model_1_multimer_v3").model.heads.structure_module
    found = folding_multimer.find_structural_violations(
        aatype=subject["aatype"], residue_index=residue_index, mask=subject["exists"],
        pred_positions=geometry.Vec3Array.from_array(atom14), config=sizes, asym_id=subject["asym_id"],
    )  # fmt: skip
    between, within = found["between_residues"], found["within_residues"]
    return {
        "bonds": between["bonds_c_n_loss_mean"],
        "angles ca-c-n": between["angles_ca_c_n_loss_mean"],
        "angles c-n-ca": between["angles_c_n_ca_loss_mean"],
        "clashes": between["clashes_per_atom_loss_sum"],
        "within residues": within["per_atom_loss_sum"],
        "violation": folding_multimer.structural_violation_loss(subject["exists"], found, sizes),
    }


def run(subject: dict[str, Any]) -> dict[str, np.ndarray]:
    """The terms, and gradients of each by the predicted positions."""
    predicted = {name: subject[name] for name in ("backbone_translation", "frame_translation", "atom14")}
    terms, back = jax.vjp(lambda x: fapes(subject, x), predicted)
    results = dict(terms)
    for name in terms:
        (gradient,) = back({other: jnp.float32(other == name) for other in terms})
        results |= {f"gradient/{name}/{by}": x for by, x in gradient.items() if by.split("_")[0] in _pulled(name)}
    apart, following = subject["index_apart"], subject["index_following"]
    results |= violations(subject, apart, subject["atom14"])
    gradient = jax.grad(lambda x: violations(subject, apart, x)["violation"])(subject["atom14"])
    results["gradient/violation/atom14"] = gradient
    # DeepMind's code bonds a chain to the next if its number follows; its clashes are the physical ones.
    results["clashes, numbers that follow"] = violations(subject, following, subject["atom14"])["clashes"]
    return {name: np.asarray(value) for name, value in results.items()}


def _pulled(term: str) -> tuple[str, ...]:
    return ("frame", "atom14") if term == "sidechain_fape" else ("backbone",)


if __name__ == "__main__":
    side.correct_angle_deviation(all_atom_multimer)
    serve(__file__, "alphafold", lambda arrays: run({name: jnp.asarray(value) for name, value in arrays.items()}))

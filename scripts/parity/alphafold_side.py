"""DeepMind's side of the comparison: its JAX code on the arrays of one .npz file, its outputs to another.

    .venv-parity/bin/python scripts/parity/alphafold_side.py SUBJECT.npz RESULT.npz

Runs in an environment of its own (constraints.txt), which has neither torch nor evodsp. Labels are derived from the atoms by
DeepMind's own functions. The PyPI package `alphafold-colabfold` 2.3.27 is used as it is but for this:

- its accelerator kernels, an optional package, are stubbed: every request for one is answered "there is none";
- bfloat16 is switched off, and so is working through the batch in slices, which only saves memory;
- `optimization_barrier`, the identity with a hint to the compiler, has no derivative in this JAX: it becomes the identity;
- recycling is outside of the model there; here it is the loop over passes;
- the CA-C-N angle violation of releases up to 2.3 takes the standard deviation of the C-N bond length; DeepMind's source
  (git c77e5d2) takes the angle's own, as evodsp does. The angle's own is put in its place, in the package's own function;
- two values that exact arithmetic puts on the very edge of a bin are put into the right bin, where rounding decided before: an
  lDDT of k / 50, and the aligned error of a residue with itself, 0, which the compiled code found to be above 0.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from typing import Any

import numpy as np
from peer_calls import SKIPPED, serve  # type: ignore[import-not-found]

ROTATION = 9
"""Numbers of a frame's rotation; its translation follows."""


def stub_kernels() -> None:
    """Let `from colabfold_kernels import fused_ops` succeed, and every kernel be absent."""

    class Absent(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **kwargs: None

    package = types.ModuleType("colabfold_kernels")
    package.fused_ops = Absent("colabfold_kernels.fused_ops")  # type: ignore[attr-defined]
    sys.modules["colabfold_kernels"] = package
    sys.modules["colabfold_kernels.fused_ops"] = package.fused_ops


if importlib.util.find_spec("alphafold") is None:
    sys.exit(SKIPPED)
stub_kernels()

import haiku as hk  # type: ignore[import-not-found]  # noqa: E402  (after the stub)
import jax  # type: ignore[import-not-found]  # noqa: E402
import jax.numpy as jnp  # type: ignore[import-not-found]  # noqa: E402
from alphafold.common import residue_constants  # type: ignore[import-not-found]  # noqa: E402
from alphafold.model import (  # type: ignore[import-not-found]  # noqa: E402
    all_atom,
    config,
    folding,
    lddt,
    modules,
    quat_affine,
)


def remove_barriers() -> None:
    """Make the compiler's barrier the identity that it is."""
    jax.lax.optimization_barrier = lambda operand: operand


def correct_angle_deviation(functions: Any = all_atom) -> None:
    """Make the CA-C-N angle violation of a module use the angle's own standard deviation."""
    released = functions.between_residue_bond_loss

    def corrected(**arguments: Any) -> dict[str, Any]:
        result = released(**arguments)
        of_bond = residue_constants.between_res_bond_length_stddev_c_n
        residue_constants.between_res_bond_length_stddev_c_n = [residue_constants.between_res_cos_angles_ca_c_n[1]] * 2
        try:
            result["ca_c_n_loss_mean"] = released(**arguments)["ca_c_n_loss_mean"]
        finally:
            residue_constants.between_res_bond_length_stddev_c_n = of_bond
        return result

    functions.between_residue_bond_loss = corrected


def settle_bin_edges() -> None:
    """Put values on the edge of a bin where exact arithmetic puts them."""
    released_lddt, released_loss = lddt.lddt, modules.PredictedAlignedErrorHead.loss

    def pae_loss(self: Any, value: dict[str, Any], batch: dict[str, Any]) -> Any:
        # By way of the host, so that the compiler cannot merge subtracting a translation from itself with what made it.
        structure = value["structure_module"]
        affines = jax.lax.stop_gradient(structure["final_affines"])
        affines = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(affines.shape, affines.dtype), affines)
        return released_loss(self, {**value, "structure_module": {**structure, "final_affines": affines}}, batch)

    # Other values of an lDDT are at least 1 / (100 residues) away from an edge.
    lddt.lddt = lambda *args, **kwargs: released_lddt(*args, **kwargs) + 1e-6
    modules.PredictedAlignedErrorHead.loss = pae_loss


def model_config(settings: dict[str, Any]) -> Any:
    """DeepMind's configuration of the model, with the depths of `settings`, float32 and the weights of all losses."""
    full = config.model_config(settings["model"]).model
    full.global_config.bfloat16 = False
    full.global_config.subbatch_size = 1 << 20
    evoformer = full.embeddings_and_evoformer
    evoformer.evoformer_num_block = settings["evoformer"]
    evoformer.extra_msa_stack_num_block = settings["extra_msa"]
    evoformer.template.template_pair_stack.num_block = settings["template"]
    full.heads.structure_module.num_layer = settings["structure"]
    for stack in (evoformer.evoformer, evoformer.template.template_pair_stack):
        stack.triangle_multiplication_outgoing.fuse_projection_weights = settings["fused"]
        stack.triangle_multiplication_incoming.fuse_projection_weights = settings["fused"]
    return full


def labels_of(aatype: np.ndarray, structure: dict[str, np.ndarray]) -> dict[str, Any]:
    """What DeepMind's losses look at, [R, …], from the atoms of a structure; float32, Å."""
    positions, mask = structure["all_atom_positions"], structure["all_atom_mask"]
    frames = all_atom.atom37_to_frames(aatype, positions, mask)
    rotation = frames["rigidgroups_gt_frames"][:, 0, :ROTATION].reshape(-1, 3, 3)
    translation = frames["rigidgroups_gt_frames"][:, 0, ROTATION:]
    quaternion = quat_affine.rot_to_quat(rotation, unstack_inputs=True)
    torsions = all_atom.atom37_to_torsion_angles(aatype[None], positions[None], mask[None])
    sin, cos = jnp.moveaxis(torsions["torsion_angles_sin_cos"][0, :, 3:], -1, 0)
    beta, beta_mask = modules.pseudo_beta_fn(aatype, positions, mask)
    slots = atom_slots(aatype)
    atom14 = all_atom.atom37_to_atom14(positions, slots)
    atom14_mask = all_atom.atom37_to_atom14(mask, slots)
    renaming = jnp.asarray(all_atom.RENAMING_MATRICES)[aatype]
    return {
        **structure,
        "seq_length": np.int32(len(aatype)),
        **slots,
        **frames,
        "backbone_affine_tensor": jnp.concatenate([quaternion, translation], -1),
        "backbone_affine_mask": frames["rigidgroups_gt_exists"][:, 0],
        "chi_angles": jnp.arctan2(sin, cos),
        "chi_mask": torsions["torsion_angles_mask"][0, :, 3:],
        "pseudo_beta": beta,
        "pseudo_beta_mask": beta_mask,
        "atom14_gt_positions": atom14,
        "atom14_gt_exists": atom14_mask,
        "atom14_alt_gt_positions": jnp.einsum("rij,rix->rjx", renaming, atom14),
        "atom14_alt_gt_exists": jnp.einsum("rij,ri->rj", renaming, atom14_mask),
        "atom14_atom_is_ambiguous": 1 - jnp.diagonal(renaming, axis1=1, axis2=2),
        "use_clamped_fape": np.float32(1),
    }


def atom_slots(aatype: np.ndarray) -> dict[str, np.ndarray]:
    """Where each residue's atoms are in atom37 order and in atom14 order, and which of the latter exist."""
    letters = residue_constants.restypes
    names = [residue_constants.restype_name_to_atom14_names[residue_constants.restype_1to3[x]] for x in letters]
    order = residue_constants.atom_order
    to37 = np.array([[order.get(name, 0) for name in row] for row in names], np.int32)
    to14 = np.zeros((len(letters), len(order)), np.int32)
    for row, atoms in enumerate(names):
        for slot, name in enumerate(atoms):
            if name:
                to14[row, order[name]] = slot
    exists = np.array([[bool(name) for name in row] for row in names], np.float32)
    return {
        "residx_atom14_to_atom37": to37[aatype],
        "residx_atom37_to_atom14": to14[aatype],
        "atom14_atom_exists": exists[aatype],
    }


def haiku_tree(arrays: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """DeepMind's flat keys `scope//parameter` as Haiku's two levels."""
    tree: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        scope, parameter = key.split("//")
        tree.setdefault(scope, {})[parameter] = jnp.asarray(array)
    return tree


def one_pass(settings: Any, with_loss: bool) -> Any:
    """A pass of the model as a function of (parameters, features and labels, recycled)."""

    def forward(batch: dict[str, Any], recycled: dict[str, Any]) -> Any:
        with hk.experimental.name_scope("alphafold"):
            iteration = modules.AlphaFoldIteration(settings, settings.global_config)
        return iteration(
            {name: value[None] for name, value in batch.items()}, recycled, is_training=False, compute_loss=with_loss
        )

    return hk.transform(forward).apply


def losses_of(settings: Any, batch: dict[str, Any], result: dict[str, Any], total: Any) -> dict[str, Any]:
    """The terms of the loss, each without its weight, under evodsp's names."""
    structure, sizes = result["structure_module"], settings.heads.structure_module
    backbone: dict[str, Any] = {"loss": 0.0}
    folding.backbone_loss(backbone, batch, structure, sizes)
    violation: dict[str, Any] = {"loss": 0.0}
    folding.structural_violation_loss(violation, batch, structure, sizes)
    terms = {
        "total": total,
        "backbone_fape": backbone["loss"],
        "sidechain_fape": structure["sidechain_fape"],
        "torsion": structure["chi_loss"],
        "angle_norm": structure["angle_norm_loss"],
        "violation": violation["loss"] / sizes.structural_violation_loss_weight,
        "distogram": result["distogram"]["loss"],
        "masked_msa": result["masked_msa"]["loss"],
        "plddt": result["predicted_lddt"]["loss"],
        "experimentally_resolved": result["experimentally_resolved"]["loss"],
    }
    if "predicted_aligned_error" in result:
        terms["pae"] = result["predicted_aligned_error"]["loss"]
    return {f"loss/{name}": value for name, value in terms.items()}


def run(subject: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All quantities of the last pass, its losses, and the gradient of the total loss by every parameter."""
    settings = model_config(json.loads(str(subject["settings"])))
    parts = {part: _under(subject, part) for part in ("parameters", "features", "structure")}
    parameters, features = haiku_tree(parts["parameters"]), parts["features"]
    labels = labels_of(features["aatype"][-1], parts["structure"])
    passes = [
        {**labels, **{name: value[cycle] for name, value in features.items()}} for cycle in range(_cycles(features))
    ]
    sizes, key = settings.embeddings_and_evoformer, jax.random.PRNGKey(0)
    length = features["aatype"].shape[1]
    recycled = {
        "prev_msa_first_row": jnp.zeros((length, sizes.msa_channel)),
        "prev_pair": jnp.zeros((length, length, sizes.pair_channel)),
        "prev_pos": jnp.zeros((length, residue_constants.atom_type_num, 3)),
    }
    without_loss = jax.jit(one_pass(settings, with_loss=False))
    for batch in passes[:-1]:
        result = without_loss(parameters, key, batch, recycled)
        recycled = {
            "prev_msa_first_row": result["representations"]["msa_first_row"],
            "prev_pair": result["representations"]["pair"],
            "prev_pos": result["structure_module"]["final_atom_positions"],
        }

    def total(weights: Any) -> Any:
        result, loss = one_pass(settings, with_loss=True)(weights, key, passes[-1], recycled)
        return loss, {**outputs_of(result), **losses_of(settings, passes[-1], result, loss)}

    (_, outputs), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(parameters)
    outputs["recycled/positions"] = recycled["prev_pos"]
    outputs |= {
        f"gradient/{scope}//{name}": value for scope, group in gradient.items() for name, value in group.items()
    }
    return {name: np.asarray(value) for name, value in outputs.items()}


def outputs_of(result: dict[str, Any]) -> dict[str, Any]:
    """Representations, logits and structure. Positions in Å, affines as quaternion and translation."""
    outputs = {f"representations/{name}": value for name, value in result["representations"].items()}
    outputs |= {f"{head}/logits": value["logits"] for head, value in result.items() if "logits" in value}
    structure = result["structure_module"]
    return outputs | {"structure/positions": structure["final_atom_positions"], "structure/affines": structure["traj"]}


def _under(arrays: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    return {key.split(":", 1)[1]: value for key, value in arrays.items() if key.startswith(f"{part}:")}


def _cycles(features: dict[str, np.ndarray]) -> int:
    return len(features["aatype"])


if __name__ == "__main__":
    remove_barriers()
    correct_angle_deviation()
    settle_bin_edges()
    serve(__file__, "alphafold", run)

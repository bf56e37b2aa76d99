"""DeepMind's side of the comparison of AlphaFold-Multimer's model, on the arrays of one .npz file, its outputs to another.

    .venv-parity/bin/python scripts/parity/alphafold_chains_side.py SUBJECT.npz RESULT.npz

The package and its changes are those of `alphafold_side.py`. Besides:

- The package's multimer model has no losses, so gradients are those of a weighted sum of all outputs. The weights are random
  and among the results (`weight/…`); they are 0 in padding.
- The direction from a residue to itself is rounding noise of length 1 there, because the difference of two equal positions is
  computed as that of two products. It is 0, as exact arithmetic says.
- The model makes its MSA features itself from letters, deletions and profiles. Here it is handed these features.
"""

from __future__ import annotations

import json
from typing import Any

import alphafold_side as side  # type: ignore[import-not-found]  # first: it stubs what the package lacks, or ends if the package is not installed
import haiku as hk  # type: ignore[import-not-found]
import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import numpy as np
import table  # type: ignore[import-not-found]  # this file is a program, whose folder Python searches
from alphafold.model import geometry, modules_multimer, prng  # type: ignore[import-not-found]
from peer_calls import serve  # type: ignore[import-not-found]

LETTERS = 23
SHORTEST = 1e-3
"""Å"""
RENAMED = {"template_all_atom_masks": "template_all_atom_mask"}


def take_features() -> None:
    """Make the model read MSA features instead of making them."""

    def extra(batch: dict[str, Any], rows: int) -> tuple[Any, Any]:
        parts = [batch[f"extra_{name}"][..., None] for name in ("has_deletion", "deletion_value")]
        return jnp.concatenate([jax.nn.one_hot(batch["extra_msa"], LETTERS), *parts], -1), batch["extra_msa_mask"]

    modules_multimer.create_msa_feat = lambda batch: batch["msa_feat"]
    modules_multimer.create_extra_msa_feature = extra


def settle_directions() -> None:
    """Make vectors that are shorter than any distance between atoms 0, instead of noise of length 1."""
    released = geometry.Vec3Array.normalized

    def settled(vector: Any, epsilon: float = 1e-6) -> Any:
        long = vector.norm2() > SHORTEST**2
        return released(vector, epsilon) * long.astype(jnp.float32)

    geometry.Vec3Array.normalized = settled


def one_pass(settings: Any) -> Any:
    """A pass of the model as a function of (parameters, key, features, recycled)."""

    def forward(batch: dict[str, Any], recycled: dict[str, Any]) -> Any:
        with hk.experimental.name_scope("alphafold"):
            iteration = modules_multimer.AlphaFoldIteration(settings, settings.global_config)
        return iteration({**batch, **recycled}, is_training=False, safe_key=prng.SafeKey(hk.next_rng_key()))

    return hk.transform(forward).apply


def outputs_of(result: dict[str, Any]) -> dict[str, Any]:
    """Representations, logits and positions in Å."""
    outputs = {f"representations/{name}": value for name, value in result["representations"].items()}
    outputs |= {f"{head}/logits": value["logits"] for head, value in result.items() if "logits" in value}
    return outputs | {table.POSITIONS: result["structure_module"]["final_atom_positions"]}


def weights_of(shapes: dict[str, Any], features: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Random weights of all outputs, 0 in padding; each output counts alike."""
    rng = np.random.default_rng(5)
    weights = {}
    for name in sorted(shapes):
        shape = shapes[name].shape
        weight = rng.standard_normal(shape) / np.sqrt(np.prod(shape))
        if name == table.POSITIONS:
            weight *= features["atom37_atom_exists"][-1][..., None]
        for axis in table.RESIDUE_AXES.get(name, ()):
            real = features["seq_mask"][-1]
            weight *= real.reshape([-1 if n == axis else 1 for n in range(weight.ndim)])
        if name in table.MSA:
            weight *= features["msa_mask"][-1].any(-1).reshape(-1, 1, 1)
        weights[name] = weight.astype(np.float32)
    return weights


def run(subject: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All quantities of the last pass, and the gradient of their weighted sum by every parameter."""
    settings = side.model_config(json.loads(str(subject["settings"])))
    parameters, features = side.haiku_tree(side._under(subject, "parameters")), side._under(subject, "features")
    length, cycles = features["aatype"].shape[1], len(features["aatype"])
    read = {RENAMED.get(name, name): value for name, value in features.items()}
    atoms = {
        "all_atom_positions": np.zeros((length, 37, 3), np.float32)
    }  # without a label the structure is not computed
    passes = [{**atoms, **{name: value[cycle] for name, value in read.items()}} for cycle in range(cycles)]
    sizes, key = settings.embeddings_and_evoformer, jax.random.PRNGKey(0)
    recycled = {
        "prev_msa_first_row": jnp.zeros((length, sizes.msa_channel)),
        "prev_pair": jnp.zeros((length, length, sizes.pair_channel)),
        "prev_pos": jnp.zeros((length, 37, 3)),
    }
    apply = one_pass(settings)
    for batch in passes[:-1]:
        result = jax.jit(apply)(parameters, key, batch, recycled)
        recycled = {
            "prev_msa_first_row": result["representations"]["msa_first_row"],
            "prev_pair": result["representations"]["pair"],
            "prev_pos": result["structure_module"]["final_atom_positions"],
        }

    def outputs(tree: Any) -> dict[str, Any]:
        return outputs_of(apply(tree, key, passes[-1], recycled))

    weights = weights_of(jax.eval_shape(outputs, parameters), features)

    def total(tree: Any) -> Any:
        found = outputs(tree)
        return sum((weights[name] * value).sum() for name, value in found.items()), found

    (_, found), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(parameters)
    found["recycled/positions"] = recycled["prev_pos"]
    found |= {f"weight/{name}": value for name, value in weights.items()}
    found |= {f"gradient/{scope}//{name}": value for scope, group in gradient.items() for name, value in group.items()}
    return {name: np.asarray(value) for name, value in found.items()}


if __name__ == "__main__":
    side.remove_barriers()
    take_features()
    settle_directions()
    serve(__file__, "alphafold", run)

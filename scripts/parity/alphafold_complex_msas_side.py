"""DeepMind's side of the comparison of a complex's MSA features, on the arrays of one .npz file, its outputs to another.

    .venv-parity/bin/python scripts/parity/alphafold_complex_msas_side.py SUBJECT.npz RESULT.npz

Its own functions pad the MSA, sample it, mask it, make clusters and features. What they draw is handed to them, since the two
sides have other random numbers: the order of the rows, where letters are hidden and what they become. The probabilities of the
letters, from which they would draw, are among the results.
"""

from __future__ import annotations

import json
from typing import Any

import alphafold_side  # type: ignore[import-not-found]  # noqa: F401  (it stubs what the package lacks, or ends if there is none)
import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import numpy as np
from alphafold.data import pipeline_multimer  # type: ignore[import-not-found]
from alphafold.model import (  # type: ignore[import-not-found]
    config,
    modules_multimer,
    prng,
    utils,
)
from peer_calls import serve  # type: ignore[import-not-found]

LETTERS = 23
"""Residue types, gap and mask token."""


def pass_of(case: dict[str, Any], part: dict[str, np.ndarray]) -> dict[str, Any]:
    """What is compared of one pass. `part`: the merged MSA, and what is drawn in this pass."""
    merged = {
        name: part[name].astype(np.float32)
        for name in ("deletion_matrix", "bert_mask", "msa_mask", "cluster_bias_mask")
    }
    merged["msa"] = part["msa"].astype(np.int32)
    rows = len(merged["msa"])
    padded = pipeline_multimer.pad_msa(merged, case["padded_rows"])
    batch = {name: jnp.asarray(value) for name, value in padded.items()}
    settings = config.CONFIG_MULTIMER.model.embeddings_and_evoformer
    settings = settings.copy_and_resolve_references()
    with settings.unlocked():
        settings.num_msa = case["clusters"]
        settings.use_cluster_profile = True
    order = np.concatenate([part["order"], np.arange(rows, len(padded["msa"]))])
    size = batch["msa"][: settings.num_msa].shape
    hidden, letters = np.zeros(size, bool), np.zeros(size, np.int64)
    own = tuple(slice(n) for n in part["hidden"].shape)
    hidden[own], letters[own] = part["hidden"], part["letters"]
    found: dict[str, Any] = {}

    def ordered(_: Any, logits: Any) -> Any:
        found["first"] = logits >= 1e6
        return jnp.asarray(order)

    def lettered(_: Any, logits: Any) -> Any:
        weights = np.exp(np.asarray(logits, np.float64))
        found["probabilities"] = weights / weights.sum(-1, keepdims=True)
        return jax.nn.one_hot(letters, LETTERS)

    modules_multimer.gumbel_argsort_sample_idx = ordered
    modules_multimer.gumbel_max_sample = lettered
    utils.padding_consistent_rng = lambda _: lambda *_, **__: jnp.where(hidden, 0.0, 1.0)

    batch["msa_profile"] = modules_multimer.make_msa_profile(batch)
    keys = [prng.SafeKey(jax.random.PRNGKey(number)) for number in range(2)]
    batch = modules_multimer.sample(batch, *keys, settings)
    extra, extra_mask = modules_multimer.create_extra_msa_feature(batch, case["extra"])
    return {
        "msa_feat": modules_multimer.create_msa_feat(batch) * batch["msa_mask"][..., None],
        "extra_msa": extra.argmax(-1) * extra_mask,
        "extra_has_deletion": extra[..., LETTERS],
        "extra_deletion_value": extra[..., LETTERS + 1],
        "extra_msa_mask": extra_mask,
        **{name: batch[name] for name in ("msa_mask", "bert_mask", "true_msa")},
        "rows that come first": found["first"][:rows],
        "probabilities": found["probabilities"][own],
    }


def run(arrays: dict[str, Any]) -> dict[str, Any]:
    """The features of each pass of all cases."""
    outputs: dict[str, Any] = {}
    for case in json.loads(str(arrays.pop("cases"))):
        prefix = f"{case['name']}|"
        part = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
        outputs |= {f"{name}|{case['name']}": value for name, value in pass_of(case, part).items()}
    return outputs


if __name__ == "__main__":
    serve(__file__, "alphafold", run)

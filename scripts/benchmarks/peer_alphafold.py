"""DeepMind's JAX code as a peer of `bench.py`: a block of the Evoformer or of the extra-MSA stack, or the template pair stack.

    .venv-parity/bin/python -m scripts.benchmarks.peer_alphafold      (`bench.py` starts it; see `peer_side.py`)

Compiled by jax.jit, float32, without dropout, forward and backward to inputs and parameters; nothing is sliced or computed
again. Templates go through one after another, as in DeepMind's model. JAX has no setting for its number of threads: it takes
one for each core that it may use, so it starts on one core, and its threads may then use all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

CORES = os.sched_getaffinity(0)
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
os.sched_setaffinity(0, set(sorted(CORES)[: int(os.environ.get("OMP_NUM_THREADS", "1"))]))

import numpy as np  # noqa: E402

from scripts.benchmarks.peer_side import serve  # noqa: E402
from scripts.parity import alphafold_side  # noqa: E402
from scripts.parity.alphafold_side import hk, jax, jnp, modules  # noqa: E402  (after its stand-in for a package)

SETTINGS = {"model": "model_1_ptm", "fused": False, "evoformer": 1, "extra_msa": 1, "template": 2, "structure": 1}


def prepare(case: str, first: int, residues: int) -> Callable[[], None] | None:
    """One forward and backward pass, or None for a case that DeepMind's code has no counterpart of."""
    settings = alphafold_side.model_config(SETTINGS)
    sizes, common = settings.embeddings_and_evoformer, settings.global_config
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    if case in ("evoformer", "extra"):
        extra = case == "extra"
        channels = sizes.extra_msa_channel if extra else sizes.msa_channel
        inputs = {"msa": normal(first, residues, channels), "pair": normal(residues, residues, sizes.pair_channel)}
        masks = {"msa": jnp.ones((first, residues)), "pair": jnp.ones((residues, residues))}

        def forward(x: Any) -> Any:
            block = modules.EvoformerIteration(sizes.evoformer, common, is_extra_msa=extra)
            return block(x, masks, is_training=False)

    elif case == "templates":
        channels = sizes.template.template_pair_stack.triangle_attention_ending_node.value_dim
        inputs = normal(first, residues, residues, channels)
        mask = jnp.ones((residues, residues))

        def forward(x: Any) -> Any:
            stack = modules.TemplatePairStack(sizes.template.template_pair_stack, common)
            return jnp.stack([stack(one, mask, is_training=False) for one in x])

    else:
        return None
    transformed = hk.transform(forward)
    shapes = jax.eval_shape(transformed.init, jax.random.PRNGKey(0), inputs)
    parameters = jax.tree_util.tree_map(
        lambda x: normal(*x.shape) * (x.shape[0] ** -0.5 if x.ndim > 1 else 0.1), shapes
    )

    def total(weights: Any, x: Any) -> Any:
        """A number whose gradient by an output is the output, as in `bench.py`."""
        results = jax.tree_util.tree_leaves(transformed.apply(weights, jax.random.PRNGKey(0), x))
        return sum(jnp.sum(y * jax.lax.stop_gradient(y)) for y in results)

    step = jax.jit(jax.grad(total, argnums=(0, 1)))

    def run() -> None:
        jax.block_until_ready(step(parameters, inputs))

    jax.block_until_ready(step(parameters, inputs))  # starts all threads
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), CORES)
    return run


if __name__ == "__main__":
    alphafold_side.remove_barriers()
    sys.exit(serve(prepare))

"""OpenFold as a peer of `bench.py`: a block of the Evoformer or of the extra-MSA stack, templates, recomputed blocks.

    OPENFOLD_SOURCE=<clone> .venv-openfold/bin/python -m scripts.benchmarks.peer_openfold   (`bench.py` starts it)

Its modules as they are, float32, without dropout and chunks, forward and backward to inputs and parameters. The compiled
softmax that OpenFold imports is replaced by torch's, as in `scripts/parity/openfold_side.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch

from scripts.benchmarks.peer_side import serve
from scripts.parity.openfold_side import SOURCE, hide_deepspeed, replace_kernel

CLASSES = {
    "evoformer": "EvoformerBlock",
    "extra": "ExtraMSABlock",
    "templates": "TemplatePairStack",
    "recomputed": "EvoformerStack",
}
"""OpenFold's class of each case; it is taken out of a whole model, so that OpenFold's own settings make it."""
RECOMPUTED_BLOCKS = 4


def prepare(case: str, first: int, residues: int) -> Callable[[], None] | None:
    """One forward and backward pass."""
    from openfold.config import model_config  # type: ignore[import-not-found]
    from openfold.model.model import AlphaFold  # type: ignore[import-not-found]

    recomputed = case == "recomputed"
    config = model_config("model_1_ptm", train=recomputed)
    config.globals.chunk_size = None
    config.model.evoformer_stack.no_blocks = RECOMPUTED_BLOCKS if recomputed else 1
    config.model.extra_msa.extra_msa_stack.no_blocks = 1
    widths = config.globals
    whole = AlphaFold(config)
    module = next(x for x in whole.modules() if type(x).__name__ == CLASSES[case])
    module.train(recomputed)  # OpenFold recomputes in training only; without dropout
    for layer in module.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(normal(*parameter.shape) * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1))
    c_m = widths.c_e if case == "extra" else widths.c_m
    if case == "templates":
        inputs = [normal(1, first, residues, residues, widths.c_t)]
        masks = [torch.ones(1, first, residues, residues)]
    else:
        inputs = [normal(1, first, residues, c_m), normal(1, residues, residues, widths.c_z)]
        masks = [torch.ones(1, first, residues), torch.ones(1, residues, residues)]
    leaves = [x.requires_grad_() for x in inputs]
    options = {"chunk_size": None, "_mask_trans": False}

    def run() -> None:
        outputs = module(*leaves, *masks, **options)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)[:2]
        for x in (*leaves, *module.parameters()):
            x.grad = None
        torch.autograd.backward(
            outputs, [x.detach() for x in outputs]
        )  # not `grad`, which its recomputation does not know

    return run


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if source := os.environ.get(SOURCE):
        sys.path.insert(0, source)
    replace_kernel()
    hide_deepspeed()
    sys.exit(serve(prepare))

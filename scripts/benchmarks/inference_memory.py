"""Peak memory of a pass without gradients: the formulas written out, layers computed whole, layers in place and in pieces.

    python -m scripts.benchmarks.inference_memory [--residues 512] [--sequences 128] [--extra 1024] [--memory 256MiB]

One Evoformer block; then the whole model_1_ptm with 4 templates and one block a stack, which needs as much as one with 48,
because blocks run one after another. fp32, one device. Every tensor from its creation to its release is counted, also the
representations, but not parameters and input features. Tensors have no content; operators are those of a CPU (`chunked`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn

from evodsp.config import ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.evoformer import EvoformerBlock
from evodsp.model.in_place import use_memory
from evodsp.model.kernels import chunked
from evodsp.ranges import memory_size

from . import formulas
from .peak_memory import PeakMemory
from .random_inputs import random_features

MIB = 2**20
TEMPLATES = 4
Pass = Callable[[], object]


@contextmanager
def chunks_of_a_cpu() -> Iterator[None]:
    """Tensors without content count as a GPU's, whose chunks are larger than a CPU's."""
    sizes = {name: getattr(chunked, name.replace("GPU", "CPU")) for name in vars(chunked) if name.startswith("_GPU_")}
    with patch.multiple(chunked, **sizes):
        yield


@torch.no_grad()
def peak(run: Pass) -> float:
    """MiB."""
    with PeakMemory() as count:
        run()
    return count.peak / MIB


def block(sequences: int, residues: int) -> tuple[nn.Module, Pass, Pass]:
    """An Evoformer block, a pass through it, and a pass through the formulas."""
    config = ModelConfig()
    own = EvoformerBlock(config.channels.msa, config.channels.pair, config.evoformer)
    masks = torch.empty(1, sequences, residues), torch.empty(1, residues, residues)

    def through(model: nn.Module) -> Pass:
        return lambda: model(
            torch.empty(1, sequences, residues, config.channels.msa),
            torch.empty(1, residues, residues, config.channels.pair),
            *masks,
        )

    return own, through(own), through(formulas.Block(own))


def whole_model(sequences: int, extra: int, residues: int) -> tuple[nn.Module, Pass]:
    """The model with one block a stack, and one recycling iteration."""
    config = ModelConfig.preset("model_1_ptm")
    config = dataclasses.replace(
        config,
        evoformer=dataclasses.replace(config.evoformer, blocks=1),
        extra_msa=dataclasses.replace(config.extra_msa, blocks=1),
        templates=dataclasses.replace(config.templates, blocks=1),
    )
    model = AlphaFold(config).to("meta")
    features = random_features(sequences, extra, residues, TEMPLATES)
    members = [{name: features[name][:, 0].to("meta") for name in model.features}]
    return model, lambda: model.one_pass(members, model._first(members[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--residues", type=int, default=512, help="length of the protein (default: 512)")
    parser.add_argument("--sequences", type=int, default=128, help="rows of the clustered MSA (default: 128)")
    parser.add_argument("--extra", type=int, default=1024, help="rows of the extra MSA (default: 1024)")
    parser.add_argument("--memory", default="256MiB", help="working memory (default: 256MiB, as on a CPU)")
    arguments = parser.parse_args()
    s, e, r, memory = arguments.sequences, arguments.extra, arguments.residues, arguments.memory
    print(f"{s} sequences, {e} extra sequences, {r} residues, {TEMPLATES} templates, fp32, peak in MiB")
    with torch.device("meta"), chunks_of_a_cpu():
        own, run, formula = block(s, r)
        model, run_model = whole_model(s, e, r)
        of_formulas = peak(formula)
        print(f"{'':26}{'block':>8}{'of formulas':>13}{'model':>8}")
        print(f"{'formulas':26}{of_formulas:8.0f}{1:13.2f}")
        for name, budget in (("layers whole", None), (f"in pieces, {memory}", memory_size("--memory", memory))):
            use_memory(own, budget)
            use_memory(model, budget)
            found = peak(run)
            print(f"{name:26}{found:8.0f}{found / of_formulas:13.2f}{peak(run_model):8.0f}", flush=True)


if __name__ == "__main__":
    main()

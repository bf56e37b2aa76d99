"""`evodsp weights random`: random parameters of a model, to time it without the real ones.

Every parameter is random, because AF2's initialisation sets residual branches to zero, and is scaled so that activations stay
finite through all blocks. Predictions with these parameters mean nothing; their time and memory are a real model's.
"""

from __future__ import annotations

import torch
from torch import nn

from evodsp.config import ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.printing import tell
from evodsp.weights.config import RandomConfig, check_new_file
from evodsp.weights.deepmind import export_deepmind, write_npz


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw weights of variance 1 / inputs (LeCun), biases of about 0.1 and norm scales of about 1, determined by `seed`."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        parameter.mul_(parameter.shape[1] ** -0.5 if parameter.ndim > 1 else 0.1)
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.add_(1)


def run(settings: RandomConfig, words: list[str]) -> int:
    """Write the parameters and return the exit code. `words`: the command line (not needed here)."""
    check_new_file(settings.output, settings.overwrite)
    with torch.device("meta"):
        model = AlphaFold(ModelConfig.preset(settings.preset))
    model.to_empty(device="cpu")
    randomise(model, settings.seed)
    write_npz(settings.output, export_deepmind(model))
    count = sum(parameter.numel() for parameter in model.parameters())
    tell(f"{settings.output}: {count:,} random parameters of {settings.preset}")
    return 0

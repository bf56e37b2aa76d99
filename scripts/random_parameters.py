"""Write random parameters of a published model as DeepMind's .npz, to time a full-width model without the real parameters.

python scripts/random_parameters.py --preset model_1_ptm --output params_model_1_ptm.npz

Every parameter is random, because AF2's initialisation sets residual branches to zero, and is scaled so that activations stay
finite through all blocks. Predictions with these parameters mean nothing; their time and memory are a real model's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.deepmind import export_deepmind, write_npz


@torch.no_grad()
def randomise(model: AlphaFold, seed: int) -> None:
    """Draw weights of variance 1 / inputs (LeCun), biases of about 0.1 and norm scales of about 1, determined by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        parameter.mul_(parameter.shape[1] ** -0.5 if parameter.ndim > 1 else 0.1)
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.add_(1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write random parameters of a model as DeepMind's .npz.")
    parser.add_argument("--preset", default="model_1_ptm", help="model, such as model_1_ptm or test")
    parser.add_argument("--seed", type=int, default=0, help="seed of the parameters")
    parser.add_argument("--output", type=Path, required=True, help="file to write; name it params_<preset>.npz")
    options = parser.parse_args(arguments)
    try:
        with torch.device("meta"):
            model = AlphaFold(ModelConfig.preset(options.preset))
        model.to_empty(device="cpu")
        randomise(model, options.seed)
        write_npz(options.output, export_deepmind(model))
    except UserError as error:
        print(f"random_parameters: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {sum(p.numel() for p in model.parameters()):,} random parameters of {options.preset}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A fine-tuned model in DeepMind's and OpenFold's code: `evodsp fit` with adapters, `evodsp weights export`, a comparison.

    .venv/bin/python -m scripts.parity.fine_tuned --alphafold .venv-parity/bin/python [--openfold .venv-openfold/bin/python]
        [--model model_1_ptm] [--seed 0]

The model has AlphaFold2's own sizes, all blocks included, because other programs take no others. It begins with random
weights in an .npz file, as the published ones have. Two steps on a bundled protein train adapters and the structure module,
at a rate at which a forgotten adapter would show.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from evodsp.cli import main as evodsp
from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.deepmind import export_deepmind, read_npz, write_npz

from . import compare
from .subject import random_parameters

DATA = Path("data")
SMALL = (
    "--data.train.crop_size=24",
    "--data.train.msa_clusters=8",
    "--data.train.extra_msa=8",
    "--data.train.recycles=0",
)
TRAINED = ("--model.adapters.rank=8", "--model.train_only=[structure_module]", "--model.optimizer.lr=3.0e-3")
LENGTH = ("--global_batch=1", "--max_samples=2", "--model.optimizer.warmup_samples=0", "--trainer.accelerator=cpu")
MOVED = 1e-3
"""The least change of each stack by the two steps, as a share of its weights' norm."""


def begin(model: str, seed: int, path: Path) -> None:
    """Write weights like trained ones: initial ones, and a tenth of dense random ones, so that no layer is zero."""
    config = ModelConfig.preset(model)
    torch.manual_seed(seed)
    initial, dense = export_deepmind(AlphaFold(config)), random_parameters(config, seed, fused=False)
    write_npz(path, {key: value + np.float32(0.1) * dense[key] for key, value in initial.items()})


def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="evodsp-fine-tuned-") as folder:
        source, output = Path(folder) / f"params_{options.model}.npz", Path(folder) / "run"
        exported = Path(folder) / "exported" / source.name
        exported.parent.mkdir()
        begin(options.model, options.seed, source)
        words = ["fit", "--config=configs/finetune_own.yaml", f"--init_from={source}", f"--output={output}"]
        words += [f"--data.alignment_dir={DATA}/alignments", f"--data.structure_dir={DATA}/mmcif_files"]
        words += [f"--seed={options.seed}", *SMALL, *TRAINED, *LENGTH, "--model.ema_decay=null"]
        checkpoint = output / "checkpoints" / "last.ckpt"
        for step in (words, ["weights", "export", f"--checkpoint={checkpoint}", f"--output={exported}"]):
            if evodsp(step):
                raise UserError(f"evodsp {step[0]} failed")
        before, after = read_npz(source), read_npz(exported)
        for part in ("evoformer_iteration", "extra_msa_stack", "structure_module"):
            keys = [key for key in before if part in key]
            moved = sum(float(np.square(after[key] - before[key]).sum()) for key in keys) ** 0.5
            share = moved / sum(float(np.square(before[key]).sum()) for key in keys) ** 0.5
            print(f"{part}: changed by {share:.1e} of its norm")
            if share < MOVED:
                raise UserError(f"{part} has not been trained, or is exported without its adapters")
        other = ["--alphafold", str(options.alphafold), "--model", options.model, "--seed", str(options.seed)]
        if options.openfold is not None:
            other += ["--openfold", str(options.openfold)]
        return compare.main([*other, "--structure", "8", "--parameters", str(exported)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run a fine-tuned model of evodsp in DeepMind's code.")
    parser.add_argument("--alphafold", type=Path, required=True, help="python with alphafold-colabfold")
    parser.add_argument(
        "--openfold", type=Path, help="python with OpenFold's requirements; OPENFOLD_SOURCE names the clone"
    )
    parser.add_argument("--model", default="model_1_ptm", choices=compare.MODELS, help="the model that is fine-tuned")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, samples and features")
    try:
        return run(parser.parse_args(arguments))
    except UserError as error:
        print(f"parity: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

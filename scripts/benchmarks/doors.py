"""Count the doors of what evodsp does: its Python files that execute a line, on a CPU. A reader who follows it opens each.

    python -m scripts.benchmarks.doors

Counted are, at the sizes of the preset `test`:

* the forward pass of triangle attention, and of an Evoformer block, without gradients, on one device and on one rank of two
  (the other rank does not exist: collectives return at once, and are the same lines);
* forward and backward pass of a stack of two blocks with dropout, from the keys of its masks to the gradients of its inputs;
* the last of two steps of `evodsp fit`: once from the features of a batch to the updated weights (model, loss, backward pass,
  clipping, optimizer), and once from a chain's files to the callbacks at the step's end. What comes before the steps and after
  them, and validation, are not counted;
* a whole `evodsp predict` of a bundled chain, from its settings to the pages: the function that the command calls, which
  includes what happens at its first call only. Parsing of the command line is not counted.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

import evodsp
from evodsp.config import FeatureConfig, ModelConfig
from evodsp.inference.command import run as run_predict
from evodsp.inference.config import PredictConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerBlock, EvoformerStack
from evodsp.model.layers import TriangleAttention
from evodsp.model.primitives import use_exchange
from evodsp.packaged import packaged_folder, with_packaged_configs
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.rng import Draws
from evodsp.training.checks import check_run
from evodsp.training.command import TrainingCLI, build
from evodsp.training.trainer import hush
from evodsp.training.world import World
from evodsp.weights.checkpoint import save_model
from scripts.benchmarks.fake_ranks import fake_group

PACKAGE = Path(evodsp.__file__).parent
SEQUENCES, RESIDUES = 6, 8
CHAIN = "s001_A"


def doors(run: Callable[[], Any], inside: CodeType | None = None) -> list[str]:
    """Files of evodsp whose functions are called while `run` runs. `inside`: only in the last call of this function, and those
    around it. What a module calls while it is imported does not count."""
    files: set[str] = set()
    depth = 0

    def seen(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        if event == "return":
            depth -= frame.f_code is inside
        if event != "call" or not frame.f_code.co_filename.endswith(".py"):  # a template's name ends otherwise
            return
        if frame.f_code is inside:
            if depth == 0:
                files.clear()
            depth += 1
            files.update(around.f_code.co_filename for around in _outwards(frame))
        file = frame.f_code.co_filename
        if (inside is None or depth) and file not in files and not _imports(frame):
            files.add(file)

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    paths = (Path(file) for file in files)
    return sorted(str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _imports(frame: FrameType) -> bool:
    """Whether a call happens in the body of a module of evodsp."""
    return any(
        around.f_code.co_name == "<module>" and Path(around.f_code.co_filename).is_relative_to(PACKAGE)
        for around in _outwards(frame)
    )


def _inputs(exchange: Exchange) -> tuple[torch.Tensor, ...]:
    """A rank's m, z and their masks."""
    channels = ModelConfig.preset("test").channels
    m, z = torch.randn(1, SEQUENCES, RESIDUES, channels.msa), torch.randn(1, RESIDUES, RESIDUES, channels.pair)
    masks = torch.ones(1, SEQUENCES, RESIDUES), torch.ones(1, RESIDUES, RESIDUES)
    return exchange.shard(m, "seq"), exchange.shard(z, "j"), *masks


def block(exchange: Exchange) -> Callable[[], Any]:
    """The forward pass of an Evoformer block."""
    config = ModelConfig.preset("test")
    made = EvoformerBlock(config.channels.msa, config.channels.pair, config.evoformer).eval()
    use_exchange(made, exchange)
    inputs = _inputs(exchange)

    def run() -> None:
        with torch.no_grad():
            made(*inputs)

    run()  # what is made at the first call only is no part of a pass
    return run


def trained_blocks(exchange: Exchange) -> Callable[[], Any]:
    """Forward and backward pass of a stack of two Evoformer blocks with dropout."""
    config = ModelConfig.preset("test")
    made = EvoformerStack(config.channels.msa, config.channels.pair, replace(config.evoformer, blocks=2)).train()
    use_exchange(made, exchange)
    m, z, *masks = _inputs(exchange)

    def run() -> None:
        keys = DropoutKeys.of(made.dropout_streams([Draws.root(0)]))
        results = made(m.requires_grad_(), z.requires_grad_(), *masks, keys)
        sum(result.sum() for result in results).backward()

    run()
    return run


def fit(folder: Path) -> Callable[[], Any]:
    """Two steps of `evodsp fit` on the bundled chains, when all is built."""
    words = ["--config", "quickstart", "--model.preset", "test", "--trainer.max_steps", "2", "--output", str(folder)]
    words += ["--trainer.limit_val_batches", "0"]
    hush()
    run = check_run("fit", TrainingCLI("fit", with_packaged_configs(words)).settings)
    built = build(run, World(), time.time())
    return lambda: built.trainer.fit(built.module, datamodule=built.data)


def prediction(folder: Path) -> Callable[[], Any]:
    """`evodsp predict` of a bundled chain."""
    data, checkpoint = packaged_folder("data"), folder / "model.ckpt"
    sizes = FeatureConfig(crop_size=None, msa_clusters=4, extra_msa=4, recycles=1)
    save_model(checkpoint, AlphaFold(ModelConfig.preset("test")), features=sizes)
    config = PredictConfig(
        inputs=[data / "fasta" / f"{CHAIN}.fasta"],
        alignments=data / "alignments",
        checkpoint=checkpoint,
        output=folder / "predicted",
        device="cpu",
    )
    return lambda: run_predict(config, [])


@contextmanager
def two_ranks() -> Iterator[Exchange]:
    """The exchange of the first of two ranks, of which the other does not exist."""
    with fake_group(2) as group:
        yield ShardedExchange(group)


def counted() -> dict[str, list[str]]:
    """The files by what is done. CONTRIBUTING.md has a row with the most that there may be for each."""
    one = block(LocalExchange())
    with two_ranks() as exchange:
        found = {
            "triangle attention, one device": doors(one, inspect.unwrap(TriangleAttention.forward).__code__),
            "a block, one device": doors(one),
            "a block, one rank of two": doors(block(exchange)),
            "blocks with dropout and backward pass, one device": doors(trained_blocks(LocalExchange())),
            "blocks with dropout and backward pass, one rank of two": doors(trained_blocks(exchange)),
        }
    step, with_samples = _AutomaticOptimization.run.__code__, _TrainingEpochLoop.advance.__code__
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        found["a training step, from features to weights"] = doors(fit(Path(folder) / "step"), step)
        found["a training step with its samples"] = doors(fit(Path(folder) / "samples"), with_samples)
        found["a prediction"] = doors(prediction(Path(folder)))
    return found


def main() -> None:
    for name, files in counted().items():
        print(f"{len(files):3}  {name}: {' '.join(files)}")


if __name__ == "__main__":
    main()

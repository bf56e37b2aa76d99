"""How long a training step waits for a checkpoint that is written within it, and beside the next steps.

    python -m scripts.benchmarks.checkpoint_wait [--preset model_1] [--rounds 5] [--folder DIR] [--output FILE]

Trains a model of full width on small crops of the bundled families, on the CPU. Saves take turns: one within a step, one beside
the next. `wait`: milliseconds of `Trainer.save_checkpoint`. `step alone` and `step beside`: seconds of the next step without a
write and while the thread writes, and CPU seconds of the main thread therein. Medians, and the range in brackets. Each save
replaces a file in a new folder below `--folder` (default: the system's folder of temporary files).
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from evodsp.config import FeatureConfig, ModelConfig
from evodsp.files import whole_file
from evodsp.training.chains import find_chains
from evodsp.training.checkpoint_files import BesideTheSteps, WholeFileIO
from evodsp.training.config import DataConfig, TrainingConfig
from evodsp.training.datamodule import ChainDataModule
from evodsp.training.ema import ExponentialMovingAverage
from evodsp.training.module import TrainingModule

ROOT = Path(__file__).resolve().parents[2]


class Saves(Callback):
    """Saves after each third step: within it, or beside the next one. The step after that is alone."""

    def __init__(self, path: Path) -> None:
        self.path, self.whole = path, WholeFileIO()
        self.beside = BesideTheSteps(self.whole)
        self.found: dict[str, list[float]] = {}
        self.now = "warm-up"
        self.began = (0.0, 0.0)

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.perf_counter(), time.thread_time()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        for clock, begun, now in zip(
            ("wall", "CPU"), self.began, (time.perf_counter(), time.thread_time()), strict=True
        ):
            self.note(f"step {self.now}, {clock} s", now - begun)
        if self.now == "beside":
            start = time.perf_counter()
            self.beside.wait()
            self.note("rest of the write after that step, s", time.perf_counter() - start)
        step = trainer.global_step
        self.now = "alone"
        if step % 3 == 0:
            beside = step % 6 == 0
            trainer.strategy.checkpoint_io = self.beside if beside else self.whole
            start = time.perf_counter()
            trainer.save_checkpoint(self.path)
            self.note(f"wait, {'beside' if beside else 'within'}, ms", 1000 * (time.perf_counter() - start))
            self.now = "beside" if beside else "after a write"

    def note(self, what: str, value: float) -> None:
        self.found.setdefault(what, []).append(value)


def measure(preset: str, rounds: int, folder: Path) -> list[str]:
    """The lines of the report."""
    sizes = vars(ModelConfig.preset(preset))
    config = TrainingConfig(**{**sizes, "templates": TrainingConfig().templates}, ema_decay=0.999)
    features = FeatureConfig(crop_size=16, msa_clusters=8, extra_msa=8, recycles=0)
    data_config = DataConfig(str(ROOT / "data/alignments"), str(ROOT / "data/mmcif_files"), train=features)
    data, module = ChainDataModule(data_config, find_chains(data_config)), TrainingModule(config)
    saves = Saves(folder / "last.ckpt")
    trainer = Trainer(
        max_steps=6 * rounds + 2, accelerator="cpu", logger=False, gradient_clip_val=0.1, limit_val_batches=0,
        callbacks=[ExponentialMovingAverage(0.999), saves], enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    saves.beside.wait()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    lines = [f"{preset}: {parameters / 1e6:.1f} million parameters; file of {saves.path.stat().st_size / 1e6:.0f} MB"]
    del saves.found["step warm-up, wall s"], saves.found["step warm-up, CPU s"]
    for what, values in sorted(saves.found.items()):
        median = statistics.median(values)
        lines.append(f"{what:40} {median:9.2f}   [{min(values):.2f}, {max(values):.2f}]   of {len(values)}")
    return lines


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="model_1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        lines = measure(options.preset, options.rounds, Path(folder))
    given = " ".join(sys.argv[1:] if words is None else words)
    made_by = (
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"
    )
    text = "\n".join([f"{made_by}: python -m scripts.benchmarks.checkpoint_wait {given}".rstrip(), *lines]) + "\n"
    print(text, end="")
    if options.output:
        with whole_file(options.output) as partial:
            partial.write_text(text)


if __name__ == "__main__":
    main()

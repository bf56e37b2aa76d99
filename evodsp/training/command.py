"""`evodsp fit`, `validate` and `test`: LightningCLI over our typed settings."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from evodsp.argument_parser import OneLineErrors, check_nested
from evodsp.errors import UserError
from evodsp.launch.launcher import launch
from evodsp.launch.process_group import guarded, place, stop, under_launcher, was_restarted
from evodsp.parallel.config import ParallelConfig
from evodsp.training.checkpointing import Interruption, LastCheckpoint, WholeFileIO, best_checkpoint, remove_partial
from evodsp.training.checks import check_clipping, check_degree, count_ranks, is_first_rank, on_gpu
from evodsp.training.config import DataConfig, RunConfig, TrainingConfig, check_templates
from evodsp.training.csv_logger import CurveLogger
from evodsp.training.datamodule import ChainDataModule
from evodsp.training.ema import ExponentialMovingAverage
from evodsp.training.module import TrainingModule
from evodsp.training.options import SUMMARY, Command, TrainerOptions, add_arguments
from evodsp.training.progress import TrainingProgress, score_table
from evodsp.training.strategy import DSPStrategy
from evodsp.weights.checkpoint import check_same_model, load_model, read_checkpoint

# What Lightning says on every run and what nobody can act on.
_HUSHED = (
    ".*does not have many workers.*",
    ".*is smaller than the logging interval.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*You are trying to `self.log.*",
    ".*FSDP2-wrapped module .* returned a view tensor.*",  # nobody works on it in place
    ".*It is recommended to use `self.log.*sync_dist=True.*",  # what is logged is the same on all ranks already
    ".*No `val_dataloader`.*|.*You defined a `validation_step` but have no `val_dataloader`.*",
    ".*The `lightning.pytorch.loops.*",
    ".*GPU available but not used.*",
    ".*could not find the monitored key.*",
    ".*The dirpath has changed from.*",
)


class TrainingParser(OneLineErrors, LightningArgumentParser):
    """Lightning's parser with our errors."""


class TrainingCLI(LightningCLI):
    """Parses the command line and the YAML files, checks everything they name, and builds module, data and trainer."""

    def __init__(self, command: Command, words: list[str]) -> None:
        self.command = command
        super().__init__(
            save_config_callback=SaveConfigCallback if command == "fit" else None,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={**dataclasses.asdict(TrainerOptions()), "use_distributed_sampler": False},
            parser_class=TrainingParser,
            parser_kwargs={
                "prog": f"evodsp {command}",
                "description": f"{SUMMARY[command].capitalize()}.",
                "parser_mode": "omegaconf+",
            },
            args=words,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_arguments(parser)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # the base class's warns about sys.argv

    def _set_seed(self) -> None:
        seed_everything(self.config.seed, workers=True, verbose=False)

    def instantiate_classes(self) -> None:
        """Check first, write nothing: whatever the user got wrong is found before there is an output folder."""
        self.config_init = self.parser.instantiate(self.config)
        settings: TrainingConfig = self.config_init.model
        data: DataConfig = self.config_init.data
        check_nested(settings, "model")
        check_nested(data, "data")
        check_templates(settings, data)
        self.parallel: ParallelConfig = self.config_init.parallel
        check_nested(self.parallel, "parallel")
        check_nested(self.config_init.plan, "plan")
        trainer = dict(self.config_init.trainer)
        check_clipping(self.parallel, settings, trainer)
        self.ranks = count_ranks(trainer, self.parallel)
        check_degree(self.parallel, data)
        self.run_config = RunConfig(**{f.name: self.config_init[f.name] for f in dataclasses.fields(RunConfig)})
        self.folder = Path(self.run_config.output)
        self.checkpoints = self.folder / "checkpoints"
        self.start = self._start()
        self.batches_per_pass = self._fold_batches(settings)
        data = dataclasses.replace(data, batch_size=data.batch_size // self.batches_per_pass)
        self.datamodule = ChainDataModule(data, self.run_config.seed)
        self.datamodule.check()
        if self.start is not None and self.command == "fit":
            check_same_model(self.start, read_checkpoint(self.start), settings.model_config())
        if self.must_launch:
            return
        self.model = TrainingModule(settings, self.run_config.seed, data.validation)
        if self.start is not None and self.command != "fit":
            self.model.model = load_model(self.start, self.run_config.raw)
        if self.command == "fit" and is_first_rank():
            remove_partial(self.folder)
            if self.run_config.overwrite and self.start is None:
                _remove_run(self.folder)
        self.model.chain_names = {"val": self.datamodule.validation_chains, "test": self.datamodule.test_chains}
        # config.yaml is saved from here; running it again must neither delete that run nor start from its checkpoint.
        self.config.overwrite, self.config.ckpt_path = False, None
        self.trainer = self.instantiate_trainer()

    @property
    def must_launch(self) -> bool:
        """Whether this process is to start the ranks instead of being one."""
        return self.ranks > 1 and not under_launcher()

    def _fold_batches(self, settings: TrainingConfig) -> int:
        """Into how many passes a batch is divided: clipping per sample needs each sample's gradient by itself."""
        per_sample = self.config_init.trainer.gradient_clip_val and settings.optimizer.clip == "sample"
        return self.config_init.data.batch_size if per_sample else 1

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = dict(self.config_init.trainer)
        config["accumulate_grad_batches"] *= self.batches_per_pass
        if under_launcher():
            gpu = on_gpu(config)
            config["accelerator"], config["num_nodes"] = ("cuda" if gpu else "cpu"), 1
            config["devices"] = [place().local_rank] if gpu else 1  # of this rank; the strategy knows of the others
            config["strategy"] = DSPStrategy(self.parallel, self._agreed(), self.config_init.plan)
        if config["logger"] in (None, True):
            config["logger"] = self._loggers()
        config["callbacks"] = [*(config["callbacks"] or []), *self._callbacks()]
        try:
            trainer = self._instantiate_trainer({**config, **kwargs}, [])
        except (ValueError, MisconfigurationException) as error:  # Lightning's word for a wrong option
            raise UserError(f"trainer: {error}") from error
        trainer.strategy.checkpoint_io = WholeFileIO()
        return trainer

    def _agreed(self) -> str:
        """What every rank must have been given alike: all options, and the checkpoint to start from."""
        return f"{self.parser.dump(self.config, skip_none=False)}start: {self.start}"

    def _callbacks(self) -> list[Any]:
        self.interruption = Interruption()
        self.last = LastCheckpoint(self.checkpoints, self.run_config.checkpoint_every)
        callbacks: list[Any] = [self.interruption]
        trainer, decay = self.config_init.trainer, self.config_init.model.ema_decay
        if trainer.enable_progress_bar:
            callbacks.append(TrainingProgress())
        if self.command != "fit":
            return callbacks
        if decay is not None:
            callbacks.append(ExponentialMovingAverage(decay))
        if trainer.enable_checkpointing is not False:
            callbacks.append(self.last)
            if self.datamodule.validation_chains:
                callbacks.append(best_checkpoint(self.checkpoints))
        return callbacks

    def _loggers(self) -> list[Any]:
        if self.command != "fit":
            return []
        return [CurveLogger(self.folder), TensorBoardLogger(str(self.folder), name="tensorboard", version="")]

    def _start(self) -> Path | None:
        """The checkpoint to start from. Raises UserError if there is none where one is needed, or one in the way."""
        name = self.run_config.ckpt_path
        last = self.checkpoints / "last.ckpt"
        if self.command == "fit" and last.is_file() and (name == "auto" or was_restarted()):
            return last  # of this very run, whatever it began from
        if name == "auto":
            name = None
        if name in ("last", "best"):
            path = self.checkpoints / f"{name}.ckpt"
            if not path.is_file():
                raise UserError(f"--ckpt_path {name}: no {path}; check --output, or train first with 'evodsp fit'")
            return path
        if name is not None:
            return Path(name)
        if self.command != "fit":
            raise UserError(f"evodsp {self.command} needs --ckpt_path FILE (or last, or best)")
        found = sorted(self.checkpoints.glob("*.ckpt"))
        if found and not self.run_config.overwrite:
            raise UserError(
                f"{found[0]} is of an earlier run; resume it with --ckpt_path last, train elsewhere with --output, "
                "or replace it with --overwrite"
            )
        return None


def run_command(command: Command, words: list[str]) -> int:
    """Run one of the three commands; returns the exit code. Raises UserError, and KeyboardInterrupt with a message."""
    _hush()
    if "--trainer.help" in words:
        words = ["--help"]
    cli = TrainingCLI(command, words)
    if cli.must_launch:
        return launch(cli.ranks, [command, *words])
    try:
        with guarded():
            if command == "fit":
                cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.start, weights_only=True)
            else:
                getattr(cli.trainer, command)(cli.model, datamodule=cli.datamodule, verbose=False)
    except SystemExit:
        if not cli.interruption.happened:
            raise
    if cli.interruption.happened:
        raise KeyboardInterrupt(_resume_hint(cli.last))
    stop()
    if not cli.trainer.is_global_zero:
        return 0
    if cli.model.scores:
        print(score_table(cli.model.scores))
    if command == "fit":
        print(f"checkpoint: {cli.last.path}   curve: {cli.folder / 'curve.csv'}")
    return 0


def _remove_run(folder: Path) -> None:
    """Delete what an earlier run left in its output folder, and nothing else."""
    (folder / "curve.csv").unlink(missing_ok=True)
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _resume_hint(last: LastCheckpoint) -> str:
    if not last.path.is_file():
        return "no checkpoint has been written yet"
    step = f" of step {last.saved_step}" if last.saved_step is not None else ""
    return f"the last checkpoint{step} is {last.path}; resume with --ckpt_path last"


def _hush() -> None:
    """Leave of Lightning's and PyTorch's messages those that tell the user something."""
    for message in _HUSHED:
        warnings.filterwarnings("ignore", message=message)
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is another kind
        sys.stdout.reconfigure(line_buffering=True)

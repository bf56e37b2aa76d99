"""Checks of a training run before it starts. They read files; they build, write and delete nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evodsp.config import KernelsConfig, ModelConfig, leaves
from evodsp.data.samples.raw_features import check_config
from evodsp.data.samples.selection import CountedStructures
from evodsp.errors import SettingError, UserError
from evodsp.files import check_output_folder
from evodsp.launch.consensus import from_first, on_every
from evodsp.launch.environment import place, under_launcher, was_restarted
from evodsp.losses.total import check_heads
from evodsp.model.kernels import check_names
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.config import WHEN_TO_RAISE, ParallelConfig
from evodsp.parallel.group import Group, data_ranks
from evodsp.printing import counted
from evodsp.training.chains import Chains, find_chains
from evodsp.training.config import DataConfig, RunConfig, TrainingConfig, check_samples, check_templates
from evodsp.training.execution import check_compilation, check_graphs, obstacle_to_graphs
from evodsp.training.gradients import Batching, batching, check_patterns
from evodsp.training.loader import read_quarantine
from evodsp.training.options import SETTINGS, Command
from evodsp.training.run_folder import RunFolder, began_with, changes, recorded
from evodsp.training.trainer import check_interval, check_least, check_scored, check_trainer, count_devices
from evodsp.weights.checkpoint import check_same_model, is_parameter_file, read_checkpoint
from evodsp.weights.initial import check_initial


@dataclass(frozen=True)
class Settings:
    """All options of a run, typed."""

    run: RunConfig
    model: TrainingConfig
    data: DataConfig
    parallel: ParallelConfig
    plan: CommunicationPlan
    kernels: KernelsConfig
    trainer: dict[str, Any]
    """Options of Lightning's Trainer."""

    @classmethod
    def of(cls, options: Any) -> Settings:
        """The settings in the parser's namespace of instantiated options."""
        groups = {group: options[group] for _, group in SETTINGS if group}
        return cls(run_config(options), **groups, trainer=dict(options.trainer))

    @property
    def by_name(self) -> dict[str, Any]:
        """Every option by its dotted name."""
        groups = {group: getattr(self, group or "run") for _, group in SETTINGS}
        typed = {name: value for group, part in groups.items() for name, value in leaves(part, group)}
        return {**typed, **{f"trainer.{name}": value for name, value in self.trainer.items()}}

    @property
    def communication(self) -> CommunicationPlan:
        """The plan, as far as compiled blocks can follow it: they do not keep gathered tensors for a recomputation."""
        return self.plan if self.run.compile == "none" else dataclasses.replace(self.plan, keep_gathered=False)

    @property
    def batches_per_pass(self) -> int:
        """The number of passes into which a batch is divided: clipping per sample needs the gradient of each sample alone."""
        per_sample = self.trainer["gradient_clip_val"] and self.model.optimizer.clip == "sample"
        return self.data.batch_size if per_sample else 1


def run_config(options: Any) -> RunConfig:
    """The options of the run itself, from the parser's namespace. Raises SettingError if a number is out of range."""
    return RunConfig(**{item.name: options[item.name] for item in dataclasses.fields(RunConfig)})


@dataclass(frozen=True)
class CheckedRun:
    """A run whose settings fit together and whose inputs exist."""

    command: Command
    settings: Settings
    ranks: int
    folder: RunFolder
    start: Path | None
    """Checkpoint to start from."""
    chains: Chains
    batching: Batching
    changed: tuple[str, ...] = ()
    """A line for each setting that differs from those of the run that is resumed."""

    @property
    def recorded(self) -> dict[str, Any]:
        """The settings that a checkpoint keeps, for a run that resumes."""
        return recorded(self.settings.by_name, self.ranks, self.chains)

    @property
    def notes(self) -> list[str]:
        """Warnings before training starts, one a line."""
        rule = CountedStructures(self.settings.model.loss, self.settings.data.assumed_resolution)
        line = rule.line(self.chains.resolutions, len(self.chains.train), "training chains")
        lines = (line, self._idle_gpus, self._shared_samples, self._no_graphs)
        return [*self.chains.notes(self.folder.missing), *(line for line in lines if line is not None)]

    @property
    def _idle_gpus(self) -> str | None:
        """The GPUs of the machine that a run on the CPU leaves alone."""
        gpus = torch.cuda.device_count()
        if not gpus or self.settings.trainer["accelerator"] != "cpu":
            return None
        mesh = f"--trainer.devices {self.ranks}" if self.ranks <= gpus else "--trainer.devices 1 --parallel.sequence 1"
        return (
            f"this run trains on the CPU, because trainer.accelerator is cpu, and the machine has {counted(gpus, 'GPU')}; "
            f"add --trainer.accelerator gpu {mesh}"
        )

    @property
    def _shared_samples(self) -> str | None:
        """That ranks share samples although each could have one of its own."""
        sequence, ranks, samples = self.settings.parallel.sequence, self.batching.data_ranks, self.batching.samples
        if sequence == 1 or ranks >= samples:
            return None
        return (
            f"parallel.sequence is {sequence}, so {counted(ranks, 'data rank')} {'takes' if ranks == 1 else 'take'} the "
            f"{samples} samples of a step one after another; {WHEN_TO_RAISE}"
        )

    @property
    def _no_graphs(self) -> str | None:
        """That a run on GPUs has no CUDA graphs, if nobody has said so. A CPU has none."""
        gpu = on_gpu(self.settings.trainer)
        if self.command != "fit" or self.settings.run.cuda_graphs != "auto" or self.records_stacks or not gpu:
            return None
        obstacle = self._obstacle_to_graphs
        assert obstacle is not None
        return f"this run has no CUDA graphs, because {obstacle[0]}"

    @property
    def records_stacks(self) -> bool:
        """Whether the stacks of blocks are recorded as CUDA graphs."""
        return self.settings.run.cuda_graphs is not False and self._obstacle_to_graphs is None

    @property
    def _obstacle_to_graphs(self) -> tuple[str, str] | None:
        settings = self.settings
        return obstacle_to_graphs(settings.run, settings.parallel, settings.data, on_gpu(settings.trainer))

    @property
    def last_step(self) -> int:
        """The number of optimizer steps after which training ends; -1: no limit."""
        samples, steps = self.settings.run.max_samples, self.settings.trainer["max_steps"]
        limits = [*([self.batching.steps(samples)] if samples is not None else []), *([steps] if steps >= 0 else [])]
        return min(limits, default=-1)

    @property
    def checkpoint_steps(self) -> list[int]:
        """The intervals of `checkpoints/last.ckpt` in steps; an interval in samples is rounded down."""
        steps, samples = self.settings.run.checkpoint_every, self.settings.run.checkpoint_every_samples
        return [*([steps] if steps else []), *([max(1, samples // self.batching.samples)] if samples else [])]


def check_run(command: Command, settings: Settings, group: Group | None = None) -> CheckedRun:
    """Check everything that the settings name. Raises UserError for the first mistake.

    `group`: all ranks, which call this together; None for one process. The first rank alone reads the checkpoint that a run
    resumes from and looks the chains up: many ranks that read the same files at once would wait for the file system.
    """
    model, data, parallel = settings.model, settings.data, settings.parallel
    check_templates(model, data)
    check_samples(model, data)
    check_heads(model.loss, model.heads)
    check_config(data.train, "data.train.")
    check_config(data.validation, "data.validation.")
    check_trainer(settings.trainer)
    check_precision(settings.trainer)
    check_clipping(parallel, model, settings.trainer)
    check_names(settings.kernels)
    if command == "fit":
        check_patterns(model)
        check_adapters(parallel, model)
    elif settings.run.dry_run:
        raise UserError(f"dry_run is true, but evodsp {command} trains nothing; leave it out")
    ranks = count_ranks(settings.trainer, parallel)
    accumulate = settings.trainer["accumulate_grad_batches"]
    global_batch = settings.run.global_batch if command == "fit" else None
    batches = batching(global_batch, ranks // parallel.sequence, data.batch_size, accumulate)
    check_training_sizes(parallel, data)
    if command == "fit":
        check_compilation(settings.run, parallel, settings.plan, data, on_gpu(settings.trainer))
        check_graphs(settings.run, parallel, data, on_gpu(settings.trainer))
    folder = RunFolder(Path(settings.run.output), settings.run.keep_last, settings.run.keep_best)
    start = from_first(lambda: folder.start(command, settings.run, was_restarted()), group)
    if command == "fit":
        check_output_folder(folder.path)
        check_output_folder(folder.checkpoints)
    known = read_quarantine(folder.quarantine) if command == "fit" and start is not None else None
    chains = find_chains(data, {failure.chain for failure in known or ()}, group, model.arrangement)
    if command != "fit":
        check_scored_chains(command, chains)
    scored = chains.test if command == "test" else chains.validation
    check_scored(command, settings.trainer, math.ceil(len(scored) / batches.data_ranks))
    saved = on_every(lambda: _resumed(command, settings, start), group)
    settings = dataclasses.replace(settings, run=began_with(settings.run, saved))
    checked = CheckedRun(command, settings, ranks, folder, start, chains, batches)
    if command != "fit":
        return checked
    if settings.run.early_stop is not None and (not scored or settings.trainer["limit_val_batches"] == 0):
        raise UserError(
            f"early_stop is {settings.run.early_stop}, but the run validates nothing; give data.validation_chains, and leave "
            "trainer.limit_val_batches out"
        )
    check_interval(settings.trainer, batches.batches(data.samples_per_epoch) * settings.batches_per_pass)
    check_least("min_steps", settings.trainer, checked.last_step)
    check_length(checked, saved)
    if start is None:
        return checked
    changed = on_every(lambda: changes(start, saved, checked.recorded), group)
    return dataclasses.replace(checked, changed=tuple(changed))


def check_length(run: CheckedRun, checkpoint: Mapping[str, Any]) -> None:
    """Raise UserError if `fit` would resume a finished run or one of another global batch, or lower the learning rate towards
    an end that there is not.

    `checkpoint`: the content of `run.start`. With `--ckpt_path auto`, which a batch system may repeat, a finished run is no
    mistake.
    """
    trainer, optimizer, start = run.settings.trainer, run.settings.model.optimizer, run.start
    endless = run.last_step < 0 and trainer["max_epochs"] in (None, -1)
    if endless and optimizer.schedule == "cosine" and optimizer.total_samples is None:
        expected = "a number: max_samples and trainer.max_steps are off"
        raise SettingError("model.optimizer.total_samples", "null", expected)
    if start is None:
        return
    former = checkpoint.get("samples_per_step", run.batching.samples)  # older versions do not say
    if former != run.batching.samples:
        raise UserError(
            f"{start}: its run has {counted(former, 'sample')} a step, but this one has {run.batching}; set global_batch to "
            f"{former}, or begin another run"
        )
    repeated = run.settings.run.ckpt_path == "auto" or was_restarted()
    if 0 <= run.last_step <= checkpoint.get("global_step", 0) and not repeated:
        name, limit = "max_samples", run.settings.run.max_samples
        if run.last_step == trainer["max_steps"]:
            name, limit = "trainer.max_steps", run.last_step
        raise UserError(
            f"{start}: is at step {checkpoint['global_step']} already, and {name} is {limit}, so nothing is left to train; "
            f"give a larger {name}"
        )


def check_scored_chains(command: Command, chains: Chains) -> None:
    """Raise UserError if `validate` or `test` would score nothing."""
    if not (chains.validation if command == "validate" else chains.test):
        names = (
            "data.validation_chains is" if command == "validate" else "data.test_chains and data.validation_chains are"
        )
        raise UserError(f"{names} null, so there is no chain to score; give a list of chains, or a file of their names")


def _resumed(command: Command, settings: Settings, start: Path | None) -> dict[str, Any]:
    """What `fit` resumes from: the content of the checkpoint `start`; nothing of other commands, and without one.

    Raises UserError if the checkpoint's model has other sizes than the settings, or if `fit` cannot resume from it; without
    one, if the weights of `init_from` do not fit. `validate` and `test` take the sizes from the checkpoint, so settings without
    any size fit every checkpoint.
    """
    sizes = settings.model.model_config()
    if start is None:
        if settings.run.init_from is not None:
            check_initial(settings.run.init_from, sizes)
        return {}
    if command != "fit" and (sizes == ModelConfig() or is_parameter_file(start)):
        return {}
    checkpoint = read_checkpoint(start)
    if command == "fit" and "optimizer_states" not in checkpoint:
        raise UserError(
            f"{start}: holds weights, but not the state of a run, which --ckpt_path resumes; begin with --init_from {start}"
        )
    check_same_model(start, checkpoint, sizes)
    return checkpoint if command == "fit" else {}


def count_ranks(trainer: Mapping[str, Any], parallel: ParallelConfig) -> int:
    """Ranks of this run: the ones that a launcher started, or the ones to start on this machine.

    `trainer`: Lightning's options. Raises UserError if they contradict the launcher, or do not form groups of
    `parallel.sequence`.
    """
    gpus = torch.cuda.device_count()
    if on_gpu(trainer) and not gpus:
        raise SettingError("trainer.accelerator", trainer["accelerator"], "cpu or auto: this machine has no GPU")
    devices, nodes = count_devices(trainer["devices"]), int(trainer["num_nodes"])
    if under_launcher():
        ranks = place().ranks
        if devices is not None and devices * nodes != ranks:
            raise UserError(
                f"trainer.devices {devices} x trainer.num_nodes {nodes} = {devices * nodes} ranks, but {ranks} were started; "
                "leave both out"
            )
    elif nodes > 1:
        raise UserError(
            f"trainer.num_nodes is {nodes}, but evodsp starts ranks on its own machine only; use torchrun, srun or mpirun"
        )
    elif trainer["accelerator"] in ("cpu", "gpu", "cuda", "auto"):
        if on_gpu(trainer) and devices is not None and devices > gpus:
            raise SettingError("trainer.devices", devices, f"at most {gpus}, the GPUs of this machine")
        found = gpus if on_gpu(trainer) else parallel.sequence
        ranks = found if devices is None else devices
    else:
        ranks = devices or 1
    data_ranks(ranks, parallel.sequence)
    if ranks > 1:
        _check_options(trainer)
    return ranks


def on_gpu(trainer: Mapping[str, Any]) -> bool:
    """Whether each rank computes on a GPU."""
    name = trainer["accelerator"]
    return name in ("gpu", "cuda") or (name == "auto" and torch.cuda.is_available())


def check_training_sizes(parallel: ParallelConfig, data: DataConfig) -> None:
    """Raise UserError if training samples have too few MSA rows or residues for `parallel.sequence` ranks."""
    for name, part in (("msa_clusters", "an MSA row"), ("crop_size", "a residue")):
        size = getattr(data.train, name)
        if size is not None and parallel.sequence > size:
            raise UserError(
                f"parallel.sequence is {parallel.sequence}, but data.train.{name} is {size}, and each rank of a sample needs "
                f"{part}; lower parallel.sequence or raise data.train.{name}"
            )


def check_precision(trainer: Mapping[str, Any]) -> None:
    """Raise UserError for a precision in which the model cannot be trained."""
    precision = str(trainer["precision"])
    if precision in ("16", "16-mixed"):
        reason = "whose scaled gradients can be neither clipped nor compared between ranks"
    elif precision in ("16-true", "bf16-true", "transformer-engine", "transformer-engine-float16"):
        reason = "which keeps the weights in half precision, where an update is smaller than their rounding"
    else:
        return
    raise UserError(f"trainer.precision is {precision}, {reason}; use bf16-mixed or 32-true")


def check_adapters(parallel: ParallelConfig, model: TrainingConfig) -> None:
    """Raise UserError for adapters of sharded parameters, whose sums would have to be formed where they are gathered."""
    if model.adapters.rank and parallel.parameters == "fsdp2":
        raise UserError(
            f"model.adapters.rank is {model.adapters.rank}, but parallel.parameters is fsdp2, whose weights have no adapters; "
            "set parallel.parameters to replicate or zero1, or model.adapters.rank to 0"
        )


def check_clipping(parallel: ParallelConfig, model: TrainingConfig, trainer: Mapping[str, Any]) -> None:
    """Raise UserError if gradients cannot be clipped as the settings ask."""
    if not trainer["gradient_clip_val"] or model.optimizer.clip == "batch":
        return
    fix = "set model.optimizer.clip to batch"
    if parallel.parameters == "fsdp2":
        raise UserError(
            "parallel.parameters is fsdp2, which averages gradients over all ranks before the norm of a sample's gradient can "
            f"be taken, but model.optimizer.clip is sample; {fix}, or use replicate or zero1"
        )
    if str(trainer["gradient_clip_algorithm"]) == "value":
        raise UserError(f"trainer.gradient_clip_algorithm is value, but model.optimizer.clip is sample; {fix}")


def _check_options(trainer: Mapping[str, Any]) -> None:
    """Raise UserError for Trainer options that work in one process but not on several ranks."""
    if trainer["strategy"] != "auto":
        raise UserError(
            f"trainer.strategy is {trainer['strategy']}, but parallel.sequence and parallel.parameters arrange several ranks; "
            "leave it out"
        )
    if not isinstance(trainer["val_check_interval"], int | float | None):
        raise SettingError(
            "trainer.val_check_interval",
            trainer["val_check_interval"],
            "a number on several ranks, whose clocks would not agree when it is time",
        )
    if trainer["accelerator"] not in ("cpu", "gpu", "cuda", "auto"):
        raise UserError(f"trainer.accelerator is {trainer['accelerator']}; several ranks need cpu or gpu")

"""`evodsp fit`, `validate` and `test`: from the command line to a trained or scored model.

A run has five stages: parse the options (`TrainingCLI`), let the ranks meet, check what the options name (`checks.check_run`),
build module, data and trainer (`build`), and run: rank 0 prepares the output folder, Lightning's trainer does the rest.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from evodsp.errors import UserError
from evodsp.files import lock, output_errors
from evodsp.launch.consensus import from_first, long_from_first, on_first
from evodsp.launch.environment import STOPPED, place, tell_stopped, under_launcher
from evodsp.launch.launcher import launch
from evodsp.launch.process_group import gpu_number, guarded, stop
from evodsp.model.precision import float32_matmul
from evodsp.printing import show, tell
from evodsp.training.account import account
from evodsp.training.bad_samples import BadSamples
from evodsp.training.chains import ChainDataModule, unapplied_filters
from evodsp.training.checkpoints import BestCheckpoint, ExponentialMovingAverage, LastCheckpoint, use_checkpoint_io
from evodsp.training.checks import CheckedRun, Settings, check_run, count_ranks, on_gpu, run_config
from evodsp.training.config import RunConfig
from evodsp.training.execution import AutomaticRecomputation, CompiledBlocks, RecordedStacks
from evodsp.training.loader import read_quarantine
from evodsp.training.logs import CurveLogger, Throughput, TrainingProgress, Utilisation, log_settings, training_loggers
from evodsp.training.module import TrainingModule
from evodsp.training.options import SUMMARY, Command, PresetParser, TrainerOptions, add_arguments
from evodsp.training.run_end import EarlyStop, Interruption, LastValidation, RunStopped, StopRequest, deadline
from evodsp.training.run_folder import RunFolder
from evodsp.training.scores import score_table, warn_of_overlap, write_baseline, write_scores
from evodsp.training.trainer import DSPStrategy, check_callbacks, hush, tell_first
from evodsp.training.world import MeshWorld, World
from evodsp.weights.checkpoint import PREFIX, load_model
from evodsp.weights.initial import initialise


class TrainingParser(PresetParser, LightningArgumentParser):
    """Lightning's parser with our errors and presets."""


class TrainingCLI(LightningCLI):
    """Parses the command line and the YAML files into `settings`. Builds nothing else."""

    parser: TrainingParser
    settings: Settings

    def __init__(self, command: Command, words: list[str]) -> None:
        super().__init__(
            save_config_callback=None,
            trainer_defaults={**dataclasses.asdict(TrainerOptions()), "use_distributed_sampler": False},
            parser_class=TrainingParser,
            parser_kwargs={
                "prog": f"evodsp {command}",
                "description": f"{SUMMARY[command].capitalize()}.",
                "parser_mode": "omegaconf+",
                "default_env": True,
                "env_prefix": "EVODSP",
                "dump_header": [f"lightning.pytorch=={lightning.__version__}"],
            },
            args=words,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def init_parser(self, **kwargs: Any) -> TrainingParser:
        """Not Lightning's, whose --config is described otherwise than in the quick help."""
        return TrainingParser(**kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_arguments(parser)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # the base class would warn about sys.argv

    def _set_seed(self) -> None:
        with self.parser.located():
            seed = run_config(self.config).seed
        seed_everything(seed, workers=True, verbose=False)

    def instantiate_classes(self) -> None:
        self.settings = Settings.of(self.parser.instantiate_settings(self.config))
        check_callbacks(_as_list(self.settings.trainer["callbacks"]))

    def config_text(self, run: RunConfig | None = None) -> str:
        """All options as YAML. A run of this file neither replaces this run nor starts from its checkpoint.

        `run`: the options of the run, to which a checkpoint has added the weights that the run began with.
        """
        config = self.config.clone()
        config.overwrite, config.ckpt_path = False, None
        if run is not None:
            config.init_from, config.raw = run.init_from, run.raw
        return self.parser.dump(config, skip_none=False, skip_validation=True)


@dataclass(frozen=True)
class Built:
    """The parts of a run that is ready to begin."""

    world: World
    module: TrainingModule
    data: ChainDataModule
    trainer: Trainer
    interruption: Interruption
    last: LastCheckpoint
    stop: StopRequest
    average: ExponentialMovingAverage | None


def build(run: CheckedRun, world: World, begun: float) -> Built:
    """Build module, data and trainer; no file is written. Raises UserError for a Trainer option that Lightning refuses.

    `begun`: when this command began, in seconds since the epoch.
    """
    settings, seed = run.settings, run.settings.run.seed
    options, passes = settings.trainer, settings.batches_per_pass
    data_config = dataclasses.replace(settings.data, batch_size=settings.data.batch_size // passes)
    data = ChainDataModule(data_config, run.chains, seed, world)
    model = None
    if run.start is not None and run.command != "fit":
        named = [*(settings.model.extra_msa.layers or ()), *(settings.model.evoformer.layers or ())]
        model = load_model(run.start, settings.run.raw, layers=named)
    limits = settings.run
    bad = BadSamples(limits.max_bad_samples, limits.replay_files, data_config.skip_samples or ())
    stop = StopRequest(deadline(_seconds(options["max_time"]), begun, limits.stop_before_end))
    minutes = limits.checkpoint_every_minutes
    last = LastCheckpoint(run.folder.last, run.checkpoint_steps, None if minutes is None else 60 * minutes)
    requests, per_step = (stop, last), run.batching.samples
    module = TrainingModule(
        settings.model, seed, data_config.validation, world, settings.kernels, model, bad, requests, per_step
    )
    module.settings = run.recorded
    module.chain_names = {"val": run.chains.validation, "test": run.chains.test}
    interruption = Interruption()
    own_callbacks = [
        interruption,
        *_callbacks(run, last),
        *([_throughput(run, module, data), module.rows, bad, stop] if run.command == "fit" else []),
    ]
    config = {
        **options,
        "max_time": None,  # ours (`StopRequest`)
        "max_steps": run.last_step,
        "accumulate_grad_batches": run.batching.accumulate * passes,
        "logger": training_loggers(run.folder.path, options["logger"])
        if run.command == "fit"
        else options["logger"] or False,
        "callbacks": [*_as_list(options["callbacks"]), *own_callbacks],
        "default_root_dir": options["default_root_dir"] or str(run.folder.path),
    }
    if isinstance(world, MeshWorld):
        config["accelerator"], config["num_nodes"] = ("cuda" if world.on_gpu else "cpu"), 1
        # This rank's; the strategy knows the other ranks.
        config["devices"] = [gpu_number(place())] if world.on_gpu else 1
        config["strategy"] = DSPStrategy(world, settings.communication)
    try:
        trainer = Trainer(**config)
    except (ValueError, TypeError, ModuleNotFoundError, MisconfigurationException) as error:
        # How Lightning reports a wrong option.
        raise UserError(f"trainer: {error}") from error
    use_checkpoint_io(trainer, run.folder.former, settings.run.async_checkpoints)
    average = next((each for each in own_callbacks if isinstance(each, ExponentialMovingAverage)), None)
    return Built(world, module, data, trainer, interruption, last, stop, average)


def _seconds(max_time: Any) -> float | None:
    """Lightning's `max_time` in seconds. Raises UserError unless it is one.

    Its own timer counts the time of earlier starts too, so that a run which resumes would stop at once.
    """
    try:
        return Timer(max_time).time_remaining()
    except (TypeError, MisconfigurationException) as error:
        raise UserError(f"trainer.max_time is {max_time}, but must be a time as DD:HH:MM:SS") from error


def _as_list(value: Any) -> list[Any]:
    """None, one object or a list of them, as a list."""
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _callbacks(run: CheckedRun, last: LastCheckpoint) -> list[Callback]:
    settings = run.settings
    callbacks: list[Callback] = []
    if run.command == "fit" and run.chains.validation:
        callbacks.append(LastValidation())
    if run.command == "fit" and settings.run.early_stop is not None:
        callbacks.append(EarlyStop(settings.run.early_stop))
    if settings.trainer["enable_progress_bar"]:
        callbacks.append(TrainingProgress())
    if run.command != "fit":
        return callbacks
    callbacks.append(AutomaticRecomputation(projections=settings.run.compile == "none"))
    if settings.run.compile == "blocks":
        callbacks.append(CompiledBlocks())
    if run.records_stacks:
        callbacks.append(RecordedStacks(required=settings.run.cuda_graphs is True))
    if settings.model.ema_decay is not None:
        callbacks.append(ExponentialMovingAverage(settings.model.ema_decay))
    if settings.trainer["enable_checkpointing"] is not False:
        if run.chains.validation:
            callbacks.append(BestCheckpoint(run.folder.checkpoints, settings.run.keep_best))
        callbacks.append(last)  # after the best, whose scores it holds
    return callbacks


def _throughput(run: CheckedRun, module: TrainingModule, data: ChainDataModule) -> Throughput:
    settings = run.settings
    # Collectives within graphs cannot be measured. Samples of different sizes have different FLOPs.
    within = settings.run.compile != "none" or (run.records_stacks and settings.parallel.sequence > 1)
    waits = None if within else module.world.waits
    utilisation = None
    if settings.data.train.crop_size is not None:
        precision, limits = str(settings.trainer["precision"]), settings.run
        trained = settings.model.freeze, settings.model.train_only, settings.model.adapters
        utilisation = Utilisation(module.model.config, precision, limits.matmul_precision, limits.peak_tflops, *trained)
    return Throughput(module, data, waits, utilisation)


def run(command: Command, words: list[str]) -> int:
    """The exit code of `trained`."""
    return trained(command, words)[0]


def trained(command: Command, words: list[str]) -> tuple[int, RunFolder]:
    """Run `evodsp fit`, `validate` or `test` with the options `words`, and return the exit code, STOPPED if the run was asked
    to stop before its end and has saved, and the output folder.

    Raises UserError, or KeyboardInterrupt with a message that says how to resume.
    """
    hush()
    begun = time.time()
    # Callbacks and loggers in the current folder. `python -m evodsp`, and so our launcher, finds them anyway.
    if "" not in sys.path:
        sys.path.append("")
    if "--trainer.help" in words:
        words = ["--help"]
    cli = TrainingCLI(command, words)
    with guarded(), cli.parser.located():
        world = _met(cli)
        checked = check_run(command, cli.settings, world.group)
    if checked.ranks > 1 and not under_launcher():
        return launch(checked.ranks, [command, *words]), checked.folder
    built = build(checked, world, begun)
    # A rank failed at the end, and torchrun started all again.
    if command == "fit" and built.stop.deadline <= time.time():
        tell_stopped()
        stop()
        tell_first("evodsp: the time limit is over; nothing was trained")
        return STOPPED, checked.folder
    for line in unapplied_filters(checked.settings.data, cli.parser.places) if command == "fit" else ():
        tell_first(f"evodsp: warning: {line}")
    stopped = False
    try:
        with guarded(), output_errors(checked.folder.path), float32_matmul(checked.settings.run.matmul_precision):
            _execute(checked, built, cli.config_text(checked.settings.run))
    except RunStopped:
        stopped = True
    except (MisconfigurationException, RuntimeError) as error:  # such as a callback that monitors what is not logged
        if isinstance(error, RuntimeError) and not str(error).startswith("Early stopping conditioned on metric"):
            raise
        raise UserError(f"trainer: {' '.join(str(error).split())}") from error
    except SystemExit:
        if not built.interruption.happened:
            raise
    if built.interruption.happened:
        raise KeyboardInterrupt(_resume_hint(built.last))
    if stopped and not built.stop.interrupted:
        tell_stopped()
    stop()
    if stopped and built.stop.interrupted:
        raise KeyboardInterrupt(_resume_hint(built.last))
    if stopped:
        tell_first(f"evodsp: stopped by {built.stop.reason}; {_resume_hint(built.last)}")
        return STOPPED, checked.folder
    if built.trainer.is_global_zero and not checked.settings.run.dry_run:
        _report(checked, built)
    return 0, checked.folder


def _met(cli: TrainingCLI) -> World:
    """The ranks that a launcher started, once they have met, or this process alone.

    Raises UserError if they do not form groups of `parallel.sequence`, or were given different settings.
    """
    if not under_launcher():
        return World()
    settings = cli.settings
    count_ranks(settings.trainer, settings.parallel)
    text = f"{cli.config_text()}overwrite: {settings.run.overwrite}\nckpt_path: {settings.run.ckpt_path}"
    return MeshWorld.meet(settings.parallel, on_gpu(settings.trainer), text)


def _execute(run: CheckedRun, built: Built, config_text: str) -> None:
    """Prepare the output folder, and run the trainer."""
    module, data, trainer = built.module, built.data, built.trainer
    overwrite, cache = run.settings.run.overwrite, run.settings.data.chain_data_cache
    if run.command != "fit":
        scored = run.chains.test if run.command == "test" else run.chains.validation
        long_from_first(lambda: warn_of_overlap(run.chains, scored, cache), built.world.group)
        getattr(trainer, run.command)(module, datamodule=data, verbose=False)
        return
    replace = overwrite and run.start is None
    resumes, missing, group = run.start is not None, run.chains.missing, built.world.group
    if (source := run.settings.run.init_from) is not None and not resumes:
        # Rank 0 reads the file; the strategy gives its weights to the others.
        done = from_first(lambda: initialise(module.model, source, run.settings.run.raw), group)
        if built.average is not None:
            names = {name for name, _ in module.model.named_parameters()} - set(done.new)
            built.average.begin_trained(f"{PREFIX}{name}" for name in names)
        for line in done.lines(source) if trainer.is_global_zero else ():
            tell(f"evodsp: {line}")
    if trainer.is_global_zero:
        for line in run.changed:
            tell_first(f"evodsp: {line}")
        if run.settings.run.dry_run or (source is not None and not resumes):
            for line in account(run, module.model):
                tell(f"evodsp: {line}")
    scored = run.chains.validation if run.settings.trainer["limit_val_batches"] != 0 else []
    if run.settings.run.dry_run:
        _tell_notes(run, trainer)
        long_from_first(lambda: warn_of_overlap(run.chains, scored, cache), group)
        return
    with ExitStack() as held:
        folder = run.folder.path
        on_first(lambda: held.enter_context(lock(folder / "run.lock", folder, "trains there")), group)
        on_first(lambda: run.folder.prepare(config_text, replace, resumes, missing), group)
        _tell_notes(run, trainer)
        if trainer.is_global_zero:
            log_settings(trainer.loggers, config_text, resumes)
        _open_quarantine(run, built)
        if trainer.is_global_zero and run.settings.run.global_batch is not None:
            tell_first(f"evodsp: {run.batching}")
        if scored:
            long_from_first(lambda: write_baseline(run.folder.baseline, run.chains, cache), group)
        trainer.fit(module, datamodule=data, ckpt_path=run.start, weights_only=True)


def _tell_notes(run: CheckedRun, trainer: Trainer) -> None:
    for note in run.notes if trainer.is_global_zero else ():
        tell(f"evodsp: warning: {note}")


def _open_quarantine(run: CheckedRun, built: Built) -> None:
    """Read the list of chains that are left out, of a run that resumes, and let rank 0 keep it in its file from now on.

    The file of the output folder counts, because it is newer than the last checkpoint and a user may delete lines of it. If
    there is none, because the run resumes in another folder, the checkpoint's copy does.
    """
    quarantine, data = built.data.quarantine, built.data
    known = from_first(lambda: read_quarantine(run.folder.quarantine), built.world.group)
    if built.world.group is None or built.world.group.rank == 0:
        quarantine.path, built.module.bad_samples.folder = run.folder.quarantine, run.folder
    if known is not None:
        data.quarantine_is_known = True
        quarantine.restore(known)


def _report(run: CheckedRun, built: Built) -> None:
    """Print the scores of the last validation or test, and the files that were written. `validate` and `test` write the scores
    of each chain into the output folder."""
    if early := [one for one in built.trainer.callbacks if isinstance(one, EarlyStop) and one.has_stopped]:  # type: ignore[attr-defined]
        show(early[0].line)
    if built.module.scores:
        if run.command == "fit":
            show(f"scores after step {built.module.scored_step}:")
        show(score_table(built.module.scores))
        if run.command != "fit":
            path = run.folder.scores(run.command)
            with output_errors(run.folder.path):
                write_scores(built.module.scores, "test" if run.command == "test" else "validation", path)
            show(f"scores: {path}")
    if run.command == "fit":
        written: dict[str, Path] = {}
        if built.last.saved_step is not None:
            written["checkpoint"] = run.folder.last
        if any(isinstance(logger, CurveLogger) for logger in built.trainer.loggers) and run.folder.curve.is_file():
            written["curve"] = run.folder.curve
        show("   ".join(f"{name}: {path}" for name, path in (written or {"config": run.folder.config}).items()))


def _resume_hint(last: LastCheckpoint) -> str:
    if not last.path.is_file():
        return "no checkpoint has been written yet"
    step = f" of step {last.saved_step}" if last.saved_step is not None else ""
    return f"the last checkpoint{step} is {last.path}; resume with --ckpt_path last"

"""Options of `evodsp fit`, `validate` and `test`, defined once for the quick help (here) and for the run (`command.py`).

Importing Lightning takes seconds. So `--help` lists all of our own options, which need no torch, and only the most used options
of Lightning's Trainer; `--trainer.help` imports Lightning and lists all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jsonargparse import ActionConfigFile

from evodsp.argument_parser import Names, OneLineErrors, given_settings, plain_words
from evodsp.config import LISTED_PRESETS, PRESETS, KernelsConfig, ModelConfig, leaves, started_with
from evodsp.errors import UserError, nearest
from evodsp.model.schedule import CommunicationPlan
from evodsp.packaged import packaged_folder, with_packaged_configs
from evodsp.parallel.config import ParallelConfig
from evodsp.printing import show
from evodsp.training.config import DataConfig, RunConfig, TrainingConfig

Command = Literal["fit", "validate", "test"]

SUMMARY: dict[Command, str] = {
    "fit": "train a model",
    "validate": "score a checkpoint on the validation chains",
    "test": "score a checkpoint on the test chains",
}

EXAMPLES: dict[Command, tuple[str, ...]] = {
    "fit": (
        "evodsp fit --config configs/quickstart.yaml",
        "evodsp fit --config configs/quickstart.yaml --model.evoformer.blocks 8 --trainer.max_steps 100",
        "evodsp fit --config configs/quickstart.yaml --ckpt_path last",
        "evodsp fit --config configs/quickstart.yaml --parallel.sequence 2",
        "evodsp fit --config configs/quickstart.yaml --model.preset model_3",
        "evodsp fit --config configs/quickstart.yaml --print_config",
    ),
    "validate": ("evodsp validate --config configs/quickstart.yaml --ckpt_path best",),
    "test": ("evodsp test --config configs/quickstart.yaml --ckpt_path runs/quickstart/checkpoints/last.ckpt",),
}


Rule = Literal["refused", "applied", "same", "free"]
"""Answer of a resumed run to a setting that has changed (`evodsp.training.run_folder`). refused: it does not start. applied:
from the next sample on. same: the run computes the same, with sums rounded in another order. free: decides nothing about the
weights (files, logs, validation's times, names of machines)."""


@dataclass(frozen=True)
class TrainerOptions:
    """Lightning's Trainer: its most used options (--trainer.help lists all)."""

    RESUME: ClassVar[Rule] = "free"

    max_steps: int = field(default=-1, metadata={"resume": "applied"})
    """Number of optimizer steps to train for. `max_samples` may end the run before; -1 for no limit."""
    max_epochs: int | None = field(default=-1, metadata={"resume": "applied"})
    """Number of epochs (of data.samples_per_epoch samples) to train for; -1 for no limit."""
    max_time: str | None = None
    """Save and stop this long after the start of this command, as DD:HH:MM:SS."""
    accelerator: str = field(default="auto", metadata={"resume": "same"})
    """cpu, gpu, …; auto uses GPUs if there are any."""
    devices: str | int | list[int] = "auto"
    """Number of devices. On a CPU, auto starts parallel.sequence ranks; on GPUs it uses all of them."""
    num_nodes: int = 1
    """Number of machines."""
    precision: str | int | None = field(default="32-true", metadata={"resume": "applied"})
    """Floating-point precision: 32-true, bf16-mixed, …"""
    accumulate_grad_batches: int = field(default=1, metadata={"resume": "same"})
    """Batches whose gradients are accumulated for each optimizer step; follows from `global_batch` if that is given."""
    gradient_clip_val: float | None = field(default=0.1, metadata={"resume": "applied"})
    """Gradients with a larger norm are scaled down to this norm; model.optimizer.clip says which gradients."""
    log_every_n_steps: int = 10
    """Steps between two rows of curve.csv and of the other logs."""
    logger: bool | dict | list | None = None
    """Loggers of Lightning, by class_path and init_args, that are added to curve.csv and TensorBoard; false: no logs at all."""
    check_val_every_n_epoch: int | None = 1
    """Epochs between two validations."""
    limit_val_batches: int | float | None = None
    """Validate on at most this many batches; 0 for no validation."""
    num_sanity_val_steps: int | None = 0
    """Validation batches to run as a test before training starts."""
    enable_model_summary: bool | None = False
    """Print a table of the model's layers."""
    enable_progress_bar: bool | None = True
    """Show progress."""


_OTHERS: dict[Rule, str] = {
    "refused": "limit_train_batches overfit_batches",
    "applied": "gradient_clip_algorithm min_epochs min_steps",
    "same": "benchmark deterministic",
    "free": (
        "barebones callbacks default_root_dir detect_anomaly enable_autolog_hparams enable_checkpointing fast_dev_run "
        "inference_mode limit_predict_batches limit_test_batches model_registry plugins profiler "
        "reload_dataloaders_every_n_epochs strategy sync_batchnorm use_distributed_sampler val_check_interval"
    ),
}
OTHER_TRAINER_OPTIONS = {name: rule for rule, names in _OTHERS.items() for name in names.split()}
"""The Trainer's other options, with their rules. They are listed because importing Lightning takes seconds; a test compares
them with it."""


SETTINGS: tuple[tuple[type, str], ...] = (
    (RunConfig, ""),
    (TrainingConfig, "model"),
    (DataConfig, "data"),
    (ParallelConfig, "parallel"),
    (CommunicationPlan, "plan"),
    (KernelsConfig, "kernels"),
)
"""The dataclasses whose fields are our options, and the group of each."""

FORMER = {
    **{
        f"model.optimizer.{steps}": f"was replaced by model.optimizer.{samples}, which counts samples: steps x global batch"
        for steps, samples in (
            ("warmup_steps", "warmup_samples"),
            ("drop_step", "drop_samples"),
            ("total_steps", "total_samples"),
        )
    },
    "seed_everything": "is Lightning's name; use --seed",
}
"""Messages about settings of earlier versions, which counted optimizer steps, and about Lightning's names."""


class PresetParser(OneLineErrors):
    """A parser of the options below, in which `model.preset` sets the defaults of the model's sizes."""

    rules = Names(former=FORMER)

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse, which finds the preset that any file or option may name, and again with its sizes as the defaults."""
        words = list(args or [])
        before = [word for word in words if not word.startswith(_ENDS_PARSING)]
        config = super().parse_args(before, *rest, **kwargs)
        of_start = started_with(config.init_from) if config.model.preset is None else {}
        if (name := of_start.pop("model.preset", config.model.preset)) is not None:
            self.set_defaults(of_start)
            if name not in PRESETS:
                raise UserError(
                    f"{self.where('model.preset')}model.preset: no preset '{name}'.{nearest(name, PRESETS)} "
                    f"Use one of {LISTED_PRESETS}"
                )
            self.set_defaults(dict(leaves(ModelConfig.preset(name), "model")))
        elif before == words:
            return config
        return super().parse_args(words, *rest, **kwargs)

    def instantiate_settings(self, config: Any) -> Any:
        """The typed settings of a parsed `config`; the preset's sizes are in it already."""
        config = config.clone()
        config.model.pop("preset")
        return super().instantiate_settings(config)


_OF_THE_PARSER = ("config", "print_config", "help")
_ENDS_PARSING = ("--print_config", "--print-config", "--help", "-h")


def add_arguments(parser: Any) -> None:
    """Add everything but the Trainer's options to a jsonargparse parser."""
    parser.add_argument(
        "-c",
        "--config",
        action=ActionConfigFile,
        help="YAML file of options, or the name of one that comes with evodsp, such as quickstart. Several may be given.",
    )
    for settings, group in SETTINGS:
        parser.add_class_arguments(settings, group or None)
    parser.add_argument(
        "--model.preset",
        type=str | None,
        help=f"Model whose sizes are the defaults of the sizes below: {LISTED_PRESETS}. Sizes that are given "
        "override it. null: that of init_from, if it names published parameters or is their params_<name>.npz; otherwise the "
        "defaults shown.",
    )


def own_names() -> set[str]:
    """The names of the options that `add_arguments` adds."""
    return {"model.preset"} | {key for settings, group in SETTINGS for key, _ in leaves(settings(), group)}


def names_of(command: Command) -> Names:
    """The names of a command's options. Lightning, which knows those of the Trainer, is not imported."""
    trainer = {key for key, _ in leaves(TrainerOptions(), "trainer")}
    trainer |= {f"trainer.{name}" for name in ("help", *OTHER_TRAINER_OPTIONS)}
    return Names(f"evodsp {command}", frozenset(own_names() | trainer | {*_OF_THE_PARSER}), former=FORMER)


def checked_words(command: Command, words: list[str]) -> list[str]:
    """A command line with packaged configs as files. Raises UserError for the first name in it or in a file that is no
    option."""
    words = with_packaged_configs(words)
    names = names_of(command)
    given_settings(plain_words(words, {}, names.has), names)
    return words


def print_screen(command: Command) -> None:
    """Print a screen for a newcomer: the quick help has hundreds of lines."""
    configs = ", ".join(sorted(file.stem for file in packaged_folder("configs").glob("*.yaml")))
    examples = "\n".join(f"  {example}" for example in EXAMPLES[command])
    show(f"usage: evodsp {command} --config FILE [--option value ...]\n\n{SUMMARY[command].capitalize()}.\n")
    show(f"examples:\n{examples}\n\nconfigs that come with evodsp: {configs}\n\nall options: evodsp {command} --help")


def print_help(command: Command) -> None:
    """The quick help of `command` on standard output."""
    parser = PresetParser(
        prog=f"evodsp {command}",
        usage=f"evodsp {command} --config FILE [--option value ...]",
        description=f"{SUMMARY[command].capitalize()}. Options come from YAML files and the command line; the last one wins.",
        epilog="\n".join(["Examples:", *(f"  {example}" for example in EXAMPLES[command])]),
        parser_mode="omegaconf+",
    )
    add_arguments(parser)
    parser.add_class_arguments(TrainerOptions, "trainer")
    parser.print_help()

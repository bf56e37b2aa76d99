"""The command `evodsp`. Each subcommand imports what it needs only when it runs, so that help answers at once.

A user's mistake is one line on standard error and exit code 2; Ctrl-C is exit code 130.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from evodsp.errors import UserError, nearest
from evodsp.files import stdout_fails
from evodsp.launch.environment import (
    STOPPED,
    end_with_launcher,
    launched_by_evodsp,
    number_of_rank,
    same_handlers,
    starts_again,
)
from evodsp.printing import show, tell
from evodsp.version import __version__

RANK_0_FIRST_S = 5.0
"""Seconds that the other ranks wait before they print a mistake. Rank 0 prints the same one, and its end makes torchrun (or
srun with --kill-on-bad-exit) end them. A mistake that rank 0 does not find is printed after this time."""


@dataclass(frozen=True)
class Command(ABC):
    """A subcommand."""

    name: str
    """Words of the command, such as 'weights import'."""
    summary: str
    """One line for the overview."""

    def options(self) -> set[str]:
        """The names of its options, without dashes, for completion."""
        return set()

    @abstractmethod
    def __call__(self, words: list[str]) -> int:
        """Parse the options `words`, run, and return the exit code; or print the help."""


@dataclass(frozen=True)
class SettingsCommand(Command):
    """A command whose options are the fields of one dataclass. It writes files if one of them is `output`, and not None."""

    settings: str
    """The dataclass, as 'module:name'. Its module must not import torch: help waits for it."""
    runner: str
    """The function that runs the command, as 'module:name'. It takes the settings and the words, and returns the exit code."""
    required: str
    """The required options, as the usage line shows them."""
    description: str
    positional: str = ""
    """The option that is given without a name: a list, at least one value unless it has a default."""
    positional_type: type = Path
    from_files: bool = False
    """Whether options may also come from YAML files (--config FILE), and be printed as one (--print_config)."""
    alone: Mapping[str, str] = field(default_factory=dict)
    """The values of options that are given without one."""
    several: frozenset[str] = frozenset()
    """Options that may be given once more for each of several values."""

    def options(self) -> set[str]:
        return set(self._parser().names.known)

    def _parser(self) -> Any:
        from jsonargparse import ActionConfigFile

        from evodsp.argument_parser import Names, OneLineErrors

        parser = OneLineErrors(
            prog=f"evodsp {self.name}",
            usage=f"evodsp {self.name} {self.required} [--option value ...]",
            description=self.description,
        )
        settings_class = _imported(self.settings)
        parser.alone = self.alone
        parser.rules = Names(several=self.several, aliases=getattr(settings_class, "OTHER_NAMES", {}))
        if self.from_files:
            text = "YAML file of options. Several files may be given; of several values the last one counts."
            parser.add_argument("--config", action=ActionConfigFile, help=text)
        if self.positional:
            unnamed = parser.add_argument(
                self.positional,
                nargs="+",
                type=self.positional_type,
                metavar=self.required.partition("...")[0].lstrip("("),
                help=_description(settings_class, self.positional),
            )
            # A default is an attribute of the class. nargs="*" would replace what a file says by an empty list.
            unnamed.required = not hasattr(settings_class, self.positional)
        parser.add_class_arguments(settings_class, skip={self.positional} - {""})
        return parser

    def __call__(self, words: list[str]) -> int:
        from evodsp.files import check_output, output_errors

        parser, settings_class = self._parser(), _imported(self.settings)
        given = parser.instantiate_settings(parser.parse_args(words))
        unset = {"config"} if self.from_files else set()
        if self.positional and given[self.positional] is None:
            unset.add(self.positional)
        settings = settings_class(**{name: value for name, value in vars(given).items() if name not in unset})
        run = _imported(self.runner)
        output = getattr(settings, "output", None)
        if output is None:
            return int(run(settings, [*self.name.split(), *words]))
        check_output(output)
        with output_errors(output):
            return int(run(settings, [*self.name.split(), *words]))


@dataclass(frozen=True)
class TrainingCommand(Command):
    """`fit`, `validate` and `test`: their options include those of Lightning's Trainer, and come from YAML files as well."""

    def options(self) -> set[str]:
        return set(_imported("evodsp.training.options:names_of")(self.name).known)

    def __call__(self, words: list[str]) -> int:
        from evodsp.training import options

        if {"-h", "--help"} & set(words) or not words:
            shown = options.print_help if words else options.print_screen
            shown(self.name)  # type: ignore[arg-type]
            return 0 if words else 2
        words = options.checked_words(self.name, words)  # type: ignore[arg-type]
        return int(_imported("evodsp.training.command:run")(self.name, words))


@dataclass(frozen=True)
class ReplayCommand(Command):
    """`replay`: its only argument is a file."""

    def __call__(self, words: list[str]) -> int:
        from evodsp.argument_parser import OneLineErrors

        parser = OneLineErrors(
            prog="evodsp replay",
            usage="evodsp replay FILE [--device cpu|cuda] [--layers LIST]",
            description="Compute one training sample again, alone, with autograd's anomaly detection. A run writes a file for "
            "the first samples whose loss or gradient is not finite. The exit code is 1 if something is not finite, else 0.",
        )
        parser.add_argument("file", metavar="FILE", help="file of a run's folder replays/")
        parser.add_argument(
            "--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: a GPU if there is one"
        )
        parser.add_argument(
            "--layers", default="", help="classes of yours that the model has: '[NAME=PACKAGE.MODULE:CLASS]'"
        )
        given = parser.parse_args(words)
        layers = [entry.strip() for entry in given.layers.strip("[] ").split(",")]
        return int(_imported("evodsp.training.bad_samples:run")(given.file, given.device, layers))


COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        TrainingCommand("fit", "train a model"),
        TrainingCommand("validate", "score a checkpoint on the validation chains"),
        TrainingCommand("test", "score a checkpoint on the test chains"),
        ReplayCommand("replay", "compute one bad training sample again, alone"),
        SettingsCommand(
            "predict",
            "predict structures of sequences, with a checkpoint or published parameters",
            settings="evodsp.inference.config:PredictConfig",
            runner="evodsp.inference.command:run",
            required="INPUT... [--alignments DIR] (--checkpoint FILE | --weights NAME) --output DIR",
            description="Predict the structures of the sequences in FASTA, A3M or CSV files.",
            positional="inputs",
            several=frozenset({"checkpoint", "weights"}),
            from_files=True,
        ),
        SettingsCommand(
            "score",
            "compare predictions, or two models, with known structures",
            settings="evodsp.inference.score.config:ScoreConfig",
            runner="evodsp.inference.score.judgement:run",
            required="(--predictions DIR [--train CHAINS] [--held_out CHAINS] | --before MODEL --after MODEL --chains FILE "
            "[--general FILE] [--alignments DIR]) --structures DIR --output DIR",
            description="Compare predictions with known structures: a table of lDDT-CA, RMSD, GDT-TS and TM-score, of "
            "complexes (--complexes true) of lDDT-CA and DockQ, how far pLDDT can be trusted, and a picture of each. With "
            "--before and --after, judge a fine-tuned model: both models predict the chains, and a page says what has got "
            "better, whether copies of training structures are as good, and what is forgotten.",
        ),
        SettingsCommand(
            "search",
            "find alignments for sequences, on a server or with a local program",
            settings="evodsp.search.config:SearchConfig",
            runner="evodsp.inference.search:run",
            required="INPUT... (--msa_server URL | --program NAME --database PATH) --output DIR",
            description="Find alignments for the records of FASTA or CSV files: on a server with ColabFold's protocol, to "
            "which the sequences are sent, or with jackhmmer, hhblits or mmseqs and a database of this machine. The output is "
            "what `evodsp predict --alignments` takes. A search that was stopped is continued by the same command. The exit "
            "code is 1 if a record has no alignment.",
            positional="inputs",
        ),
        SettingsCommand(
            "estimate",
            "say what memory and time a prediction needs, without running it",
            settings="evodsp.inference.config:EstimateConfig",
            runner="evodsp.inference.estimate:run",
            required="(INPUT... | --residues N) [--checkpoint FILE | --weights NAME] [--gpus N]",
            description="Say what memory and time a prediction needs, what there is, and what to change if it does not fit; "
            "with --gpus, on how many of them. The model is run on shapes alone. The exit code is 1 if it does not fit.",
            positional="inputs",
        ),
        SettingsCommand(
            "data fetch",
            "fetch public alignments, structures and lists",
            settings="evodsp.data.config:DataFetchConfig",
            runner="evodsp.data.fetch:run",
            required="WHAT... --output DIR [--chains FILE]",
            description="Fetch public data for a list of chains: alignments (OpenProteinSet), structures (the PDB) and "
            "lists (identical chains, clusters, obsolete entries). A fetch that was stopped is continued by the same command. "
            "What is missing is listed in missing.txt; the exit code is then 1.",
            positional="what",
            positional_type=str,
        ),
        SettingsCommand(
            "data index",
            "index a data set, for fast starts of training",
            settings="evodsp.data.config:IndexConfig",
            runner="evodsp.data.index.scan:run",
            required="--alignment_dir DIR --structure_dir DIR --output FOLDER",
            description="Scan alignments, structures and caches once, and write what is known of each chain and where its "
            "files are. Training reads it (data.index): it starts at once, and all processes share it.",
            alone={"scheduler": "local"},
        ),
        SettingsCommand(
            "data doctor",
            "examine a data set before training starts",
            settings="evodsp.data.config:DoctorConfig",
            runner="evodsp.data.doctor.command:run",
            required="(--config FILE | --alignment_dir DIR --structure_dir DIR) --output DIR",
            description="Look all chains up, read a sample of them as training does, and report what is missing or wrong, on "
            "the terminal, as JSON and as a page. The exit code is 0 if training can start, 1 if not.",
        ),
        SettingsCommand(
            "data build",
            "parse chains once, into a feature store that training reads",
            settings="evodsp.data.config:BuildConfig",
            runner="evodsp.data.build:run",
            required="--alignment_dir DIR --structure_dir DIR --output DIR",
            description="Parse the alignments, structures and template hits of chains once, or with --complexes true those of "
            "complexes, into a feature store: compressed records with checksums, from which training makes the same samples "
            "(data.store). A build that was stopped is continued by the same command. What cannot be read is left out and "
            "listed in failed.jsonl.",
            alone={"scheduler": "local"},
        ),
        SettingsCommand(
            "plan",
            "plan memory and time of a training run, on any mesh of GPUs",
            settings="evodsp.planner.config:PlanConfig",
            runner="evodsp.planner.command:run",
            required="(--gpus N | --measure --output FILE.yaml)",
            description="Say, before GPUs are booked, which mesh fits, what it communicates and how long a step takes. The "
            "model is run on shapes alone: no GPU is needed. Times are calculated from the data of devices and links; with "
            "--measure, those of this machine are measured and written to a file. The exit code is 1 if nothing fits.",
        ),
        SettingsCommand(
            "selftest",
            "check this machine: kernels, half precision, training, prediction, sharding",
            settings="evodsp.selftest.command:SelftestConfig",
            runner="evodsp.selftest.command:run",
            required="[--cpu N] [--scaling]",
            description="Check evodsp on this machine, with all of its GPUs or with N CPU processes: every kernel against its "
            "formula, blocks in half precision, training on several meshes, resuming, prediction, and ranks against one "
            "device. A table says how each check ended; it takes three minutes on an H200, and more on CPUs. With --scaling: "
            "check and measure what several GPUs or nodes do together, and write one report. The exit code is 1 if a check "
            "failed, else 0.",
        ),
        SettingsCommand(
            "slurm",
            "write the batch scripts for SLURM",
            settings="evodsp.packaged:BatchScriptsConfig",
            runner="evodsp.packaged:write_batch_scripts",
            required="--output DIR",
            description="Write the batch scripts that come with evodsp: fit.sbatch trains or predicts on 1 to 512 GPUs, with "
            "restarts; build.sbatch builds a feature store. README.md beside them explains their settings.",
        ),
        SettingsCommand(
            "report",
            "draw the learning curves of runs",
            settings="evodsp.report.runs:ReportConfig",
            runner="evodsp.report.run_command:run",
            required="RUN...",
            description="Draw the learning curves of one or several runs of `evodsp fit` into one self-contained HTML page, "
            "with the settings that differ.",
            positional="runs",
        ),
        SettingsCommand(
            "weights fetch",
            "fetch AlphaFold2's published parameters",
            settings="evodsp.weights.config:WeightsFetchConfig",
            runner="evodsp.weights.command:run_fetch",
            required="NAME...",
            description="Fetch AlphaFold2's published parameters (DeepMind, licence CC BY 4.0), for `evodsp predict --weights "
            "NAME`. Of DeepMind's archive of 5 GB only the models named are transferred, about 360 MiB each. A fetch that was "
            "interrupted is continued by the same command. The paths of the files are printed.",
            positional="names",
            positional_type=str,
        ),
        SettingsCommand(
            "weights import",
            "convert DeepMind's or OpenFold's parameter file to a checkpoint",
            settings="evodsp.weights.config:ImportConfig",
            runner="evodsp.weights.command:run_import",
            required="--checkpoint FILE.npz|FILE.pt --output FILE.ckpt",
            description="Convert DeepMind's parameters of a model (.npz) or OpenFold's (.pt) to a checkpoint. These files "
            "do not contain the model's sizes: they are taken from a preset, with the number of blocks found in the file, or "
            "from the checkpoint --like. `evodsp predict` also reads files of a preset directly.",
        ),
        SettingsCommand(
            "weights random",
            "write random parameters of a model, to time it without the real ones",
            settings="evodsp.weights.config:RandomConfig",
            runner="evodsp.weights.command:run_random",
            required="--output FILE.npz",
            description="Write random parameters of a model in DeepMind's format, scaled so that activations stay finite. "
            "Predictions with them mean nothing; their time and memory are those of the model.",
        ),
        SettingsCommand(
            "weights export",
            "convert a checkpoint to a model folder, or to DeepMind's or OpenFold's parameter file",
            settings="evodsp.weights.config:ExportConfig",
            runner="evodsp.weights.command:run_export",
            required="--checkpoint FILE.ckpt (--output FILE.npz|FILE.pt | --format safetensors --output FOLDER)",
            description="Write a model folder (model.safetensors, config.json and a model card), or a model's "
            "parameters with DeepMind's or OpenFold's names and shapes. The files of these two do not contain the model's "
            "sizes: if it is not a preset, keep the checkpoint for `weights import --like`.",
        ),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Without `arguments` it is this process's, which ends with that code."""
    with nullcontext() if arguments is None else same_handlers():
        return _main(list(sys.argv[1:] if arguments is None else arguments))


def _main(words: list[str]) -> int:
    end_with_launcher()
    try:
        with _names_of_files():
            code = _code_of(words)
        sys.stdout.flush()  # what cannot be printed is said here; at Python's end it would be a traceback
        return code
    except UserError as error:
        if not launched_by_evodsp() and number_of_rank() > 0:  # each rank prints for itself: torchrun, srun, mpirun
            # Ignored under scripts/examples/slurm/fit.sbatch until a run can save.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(RANK_0_FIRST_S)
        tell(f"evodsp: error: {error}")
        return 2
    except KeyboardInterrupt as interrupt:
        tell(f"evodsp: interrupted{f'; {interrupt}' if str(interrupt) else ''}")
        return 130
    except BrokenPipeError:  # `evodsp --help | head`
        _print_nowhere()
        return 0
    except OSError as error:
        if error.filename is not None or not stdout_fails():
            raise
        tell(f"evodsp: error: standard output cannot be written ({error.strerror})")
        _print_nowhere()
        return 1


def _code_of(words: list[str]) -> int:
    """The exit code of a command."""
    try:
        code = dispatch(words)
    except SystemExit as done:  # jsonargparse after --help and --print_config
        if isinstance(done.code, str):
            raise
        return done.code or 0
    # A record that failed would fail again, and a run that was asked to stop has stopped: 0 is the only code after which
    # torchrun does not start all ranks again. A batch script sees `evodsp.launch.environment.STOPPED_FILE`.
    return 0 if code in (1, STOPPED) and starts_again() else code


def _print_nowhere() -> None:
    """Let go what Python still writes when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _names_of_files() -> Iterator[None]:
    """A path with a part that is too long for the name of a file is a user's mistake."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        path = os.fsdecode(error.filename)
        raise UserError(
            f"{path[:40]}…: no file or folder can have a name as long as this one's; check the path"
        ) from error


def dispatch(words: list[str]) -> int:
    """Find the command that `words` begin with and run it with the rest."""
    if not words or words[0] in ("-h", "--help", "help"):
        show(overview(""))
        return 0 if words else 2
    if words[0] == "--complete":
        show("\n".join(completions(os.environ.get("COMP_LINE", ""))))
        return 0
    if words[0] == "--version":
        show(f"evodsp {__version__}")
        return 0
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return COMMANDS[name](words[length:])
    if subcommands := {name.split()[1] for name in COMMANDS if name.startswith(f"{words[0]} ")}:
        if len(words) == 1 or words[1] in ("-h", "--help"):
            show(overview(words[0]))
            return 0 if len(words) > 1 else 2
        raise UserError(
            f"no command '{words[0]} {words[1]}'.{nearest(words[1], subcommands)} See 'evodsp {words[0]} --help'"
        )
    raise UserError(
        f"no command '{words[0]}'.{nearest(words[0], {name.split()[0] for name in COMMANDS})} See 'evodsp --help'"
    )


def completions(line: str) -> list[str]:
    """Values of the last word of a command line, for `complete -C 'evodsp --complete' evodsp`; nothing for files."""
    *before, begun = line.split(" ")
    given = [word for word in before[1:] if word]
    command = COMMANDS.get(" ".join(given[:2])) or COMMANDS.get(" ".join(given[:1]))
    if command is None:
        names = {" ".join(name.split()[: len(given) + 1]) for name in COMMANDS if name.split()[: len(given)] == given}
        return sorted(word for name in names if (word := name.split()[-1]).startswith(begun))
    return sorted(word for name in command.options() if begun[:1] == "-" and (word := f"--{name}").startswith(begun))


def overview(group: str) -> str:
    """Help of `evodsp`, or of a group of commands such as `evodsp data`."""
    shown = {name: command.summary for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {text}" for name, text in shown.items()]
    usage = " ".join(["usage: evodsp", *group.split(), "COMMAND [options]"])
    head = [usage] if group else [usage, "", "Train AlphaFold2-style models and predict protein structures."]
    tail = ["'evodsp COMMAND --help' lists a command's options; 'evodsp --version' prints the version."]
    return "\n".join([*head, "", "commands:", *lines, "", *tail])


def _description(settings_class: type, name: str) -> str:
    """The docstring of a field, as jsonargparse reads those of the other options."""
    from docstring_parser import parse_from_object

    found = {one.arg_name: one.description or "" for one in parse_from_object(settings_class).params}
    return " ".join(found.get(name, "").split())


def _imported(name: str) -> Any:
    """The object called 'module:name'."""
    module, _, attribute = name.partition(":")
    with _ctrl_c_ends():
        return getattr(import_module(module), attribute)


@contextmanager
def _ctrl_c_ends() -> Iterator[None]:
    """While modules are imported, Ctrl-C ends the process at once and without a word, as it ends programs that are not Python.

    Python would raise KeyboardInterrupt in the middle of PyTorch's import, which aborts with a message of the C++ library.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

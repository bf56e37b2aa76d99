"""The command `evodsp`. Each subcommand imports what it needs when it runs, so that help answers at once.

A mistake of the user's is one line on standard error and exit code 2; Ctrl-C is exit code 130.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from evodsp import __version__
from evodsp.errors import UserError, nearest

Settings = TypeVar("Settings")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Read when torch is first imported: waiting threads sleep instead of spinning. On a machine that does something else
    # besides, spinning threads take the time of those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return dispatch(words)
    except UserError as error:
        print(f"evodsp: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except SystemExit as done:  # jsonargparse after --help and --print_config
        if isinstance(done.code, str):
            raise
        return done.code or 0
    except KeyboardInterrupt as interrupt:
        print(f"evodsp: interrupted{f'; {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `evodsp --help | head`
        sys.stderr.close()
        return 0


def dispatch(words: list[str]) -> int:
    """Find the command that `words` begin with and run it on the rest."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(""))
        return 0 if words else 2
    if words[0] == "--version":
        print(f"evodsp {__version__}")
        return 0
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return COMMANDS[name][1](words[length:])
    if subcommands := {name.split()[1] for name in COMMANDS if name.startswith(f"{words[0]} ")}:
        if len(words) == 1 or words[1] in ("-h", "--help"):
            print(overview(words[0]))
            return 0 if len(words) > 1 else 2
        raise UserError(
            f"no command '{words[0]} {words[1]}'.{nearest(words[1], subcommands)} See 'evodsp {words[0]} --help'"
        )
    raise UserError(
        f"no command '{words[0]}'.{nearest(words[0], {name.split()[0] for name in COMMANDS})} See 'evodsp --help'"
    )


def overview(group: str) -> str:
    """Help of `evodsp`, or of a group of commands such as `evodsp data`."""
    shown = {name: text for name, (text, _) in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {text}" for name, text in shown.items()]
    head = ["usage: evodsp COMMAND [options]", "", "Train AlphaFold2-style models and predict protein structures."]
    tail = ["'evodsp COMMAND --help' lists a command's options; 'evodsp --version' prints the version."]
    return "\n".join([*([] if group else head), "", "commands:", *lines, "", *tail])


def train(command: str) -> Callable[[list[str]], int]:
    """The function behind `fit`, `validate` and `test`."""

    def run(words: list[str]) -> int:
        from evodsp.training import options

        name = cast(options.Command, command)
        if {"-h", "--help"} & set(words) or not words:
            options.print_help(name)
            return 0 if words else 2
        from evodsp.training.command import run_command

        return run_command(name, words)

    return run


def parsed(settings: type[Settings], command: str, required: str, description: str, words: list[str]) -> Settings:
    """The settings that `words` spell out; help, and a UserError on what does not fit."""
    from evodsp.argument_parser import OneLineErrors

    usage = f"evodsp {command} {required} [--option value ...]"
    parser = OneLineErrors(prog=f"evodsp {command}", usage=usage, description=description)
    parser.add_class_arguments(settings)
    return settings(**vars(parser.instantiate(parser.parse_args(words))))


def predict(words: list[str]) -> int:
    """Predict structures: evodsp.inference."""
    from evodsp.inference.config import PredictConfig

    required = "--fasta FILE --alignments DIR --checkpoint FILE --output DIR"
    description = "Predict the structures of the sequences of a FASTA file."
    settings = parsed(PredictConfig, "predict", required, description, words)
    from evodsp.inference.command import run

    return run(settings, ["predict", *words])


def synthesize(words: list[str]) -> int:
    """Write synthetic protein families: evodsp.synthetic."""
    from evodsp.synthetic.command import synthesize as run
    from evodsp.synthetic.config import SynthesisConfig

    description = "Write seeded protein families, structures and alignments, to train on without a download."
    run(
        parsed(SynthesisConfig, "data synthesize", "--output DIR", description, words),
        lambda line: print(line, file=sys.stderr),
    )
    return 0


def import_weights(words: list[str]) -> int:
    """Turn a published parameter file into a checkpoint: evodsp.weights."""
    from evodsp.weights.config import ImportConfig

    description = (
        "Turn DeepMind's parameters of a model (.npz) or OpenFold's (.pt) into a checkpoint. Such files hold no sizes: they "
        "are a preset's, with as many blocks as there are, or those of --like. `evodsp predict` reads a preset's directly."
    )
    required = "--checkpoint FILE.npz|FILE.pt --output FILE.ckpt"
    settings = parsed(ImportConfig, "weights import", required, description, words)
    from evodsp.weights.command import import_weights as run

    print(run(settings), file=sys.stderr)
    return 0


def export_weights(words: list[str]) -> int:
    """Turn a checkpoint into a parameter file of DeepMind's or OpenFold's: evodsp.weights."""
    from evodsp.weights.config import ExportConfig

    description = (
        "Write the parameters of a checkpoint with DeepMind's or OpenFold's names and shapes. Such files hold no sizes: of a "
        "model that is no preset keep the checkpoint, which `weights import --like` reads them from."
    )
    required = "--checkpoint FILE.ckpt --output FILE.npz|FILE.pt"
    settings = parsed(ExportConfig, "weights export", required, description, words)
    from evodsp.weights.command import export_weights as run

    print(run(settings), file=sys.stderr)
    return 0


COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "fit": ("train a model", train("fit")),
    "validate": ("score a checkpoint on the validation chains", train("validate")),
    "test": ("score a checkpoint on the test chains", train("test")),
    "predict": ("predict structures from FASTA, alignments and a checkpoint", predict),
    "data synthesize": ("write synthetic protein families to train on", synthesize),
    "weights import": ("turn DeepMind's or OpenFold's parameter file into a checkpoint", import_weights),
    "weights export": ("turn a checkpoint into DeepMind's or OpenFold's parameter file", export_weights),
}

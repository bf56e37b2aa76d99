from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from evodsp import __version__
from evodsp.__main__ import leave
from evodsp.__main__ import run as program
from evodsp.argument_parser import OF_OTHERS
from evodsp.cli import COMMANDS, main
from evodsp.inference.config import PredictConfig
from evodsp.launch.environment import STOPPED
from evodsp.training.options import PresetParser, TrainerOptions, add_arguments, own_names
from tests.ranks import in_a_fork


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "evodsp", *words], capture_output=True, text=True, env=environment)


OFTEN = ("", "fit", "predict", "data build")
"""Commands whose help `make test` looks at in a process of its own. What the others import, a test below sees."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.verify])
        for name in ("", "data", "weights", *COMMANDS)
    ],
)
def test_help_answers_at_once(command: str) -> None:
    """An import of torch or Lightning on the way to the help: seconds. (About 0.2 s here, and not much more on a busy machine:
    the time of the processor counts.)"""
    started = os.times()
    done = run(*command.split(), "--help")
    ended = os.times()
    seconds = ended.children_user - started.children_user + ended.children_system - started.children_system
    print(f"evodsp {command} --help: {seconds:.2f} s")
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout
    assert done.stderr == ""
    assert seconds < 1.5


def test_a_rank_that_failed_ends_with_its_code() -> None:
    """Catches the end of the interpreter, which aborts a process whose thread is in a call to torch's store; lost output; and
    what is registered for the end of every other process, such as the files of loggers, and is left out."""

    def end(before: str) -> tuple[int, str]:
        program = (
            "import atexit, threading, time\nfrom evodsp.__main__ import leave\n"
            f"atexit.register(print, 'registered')\nprint('said')\n{before}\nleave(3)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        return done.returncode, done.stdout

    assert end("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()") == (3, "said\n")
    assert end("") == (3, "said\nregistered\n")


@pytest.mark.parametrize(
    ("disk", "code", "said"),
    [(True, 1, "evodsp: error: standard output cannot be written (No space left on device)\n"), (False, 0, "")],
    ids=["full disk", "closed pipe"],
)
def test_what_cannot_be_printed_at_the_end(disk: bool, code: int, said: str) -> None:
    """Catches a full disk that nobody is told of, and `evodsp plan | head -1` taken for a mistake."""
    program = "import sys\nfrom evodsp.__main__ import run\nsys.argv[1:] = ['--version']\nrun()"
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if disk else writer, "w") as output:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=output, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    if disk:
        os.close(writer)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.verify
def test_a_full_disk_behind_standard_output(tmp_path: Path) -> None:
    """Catches a traceback, and the blame on `--output`, which can be written."""
    sizes = "--gpus=2 --preset=test --residues=8 --msa=4 --extra_msa=4 --global_batch=2"
    for words in (["plan", *sizes.split(), f"--output={tmp_path / 'plan.html'}"], ["fit", "--print_config"]):
        code = in_a_fork(exit_code_on_a_full_disk, words, tmp_path / "stderr")
        said = "evodsp: error: standard output cannot be written (No space left on device)\n"
        assert (code, (tmp_path / "stderr").read_text()) == (1, said)


def exit_code_on_a_full_disk(words: list[str], stderr: Path) -> int:
    """Of `evodsp *words`, whose messages are written to a file."""
    if not (child := os.fork()):
        for path, descriptor in (("/dev/full", 1), (str(stderr), 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.argv[1:] = words
        program()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_help_imports_neither_torch_nor_lightning() -> None:
    commands = [[], *(name.split() for name in COMMANDS)]
    program = (
        "import sys; from evodsp.cli import main\n"
        f"for words in {commands!r}: main([*words, '--help'])\n"
        "print(sorted({'torch', 'lightning'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_training_without_options_is_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches hundreds of lines in answer to a newcomer's first command."""
    assert main([command]) == 2
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 24
    assert f"evodsp {command} --config configs/quickstart.yaml" in shown
    assert "family, " in shown


@pytest.mark.parametrize("name", OF_OTHERS)
def test_names_of_other_programs_options_have_a_hint(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a hint to an option that evodsp has no longer, and a name that evodsp has itself."""
    option = f"{'-' if len(name) == 1 else '--'}{name}"
    assert main(["predict", "x.fasta", option, "3"]) == 2
    said, ours = capsys.readouterr().err, OF_OTHERS[name]
    assert said == f"evodsp: error: unknown argument '{option}'. evodsp calls it {ours}. See 'evodsp predict --help'\n"
    assert set(re.findall(r"--(\w+)", ours)) <= {one.name for one in fields(PredictConfig)}


def test_an_error_shows_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches `--num_recycle` in the message where the user typed `--num-recycle`, and argparse's words for a missing value."""
    assert main(["predict", "x.fasta", "--num-recycle", "3"]) == 2
    assert "unknown argument '--num-recycle'. evodsp calls it --recycles." in capsys.readouterr().err
    assert main(["predict", "x.fasta", "--max-msa-cluster", "3"]) == 2
    assert "unknown argument '--max-msa-cluster'. Did you mean '--msa_clusters'?" in capsys.readouterr().err
    assert main(["predict", "x.fasta", "--output", "y", "--templates"]) == 2
    said = "--templates: no value behind it; give one, or write --msa_server_templates, which is what ColabFold means by it"
    assert said in capsys.readouterr().err


def test_a_hint_names_options_of_the_command_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a hint to --relax, which a search does not have."""
    assert main(["search", "x.fasta", "--amber", "--output", "y"]) == 2
    assert "calls it" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("evodsp da", ["data"]),
        ("evodsp data ", ["build", "doctor", "fetch", "index"]),
        ("evodsp predict --rel", ["--relax"]),
        ("evodsp data doctor --stru", ["--structure_dir"]),
        ("evodsp fit --config x --trainer.max_s", ["--trainer.max_steps"]),
        ("evodsp  predict  --rel", ["--relax"]),
        ("evodsp predict ", []),
        ("evodsp nothing ", []),
    ],
)
def test_completion(
    line: str, found: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a command or an option that the shell does not offer, and names where a file is to be offered."""
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["--complete", "evodsp", "x", "y"]) == 0
    assert capsys.readouterr().out.split() == found


def test_help_shows_descriptions_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Attribute docstrings of the settings are their help."""
    assert main(["fit", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for shown in (
        "--model.evoformer.blocks BLOCKS Number of blocks. (type: int, default: 48)",
        "--model.extra_msa.blocks BLOCKS Number of blocks. (type: int, default: 4)",
        "--trainer.max_steps MAX_STEPS Number of optimizer steps to train for.",
        "--data.num_workers",
        "evodsp fit --config configs/quickstart.yaml",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["predict"],
            "INPUT FASTA files, A3M files (the first sequence is predicted, the file is its alignment), folders",
        ),
        (
            ["data", "fetch"],
            "WHAT Kinds of data, one or more: alignments (OpenProteinSet), structures (the PDB), lists",
        ),
        (["report"], "RUN Output folders of `evodsp fit`."),
    ],
)
def test_help_describes_what_has_no_option(words: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an INPUT or WHAT of which the help says a type alone."""
    assert main([*words, "--help"]) == 0
    assert shown in " ".join(capsys.readouterr().out.split())


def test_the_help_of_a_group_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a list of commands without a usage, or with that of all commands."""
    assert main(["data", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: evodsp data COMMAND [options]\n\ncommands:\n  data fetch")


def test_help_of_predict_shows_which_sizes_are_as_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    """A default of 128 rows where the checkpoint decides."""
    assert main(["predict", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in ("recycles", "msa_clusters", "extra_msa"):
        shown = text.partition(f"--{name} ")[2].partition(" --")[0]
        assert "null: as in training" in shown
        assert shown.endswith("(type: int | null, default: null)")


def test_the_quick_help_lists_options_that_exist() -> None:
    """The Trainer's options are listed without importing Lightning, so they could go stale."""
    import inspect

    from lightning.pytorch import Trainer

    parameters = inspect.signature(Trainer.__init__).parameters
    assert set(asdict(TrainerOptions())) <= set(parameters)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fti"], "no command 'fti'. Did you mean 'fit'?"),
        (["data", "idex"], "Did you mean 'index'?"),
        (["predict"], "required: "),
        (["predict", "x", "--output=y"], "no model is given; add --checkpoint FILE, or --weights model_1_ptm"),
        (["predict", "x", "--output=y", "--weights=model_6"], "no published parameters are called 'model_6'"),
        (["weights", "fetch", "model_1_pmt"], "Did you mean 'model_1_ptm'?"),
        (["predict", "--fast", "x"], "Did you mean '--fasta'?"),
        (["predict", "--checkpoint=x", "--output=y"], "nothing to predict: give FASTA or A3M files"),
        (
            ["predict", "MKTAYIAKQR", "--checkpoint=x", "--output=y"],
            "MKTAYIAKQR: no such file or folder; if it is a sequence,",
        ),
        (
            ["predict", "MKTAYIAKQR" * 30, "--checkpoint=x", "--output=y"],
            "MKTAYIAKQR: no such file or folder; if it is a seq",
        ),
        (
            ["predict", "x", "--checkpoint=x", "--output", "y" * 300],
            "no file or folder can have a name as long as this one's",
        ),
        (["predict", "x", "--fasta=z", "--checkpoint=x", "--output=y"], "--fasta z is given beside x"),
        (["data", "doctor", "stray"], "arguments: stray. See"),
        (["weights", "imprt"], "no command 'weights imprt'. Did you mean 'import'?"),
        (["weights", "import"], "required: checkpoint, output. See 'evodsp weights import --help'"),
        (
            ["weights", "import", "--checkpoint=params_model_1.npz", "--output=x.ckpt"],
            "params_model_1.npz: no such parameter",
        ),
        (["weights", "export", "--checkpoint=nowhere.ckpt", "--output=x.npz"], "nowhere.ckpt: no such checkpoint"),
        (["validate", "--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("evodsp: error: ")
    assert error.count("\n") == 1
    assert said in error


def test_a_mistyped_option_of_fit_is_answered_without_lightning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an answer that waits for Lightning, on the command line and in a file; and names of a group that only Lightning
    knows, or that come from another option's value, refused without it."""
    reached: list[str] = []
    monkeypatch.setattr("evodsp.cli._imported", lambda name: lambda *_: reached.append(name) or 0)
    (wrong := tmp_path / "wrong.yaml").write_text("seed: 1\nmodel:\n  evoformr: {blocks: 3}\n")
    assert main(["fit", "--modle.evoformer.blocks=1"]) == 2
    assert "'--modle.evoformer.blocks'. Did you mean '--model.evoformer.blocks'?" in capsys.readouterr().err
    assert main(["fit", "--config", str(wrong)]) == 2
    assert f"{wrong}:3: unknown config key 'model.evoformr.blocks'. Did you mean" in capsys.readouterr().err
    assert not reached
    (right := tmp_path / "right.yaml").write_text("trainer: {callbacks: [{class_path: a.B}], min_steps: 3}\n")
    names = ["--trainer.help", "--trainer.logger.name=x", "--data.filters.max_resolution=3", "--model.preset=small"]
    assert main(["fit", "-c", str(right), *names, "--print_config=comments"]) == 0
    assert len(reached) == 1


def test_the_names_known_without_lightning_are_those_of_the_parser() -> None:
    """Catches an option that the quick check refuses although it exists, or a group that it leaves unchecked."""
    parser = PresetParser(prog="evodsp fit")
    add_arguments(parser)
    groups = {key for key in parser.names.known if parser.names.below(key)}
    assert own_names() == {key.removesuffix("+") for key in parser.names.known} - groups - {
        "config",
        "help",
        "print_config",
    }


def test_exit_codes_of_the_real_program(tmp_path: Path) -> None:
    """`main` returning a code that `python -m evodsp` drops."""
    assert run("--version").stdout == f"evodsp {__version__}\n"
    assert run().returncode == 2
    options = [f"--{name}={tmp_path / name}" for name in ("fasta", "alignments", "checkpoint", "output")]
    done = run("predict", *options)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "output").exists()


def test_every_listed_command_runs_something() -> None:
    """A command in the overview that does nothing."""
    commands = {
        "fit",
        "validate",
        "test",
        "replay",
        "predict",
        "search",
        "estimate",
        "data",
        "plan",
        "selftest",
        "report",
        "score",
        "slurm",
        "weights",
    }
    assert {name.split()[0] for name in COMMANDS} == commands


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("configs/*.yaml")), ids=lambda path: path.name)
def test_every_config_is_valid(path: Path, capsys: pytest.CaptureFixture[str], parsers: None) -> None:
    """A key of a committed config that the code renamed."""
    assert main(["fit", "--config", str(path), "--print_config"]) == 0
    assert "max_steps" in capsys.readouterr().out


def test_the_printed_config_with_comments(capsys: pytest.CaptureFixture[str], parsers: None) -> None:
    """Catches comments that change a value, or a package that is missing to write them."""
    printed = []
    for option in ("--print_config", "--print_config=comments"):
        assert main(["fit", "--config", "configs/quickstart.yaml", option]) == 0
        printed.append(capsys.readouterr().out)
    assert "# Learning rate after the warm-up." in printed[1]
    assert yaml.safe_load(printed[1]) == yaml.safe_load(printed[0])


@pytest.mark.parametrize(
    ("variables", "waits"),
    [
        ({"RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, True),
        ({"SLURM_PROCID": "3"}, True),
        ({"RANK": "0"}, False),
        ({"RANK": "1", "TORCHELASTIC_RUN_ID": "evodsp"}, False),
        ({}, False),
    ],
    ids=["torchrun", "srun", "rank 0", "our launcher", "one process"],
)
def test_rank_0_prints_a_mistake_first(
    variables: dict[str, str], waits: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same line from each rank: torchrun ends the others when rank 0 has ended, if these have not printed it before; the
    ranks of other nodes are ended by srun, unless SIGTERM is still ignored, as the batch script has it."""
    waited: list[tuple[float, str]] = []

    def sleep(seconds: float) -> None:
        waited.append((seconds, capsys.readouterr().err))
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    monkeypatch.setattr("evodsp.cli.time.sleep", sleep)
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name in ("RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        assert main(["fitt"]) == 2
    finally:
        signal.signal(signal.SIGTERM, former)
    assert waited == ([(5.0, "")] if waits else [])
    assert "no command 'fitt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay"], "required: file. See 'evodsp replay --help'"),
        (["replay", "a.pt", "b.pt"], "arguments: b.pt. See"),
        (["replay", "a.pt", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["report", "--output", "page.html"], "required: runs. See 'evodsp report --help'"),
    ],
)
def test_arguments_without_a_name_are_checked_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Catches argparse's usage, and an option that does not exist in the message."""
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("slow", ["import", "run"])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, slow: str) -> None:
    """Catches a KeyboardInterrupt in the middle of an import, which PyTorch's C++ code answers with 'terminate called', and
    Ctrl-C that does not work afterwards."""
    wait = "print('here', flush=True); time.sleep(60)"
    (tmp_path / "slow_module.py").write_text(
        f"import time\nif {slow == 'import'}: {wait}\ndef run():\n    {wait}\n", encoding="utf-8"
    )
    program = (
        "import signal; from evodsp.cli import _imported; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try: _imported('slow_module:run')()\nexcept KeyboardInterrupt: raise SystemExit(7)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == ((-signal.SIGINT if slow == "import" else 7), "")


@pytest.mark.parametrize(
    ("run", "used", "most", "expected"),
    [
        ("7", "0", "3", [0, 2, 0]),
        ("7", "3", "3", [1, 2, 75]),
        ("7", "0", "0", [1, 2, 75]),
        ("evodsp", "0", "3", [1, 2, 75]),
    ],
    ids=["torchrun", "its last attempt", "without restarts", "our launcher"],
)
def test_what_is_not_to_be_started_again(
    run: str, used: str, most: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches torchrun that starts all ranks again because a record failed, or a run was asked to stop and has saved; a mistake
    that passes for success; and codes of ranks that nobody would start again."""
    for name, value in (("RUN_ID", run), ("RESTART_COUNT", used), ("MAX_RESTARTS", most)):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    found = []
    for code in (1, 2, STOPPED):
        monkeypatch.setattr("evodsp.cli.dispatch", lambda words, code=code: code)
        found.append(main([]))
    assert found == expected


def test_a_run_that_has_saved_ends_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a further SIGTERM that ends the process while Python takes apart its modules: it lets go of handlers first."""
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    # With a daemon thread of another test it would remove the folder of multiprocessing, which the tests after this one need.
    monkeypatch.setattr("threading.enumerate", list)
    try:
        with pytest.raises(SystemExit, match="75"):
            leave(STOPPED)
        assert {signal.getsignal(number) for number in former} == {signal.SIG_IGN}
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)

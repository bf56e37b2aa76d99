"""Bad input through the whole command: a mistake with `predict` or `fit` ends with exit code 2 and one line on standard error
that names the file, the line and the fix. There is no traceback, and the disk holds the same files as before.

`tests/data/test_bad_input.py` tries the readers with many more broken files; this is what users of the program see.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import read_checkpoint, save_model
from tests.builders.pages import last_options
from tests.builders.training_chains import BOTH, SEQUENCES, TINY, write_chain

pytestmark = pytest.mark.usefixtures("parsers")

KEY, OTHER_KEY = SEQUENCES
QUERY, OTHER = SEQUENCES.values()
A3M = f"alignments/{KEY}/uniref90_hits.a3m"
STO = f"alignments/{KEY}/mgnify_hits.sto"
CIF = f"mmcif_files/{KEY.split('_')[0]}.cif"
FASTA, CHECKPOINT, CONFIG = "query.fasta", "tiny.ckpt", "tiny.yaml"
OUTPUT = Path("runs") / "out"

# The words that tell a user what to do about it.
FIX = re.compile(
    r"\b(write|create|remove|rename|add|choose|search|use|give|check|download|save|must be|drop|put|leave|shorten|correct)\b"
    r"|Did you mean"
)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chains with structures and alignments, a FASTA file, a config and a checkpoint, all in order."""
    folder = tmp_path_factory.mktemp("pristine")
    for key, letters in SEQUENCES.items():
        write_chain(folder, key, letters)
    (folder / FASTA).write_text(f">{KEY}\n{QUERY}\n")
    (folder / STO).write_text(f"# STOCKHOLM 1.0\n\n{KEY} {QUERY}\nhit {QUERY[:5]}--{QUERY[7:]}\n//\n")
    directories = "  alignment_dir: alignments\n  structure_dir: mmcif_files\n" + BOTH
    (folder / CONFIG).write_text(TINY.replace("data:\n", "data:\n" + directories))
    torch.manual_seed(0)
    save_model(folder / CHECKPOINT, AlphaFold(ModelConfig.preset("test")))
    return folder


@pytest.fixture
def inputs(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the inputs that a test may break; the working directory is there."""
    shutil.copytree(pristine, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def predict(*options: str) -> list[str]:
    given = ["--fasta", FASTA, "--alignments", "alignments", "--checkpoint", CHECKPOINT, "--output", str(OUTPUT)]
    sizes = ["--recycles", "0", "--msa_clusters", "4", "--extra_msa", "3", "--device", "cpu"]
    return last_options(["predict", *given, *sizes, *options])


def fit(*options: str) -> list[str]:
    return ["fit", "--config", CONFIG, "--output", str(OUTPUT), *options]


def snapshot(folder: Path) -> dict[str, int]:
    """Every path below a folder, with its size."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()} | {
        str(path.relative_to(folder)): -1 for path in folder.rglob("*") if path.is_dir()
    }


def check_message(error: str, *parts: str) -> None:
    assert error.startswith("evodsp: error: ")
    assert error.count("\n") == 1, error
    assert error.endswith("\n")
    assert "Traceback" not in error
    for part in parts:
        assert part in error, f"'{part}' is not in: {error}"
    assert FIX.search(error), f"no fix in: {error}"
    assert len(error) < 400, f"too long to read: {error}"


def check_refused(words: list[str], here: Path, capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    """The command ends with exit code 2 and one line that holds `parts`, and leaves the folder as it was."""
    before = snapshot(here)
    assert main(words) == 2
    check_message(capsys.readouterr().err, *parts)
    assert not OUTPUT.exists()
    assert snapshot(here) == before


def check_said(check: Callable[[], object], *parts: str) -> None:
    """A check that a command makes raises the line that the command would print."""
    with pytest.raises(UserError) as error:
        check()
    check_message(f"evodsp: error: {error.value}\n", *parts)


Content = str | bytes
# Of each case: the file that is broken, what it holds then (None: it is gone), and what the line must say.
FASTA_CASES: Mapping[str, tuple[Content, list[str]]] = {
    "no header": (f"{QUERY}\n", [f"{FASTA}:1: ", "add '>name'"]),
    "another sequence": (f">{KEY}\n{QUERY[:-1]}W\n", [f"alignments/{KEY}/", "position 13", "'E'", "'W'"]),
    "gzip cut short": (gzip.compress(f">{KEY}\n{QUERY}\n".encode())[:-6], [FASTA, "gzip"]),
}
ALIGNMENT_CASES: Mapping[str, tuple[str, Content, list[str]]] = {
    "A3M cut within a row": (A3M, f">{KEY}\n{QUERY}\n>r1\n{QUERY}\n>r2\n{QUERY[:5]}", [f"{A3M}:5: ", "truncated"]),
    "A3M gzip cut short": (A3M, gzip.compress(f">{KEY}\n{QUERY}\n".encode())[:-6], [A3M, "gzip"]),
    "A3M of another query": (A3M, f">{KEY}\nW{QUERY[1:]}\n>r1\n{QUERY}\n", [A3M, "position 1,", "'W'", "'M'"]),
    "Stockholm uneven rows": (STO, f"# STOCKHOLM 1.0\n{KEY} {QUERY}\nhit {QUERY}-\n//\n", [f"{STO}:3: ", "14", "13"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FASTA_CASES)
def test_predict_refuses_a_broken_fasta(case: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said = FASTA_CASES[case]
    (inputs / FASTA).write_bytes(content if isinstance(content, bytes) else content.encode())
    check_refused(predict(), inputs, capsys, *said)


@pytest.mark.parametrize("case", ALIGNMENT_CASES)
def test_broken_alignments_are_refused(case: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first chain's alignment is broken and the config's other chain is in order: nothing of either may be written."""
    path, content, said = ALIGNMENT_CASES[case]
    (inputs / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    for words in (predict(), fit()):
        check_refused(words, inputs, capsys, *said)


CUT = f"alignments/{OTHER_KEY}/uniref90_hits.a3m"
SECOND_RECORDS: Mapping[str, tuple[str, list[str]]] = {
    "alignment cut": (f">{OTHER_KEY}\n{OTHER}\n", [f"{CUT}:3: ", "truncated"]),
    "two equal names": (f">{KEY} again\n{QUERY}\n", [f"{FASTA}:3: ", KEY, "line 1", "rename"]),
}


@pytest.mark.parametrize("case", SECOND_RECORDS)
def test_a_broken_second_record_costs_itself_only(case: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An hour of predictions that ends with a typing mistake; or a mistake that is found only after that hour."""
    record, said = SECOND_RECORDS[case]
    (inputs / FASTA).write_text(f">{KEY}\n{QUERY}\n{record}")
    (inputs / CUT).write_text(f">{OTHER_KEY}\n{OTHER}\n>cut\n{OTHER[:3]}")
    assert main(predict()) == 1
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    (failure,) = json.loads((OUTPUT / "failures.json").read_text())["failures"]
    for part in said:
        assert part in failure["reason"]
    assert printed.out.index(failure["reason"]) < printed.out.index(f"{KEY}: {len(QUERY)} residues")
    assert {path.name for path in OUTPUT.iterdir()} == {
        KEY,
        "failures.json",
        "index.html",
        "predictions.csv",
        "predict.log",
    }


def test_a_folder_without_alignments(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with other files only. An empty one, or empty alignments, are those of a search that found nothing."""
    for path in (A3M, STO):
        (inputs / path).rename((inputs / path).with_suffix(".txt"))
    for command in (predict(), fit()):
        check_refused(command, inputs, capsys, f"alignments/{KEY}", "no alignment")


TEMPLATE_CASES: Mapping[str, tuple[list[str], list[str]]] = {
    "no such folder": (["--templates", "nowhere"], ["nowhere", "no such folder of template structures"]),
    "a file": (["--templates", FASTA], [FASTA, "is a file, but --templates takes"]),
    "no structures": (["--templates", f"alignments/{KEY}"], [f"alignments/{KEY}", "no structure", ".cif"]),
    "no date": (["--templates", "mmcif_files", "--max_template_date", "May 2020"], ["'May 2020'", "2020-05-14"]),
    "no day": (["--templates", "mmcif_files", "--max_template_date", "2021-02-29"], ["'2021-02-29'", "2020-05-14"]),
    "date alone": (["--max_template_date", "2020-05-14"], ["--max_template_date", "--templates"]),
    "obsolete alone": (["--obsolete", FASTA], ["--obsolete", "--templates"]),
    "no such list": (["--templates", "mmcif_files", "--obsolete", "nowhere.dat"], ["nowhere.dat"]),
    "not the list": (["--templates", "mmcif_files", "--obsolete", CONFIG], [f"{CONFIG}:"]),
}


@pytest.mark.verify_but("no such folder", "not the list")
@pytest.mark.parametrize("case", TEMPLATE_CASES)
def test_predict_refuses_templates(case: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a model that takes templates, so that it is not refused for that."""
    options, said = TEMPLATE_CASES[case]
    test = ModelConfig.preset("test")
    model = AlphaFold(dataclasses.replace(test, templates=dataclasses.replace(test.templates, enabled=True)))
    save_model(inputs / CHECKPOINT, model, features=FeatureConfig(crop_size=None, max_templates=1))
    check_refused(predict(*options), inputs, capsys, *said)


def test_published_parameters_of_no_known_model(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name, by --preset, by another model's --preset, and a preset for a file that says its sizes itself."""
    assert main(["weights", "random", "--preset", "test", "--output", "weights.npz"]) == 0
    capsys.readouterr()
    published = ["--checkpoint", "weights.npz"]
    check_refused(predict(*published), inputs, capsys, "weights.npz", "give --preset")
    check_refused(predict(*published, "--preset", "tset"), inputs, capsys, "'tset'", "Did you mean 'test'?")
    assert main(predict(*published, "--preset", "small")) == 2
    assert re.fullmatch(
        r"evodsp: error: weights.npz: array '\S+' .* is it another model's file\?\n", capsys.readouterr().err
    )
    check_refused(predict("--preset", "test"), inputs, capsys, CHECKPOINT, "--preset test", "leave it out")
    assert main(predict(*published, "--preset", "test")) == 0


def test_templates_for_a_model_without(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(
        predict("--templates", "mmcif_files"), inputs, capsys, CHECKPOINT, "takes no templates", "mmcif_files"
    )


STRUCTURE_CASES: Mapping[str, tuple[Callable[[str], str], list[str]]] = {
    "cut within a row": (lambda cif: cif[: cif.rindex("ATOM") + 30], [CIF, "truncated", "download"]),
    "without the chain": (
        lambda cif: re.sub(r"(\nATOM .*) A (\S+ \d+)(?=\n)", r"\1 B \2", cif),
        [CIF, "'A'", "Chains: B"],
    ),
    "another sequence": (lambda cif: re.sub(r"\bMET\b", "TRP", cif), [A3M, "position 1,", "'M'", "'W'"]),
}


@pytest.mark.parametrize("case", STRUCTURE_CASES)
def test_fit_refuses_a_broken_structure(case: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, said = STRUCTURE_CASES[case]
    (inputs / STO).unlink()
    (inputs / CIF).write_text(change((inputs / CIF).read_text()))
    check_refused(fit(), inputs, capsys, *said)


def test_a_chain_that_is_not_there(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without alignments, without a structure file, not in its structure file, not in the form of a name."""
    check_refused(
        fit("--data.train_chains", "[1abd_A]"), inputs, capsys, "1abd_A", "alignments", f"Did you mean '{KEY}'?"
    )
    shutil.copytree(inputs / "alignments" / KEY, inputs / "alignments" / "1abd_A")
    check_refused(fit("--data.train_chains", "[1abd_A]"), inputs, capsys, "data.train_chains", "mmcif_files", "1abd_A")
    shutil.copytree(inputs / "alignments" / KEY, inputs / "alignments" / "1abc_C")
    check_refused(fit("--data.train_chains", "[1abc_C]"), inputs, capsys, CIF, "'C'", "Chains: A")
    (inputs / "train.txt").write_text(f"{KEY}\n{KEY}\n")
    check_refused(fit("--data.train_chains", "train.txt"), inputs, capsys, "train.txt", KEY, "more than once")


def unpicklable(whole: bytes) -> bytes:
    """A PyTorch file that would run code when it is loaded."""
    buffer = io.BytesIO()
    torch.save({"state_dict": Path("/")}, buffer)
    return buffer.getvalue()


def of_another_program(whole: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, buffer)
    return buffer.getvalue()


CHECKPOINTS: Mapping[str, Callable[[bytes], bytes]] = {
    "text": lambda whole: b"not a checkpoint\n",
    "empty": lambda whole: b"",
    "cut in half": lambda whole: whole[: len(whole) // 2],
    "last bytes cut off": lambda whole: whole[:-10],
    "beginning cut off": lambda whole: whole[1000:],
    "middle overwritten": lambda whole: whole[:100] + b"\0" * 2000 + whole[2100:],
    "objects instead of tensors": unpicklable,
    "weights of another program": of_another_program,
}


@pytest.mark.verify_but("cut in half", "middle overwritten", "objects*", "weights*")
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_file_that_is_no_checkpoint(case: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = inputs / CHECKPOINT
    path.write_bytes(CHECKPOINTS[case](path.read_bytes()))
    check_refused(predict(), inputs, capsys, CHECKPOINT, "checkpoint")
    check_said(lambda: read_checkpoint(CHECKPOINT), CHECKPOINT, "checkpoint")
    if case in ("cut in half", "weights of another program"):
        validate = ["validate", "--config", CONFIG, "--output", str(OUTPUT), "--ckpt_path", CHECKPOINT]
        for command in (fit("--ckpt_path", CHECKPOINT), validate):
            check_refused(command, inputs, capsys, CHECKPOINT, "checkpoint")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (predict("--fasta", "alignments"), "alignments: no file of this folder is FASTA or A3M (.fasta, "),
        (predict("--alignments", FASTA), f"{FASTA}: is a file, but --alignments takes the folder"),
        (predict("--preset", "model_9"), "--preset is 'model_9', but must be one of model_1,"),
        (fit("--data.train_chains", "alignments"), "alignments: is a folder, but a list of chains is a file"),
        (fit("--data.train_chains", "[zzzz_Q]"), "no alignments of chain 'zzzz_Q' in alignments; add its folder"),
    ],
)
def test_a_name_of_the_wrong_kind(
    words: list[str], said: str, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """'No such file' said of a folder that is there, and the other way round; a preset that does not exist."""
    check_refused(words, inputs, capsys, said)


def test_the_files_that_a_command_takes(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`predict` takes other programs' parameters as well, `fit` does not."""
    (inputs / "params.npz").write_text("no parameters")
    check_refused(
        predict("--checkpoint", "params.npz"), inputs, capsys, "params.npz: neither a checkpoint nor", ".npz", ".pt"
    )
    np.savez(inputs / "params.npz", weight=np.zeros(2))
    check_refused(fit("--ckpt_path", "params.npz"), inputs, capsys, "params.npz: NumPy's .npz, not a checkpoint")


def test_a_checkpoint_that_is_a_folder_or_missing(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("alignments", "nowhere.ckpt"):
        for command in (predict("--checkpoint", name), fit("--ckpt_path", name)):
            check_refused(command, inputs, capsys, name, "checkpoint")


@pytest.mark.parametrize(
    ("right", "wrong", "key"),
    [
        ("  ema_decay", "  ema_decy", "model.ema_decay"),
        ("warmup_samples", "warmup_sample", "model.optimizer.warmup_samples"),
        ("samples_per_epoch", "sample_per_epoch", "data.samples_per_epoch"),
        ("max_steps", "max_step", "trainer.max_steps"),
        ("channels: {msa", "channels: {ms", "model.channels.msa"),
    ],
)
def test_a_misspelt_config_key(
    right: str, wrong: str, key: str, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the YAML file: its line, and the key that was probably meant."""
    text = (inputs / CONFIG).read_text().replace(right, wrong, 1)
    (inputs / CONFIG).write_text(text)
    line = next(number for number, line in enumerate(text.splitlines(), 1) if wrong in line)
    check_refused(fit(), inputs, capsys, f"{CONFIG}:{line}: ", "unknown config key", "Did you mean", key)


@pytest.mark.parametrize("output", [f"{CONFIG}/out", "/proc/evodsp/out"])
def test_an_output_that_cannot_be_written(output: str, inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A parent that is a file, and a file system that takes no folders: a traceback, or hours of work that cannot be saved."""
    commands = {
        "fit": ["fit", "--config", CONFIG],
        "predict": predict()[: predict().index("--output")] + predict()[predict().index("--output") + 2 :],
        "export": ["weights", "export", "--checkpoint", CHECKPOINT, "--format", "deepmind"],
    }
    for words in commands.values():
        check_refused([*words, "--output", output], inputs, capsys, output.rpartition("/")[0].removesuffix("/evodsp"))


def test_an_output_folder_that_is_a_file(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that trains or predicts before it finds out that there can be no folder of that name."""
    for words in (fit(), predict()):
        words[words.index("--output") + 1] = CONFIG
        check_refused(words, inputs, capsys, f"--output {CONFIG}: is a file, but the output is a folder")


def test_a_misspelt_option(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(
        fit("--model.evoformer.block", "1"), inputs, capsys, "'--model.evoformer.block'", "'--model.evoformer.blocks'"
    )
    check_refused(predict("--recyles", "1"), inputs, capsys, "'--recyles'", "'--recycles'")


@pytest.mark.verify
def test_the_installed_program_says_the_same(inputs: Path) -> None:
    """Warnings of imported packages, or an exit code lost between `main` and the shell, show only in a real process."""
    (inputs / A3M).write_text(f">{KEY}\n{QUERY}\n>r1\n{QUERY[:5]}")
    program = Path(sys.executable).with_name("evodsp")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([program, *fit()], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    check_message(done.stderr, f"{A3M}:3: ", "truncated")
    assert done.stdout == ""
    assert not OUTPUT.parent.exists()


def test_the_inputs_are_in_order_before_they_are_broken(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise every test above could pass for another reason than its own."""
    assert main(predict()) == 0
    assert (OUTPUT / KEY / "seed_0.cif").is_file()
    shutil.rmtree(OUTPUT)
    assert main(fit("--trainer.max_steps", "1")) == 0
    assert (OUTPUT / "checkpoints" / "last.ckpt").is_file()

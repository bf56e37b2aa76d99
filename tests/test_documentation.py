"""The documentation runs: every command and every code block of README.md and docs/ is executed, or listed here with a reason.

Commands run in a folder that looks like the repository's root (its `data`, `configs` and `scripts`), in the order of `PAGES`,
so that a later one finds what an earlier one left. Options that make them small are appended; nothing else is changed. The
verify tier runs them all, and starts ranks. `make test` runs those of the README, on one rank; of the others it reads the
options, and of Python blocks the imports. A command without a rule fails, so that a new one cannot
go untested. `tests/test_documentation_names.py` checks what the prose between them names.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import re
import runpy
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig, as_multimer
from evodsp.data.formats.mmcif import read_structure
from evodsp.model.alphafold import AlphaFold
from evodsp.report.runs import read_curve
from evodsp.weights.by_name import check_name
from evodsp.weights.checkpoint import save_model
from scripts.benchmarks import gpu as benchmark_gpu
from scripts.examples.synthetic import __main__ as synthetic
from scripts.paper import reproduce
from tests.builders.pages import (
    INCLUDED,
    PAGES,
    ROOT,
    Block,
    blocks,
    check_make,
    check_pip,
    last_options,
    option,
    run_quietly,
    text_of,
)
from tests.shared import SHARED

NOT_RUN = {
    "make demo": "5 minutes; tests/test_demo.py runs its steps in the verify tier",
    "make test": "this very suite",
    "make verify": "the verify tier",
    "make resolve": "CI runs it before the tests",
    "make rehearse": "5 GB; a test beside its script runs steps of it",
    "make lint": "CI runs it before the tests",
    "python3 -m venv": "makes an environment; its arguments are checked",
    "source": "the environment's activation",
    "export": "sets variables of the reader's shell; their form is checked",
    ".venv/bin/pip install": "installs from a package index; the extras and files it names are checked",
    "pip install": "likewise",
    "scripts/paper/gpu.sh": "needs GPUs; its options are checked, and a test beside it runs it",
    "scripts/benchmarks/gpu.sh": "needs a GPU; its options are checked, and a test beside it runs it",
    "scripts/benchmarks/kit.sh": "asks a package index; its options are checked, and a test beside it runs it",
    "../kit/run.sh": "runs a command on a machine with a GPU; the command is checked, and a test beside it runs it",
    "sbatch": "needs SLURM; the script and the options of evodsp are checked, and a test beside it runs it",
    "srun": "needs SLURM; the options of evodsp are checked",
    "mpirun": "needs an MPI; the options of evodsp are checked, and tests/training/test_mesh.py sets its variables",
    "make wheel": "tests/test_packaged.py builds it",
    "make dist": "asks a package index; tests/test_packaged.py builds what it builds",
    "docker": "needs Docker; the recipe is looked for, and a test beside it installs what it installs",
    "apptainer": "needs Apptainer; likewise",
    "torchrun": "runs in the verify tier; otherwise its options of evodsp are checked",
}
"""Commands that are not executed here, by how they begin, and why."""

PROGRAMS = tuple(f"scripts.examples.{name}" for name in ("pairformer", "own_loop", "check_parallel", "restraints"))
"""Programs that a page shows or starts with torchrun, beside those of scripts/examples/frameworks."""

STEPS = 2
SMALL_PREDICTION = ["--recycles=0", "--msa_clusters=4", "--extra_msa=4", "--device=cpu", "--overwrite=true"]
FEW_ROWS = [
    f"--data.{part}.{rows}={n}"
    for part in ("train", "validation")
    for rows, n in (("msa_clusters", 5), ("extra_msa", 4))
]
ONE_OF_EACH = ["--model.structure_module.iterations=1", "--model.evoformer.blocks=1", "--model.extra_msa.blocks=1"]
SMALL = [
    *FEW_ROWS,
    "--data.train.crop_size=16",
    "--data.validation.crop_size=16",
    "--data.train.recycles=0",
    "--data.validation.recycles=0",
    f"--data.samples_per_epoch={STEPS}",
    *ONE_OF_EACH,
    "--trainer.enable_progress_bar=false",
    "--data.validation_chains=[s005_A]",
]
BUNDLED = ["--data.train_chains=[s001_A]"]
ONE_REAL = ["--data.train_chains=[2q2k_A]"]


# ---- One rule for every kind of command: it runs or checks the command, and raises if the page is wrong. ----


class Reader:
    """Follows the pages as a reader would, in the current folder."""

    def __init__(self, start_ranks: bool = False) -> None:
        self.every = start_ranks
        self.page = ""
        self.trained: set[str] = set()
        self.one_rank = [] if start_ranks else ["--parallel.sequence=1"]

    def follow(self, page: str, command: str) -> None:
        """Apply the rule of a command. Fails on one that has none."""
        if page != self.page:
            self.page, self.trained = page, set()
        words = shlex.split(command)
        programs = {"evodsp": self.evodsp, "python": self.python, "torchrun": self.torchrun, "tar": unpack}
        for program, rule in programs.items():
            if words[0] == program:
                rule(words[1:])
                return
        assert any(command.startswith(start) for start in NOT_RUN), f"no rule tests this command: {command}"
        CHECKS[words[0]](words[1:])
        if command == "make demo" and self.all_run(page):  # commands after it find a model where the demo leaves one
            self.fit(["fit", "--config", "configs/quickstart.yaml", "--output", demo_model()])

    def all_run(self, page: str) -> bool:
        return self.every or page == "README.md"

    def evodsp(self, words: list[str]) -> None:
        quick = ("report", "search", "selftest", "slurm", "weights fetch")
        rules: dict[str, Callable[[list[str]], None]] = {
            "fit": self.fit,
            "validate": self.validate,
            "predict": self.predict,
            "data index": self.index,
            "data doctor": self.doctor,
            "data build": self.build,
            "plan": self.plan,
            "estimate": self.estimate,
            "search": check_options,  # its database is a hundred gigabytes
            "selftest": check_options,  # needs GPUs; tests/selftest runs it
            "slurm": run,
            "report": self.report,
            "score": self.score,
            "weights export": self.convert,
            "weights import": self.convert,
            "weights fetch": lambda words: [check_name(name) for name in words[2:]],  # would take it from the network
        }
        for length in (2, 1):
            if (name := " ".join(words[:length])) in rules:
                rule = rules[name] if name in quick or self.all_run(self.page) else check_options
                rule(words)
                return
        pytest.fail(f"no rule tests this command: evodsp {' '.join(words)}")

    def fit(self, words: list[str]) -> None:
        """A page starts with no run; a resumed run must have something left to do; DIR is replaced by folders."""
        configs = [after for word, after in itertools.pairwise(words) if word == "--config"]
        output = option(words, "--output") or yaml.safe_load(Path(configs[-1]).read_text())["output"]
        small = [*SMALL, f"--trainer.max_steps={2 * STEPS if '--ckpt_path' in words else STEPS}"]
        if "DIR" in words:
            for name, folder, chains in (
                ("bundled", Path("data"), BUNDLED),
                ("real", SHARED / "data", ["--data.validation_chains=null", *(ONE_REAL if "null" in words else [])]),
            ):
                if folder.is_dir():
                    run([*with_folders(words, folder), *small, *chains, f"--output=runs/{name}", "--overwrite=true"])
            return
        if output not in self.trained and "--ckpt_path" not in words:
            small.append("--overwrite=true")
        self.trained.add(output)
        run([*words, *small, *self.one_rank])
        assert (Path(output) / "checkpoints" / "last.ckpt").is_file()

    def validate(self, words: list[str]) -> None:
        one = ["--data.validation_chains=[s005_A]", "--data.validation.crop_size=16", "--data.validation.recycles=0"]
        run([*words, *FEW_ROWS, *one, *ONE_OF_EACH])

    def complexes(self, words: list[str]) -> None:
        """With the page's own file, and a tiny model in place of 93 million parameters."""
        (given,) = [one.text for one in blocks(self.page) if one.text.startswith(">")]
        places = {name: f"runs/{name}" for name in ("complexes.fasta", "alignments", "params_model_1_multimer_v3.npz")}
        Path(places["complexes.fasta"]).write_text(given)
        Path(places["alignments"]).mkdir()
        model = places["params_model_1_multimer_v3.npz"].replace(".npz", ".ckpt")
        save_model(model, AlphaFold(as_multimer(ModelConfig.preset("test"))), features=FeatureConfig())
        replaced = [places.get(word, word) for word in words]
        run([*(model if word.endswith(".npz") else word for word in replaced), *SMALL_PREDICTION, *self.one_rank])
        for name, chains in (("dimer", 2), ("trimer", 3)):
            assert len(read_structure(f"predictions/{name}/seed_0.cif").chains) == chains
            assert Path(f"predictions/{name}/ranking_debug.json").is_file()

    def predict(self, words: list[str]) -> None:
        """All files that the page's table names must be there."""
        if "complexes.fasta" in words:
            self.complexes(words)
            return
        if "--msa_server" in words:  # would ask a server
            check_options(words)
            check_name(option(words, "--weights") or "")
            return
        run([*words, *SMALL_PREDICTION, *self.one_rank])
        output = option(words, "--output")
        if "--example" in words:
            assert (Path(output or "") / "index.html").is_file()
            return
        assert output == "predictions", "the table of docs/prediction.md names another folder"
        listed = re.findall(r"^\| `(predictions/[^`]*)`", text_of("docs/prediction.md"), re.MULTILINE)
        assert len(listed) >= 4
        name = Path(words[words.index("predict") + 1]).stem
        for path, seed in itertools.product(listed, range(int(option(words, "--seeds") or 1))):
            assert Path(path.replace("<name>", name).replace("<k>", str(seed))).is_file(), path

    def index(self, words: list[str]) -> None:
        run([*words, "--workers=0", "--overwrite=true"])

    def doctor(self, words: list[str]) -> None:
        words = [word.replace("[NAME]", "[s005_A]") for word in words]
        run([*(with_folders(words, Path("data")) if "DIR" in words else words), "--workers=0", "--sample=2"])

    def build(self, words: list[str]) -> None:
        run(words)
        assert (Path(option(words, "--output") or "") / "store.json").is_file()

    def plan(self, words: list[str]) -> None:
        """With a small model on two devices: following a large one takes several seconds."""
        if "--measure" in words:  # which takes a minute
            check_options(words)
            return
        small = ["--gpus=2", "--sequence=1", "--preset=small", "--residues=16", "--msa=8", "--extra_msa=8"]
        run([*words, *small, "--global_batch=2", *(["--templates=0"] if "--config" in words else [])])
        if output := option(words, "--output"):
            assert "Memory of a device" in Path(output).read_text()  # one mesh has nothing to draw

    def estimate(self, words: list[str]) -> None:
        run([*words, "--residues=16", "--preset=test", *(["--gpus=2"] if "--gpus" in words else [])])
        if output := option(words, "--output"):
            assert "Memory of a device" in Path(output).read_text()

    def report(self, words: list[str]) -> None:
        run(words)
        assert "<polyline" in Path(option(words, "--output") or "").read_text()

    def score(self, words: list[str]) -> None:
        """Of complexes, which no page predicts, the structures stand in for the predictions."""
        if "--complexes" in words:
            Path(option(words, "--predictions") or "").symlink_to(Path(option(words, "--structures") or "").absolute())
        if "--before" not in words:
            run(words)
            return
        run([*words, *SMALL_PREDICTION, "--msa_clusters=5"])  # one more than templates
        listed = re.findall(r"^\| `(judgement[^`]*)`", text_of(self.page), re.MULTILINE)
        assert {path.name for path in Path(option(words, "--output") or "").iterdir()} == {*listed, "before", "after"}

    def convert(self, words: list[str]) -> None:
        run(words)
        assert Path(option(words, "--output") or "").stat().st_size > 0

    def python(self, words: list[str]) -> None:
        """A script of the repository, in this process; a module in one of its own, in the verify tier only."""
        if words[:2] == ["-m", "scripts.paper.reproduce"]:  # which takes 20 minutes: nothing is measured
            assert reproduce.main([*words[2:], "--quick", "--only", "plots", "--output", "runs/paper"]) == 0
            return
        if words[:2] == [
            "-m",
            "scripts.examples.synthetic",
        ]:  # ten seconds a family: its options are read, then one is refused
            with contextlib.redirect_stderr(io.StringIO()) as said:
                assert synthetic.main(last_options([*words[2:], "--members=0"])) == 2
            assert "members is 0" in said.getvalue()
            return
        if words[0] == "-m":
            assert find_spec(words[1])
            if not self.one_rank:
                subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
            return
        assert runpy.run_path(str(ROOT / words[0]))["main"](words[1:]) == 0

    def torchrun(self, words: list[str]) -> None:
        """Of one rank: only the options of evodsp behind `-m evodsp`."""
        if (module := words[words.index("-m") + 1]).startswith(("scripts.examples.frameworks.", *PROGRAMS)):
            assert find_spec(module)
            return  # a test beside it runs it and checks what it prints
        at = words.index("evodsp")
        check_started(words)
        if not self.one_rank:
            small = SMALL_PREDICTION if words[at + 1] == "predict" else [*SMALL, f"--trainer.max_steps={STEPS}"]
            command = [sys.executable, "-m", "torch.distributed.run", *words, *small]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def demo_model() -> str:
    """The folder of the run of `make demo`."""
    found = re.search(r"--parallel.* --output \$\(RUNS\)/(\S+)", (ROOT / "Makefile").read_text())
    assert found
    return f"runs/{found[1]}"


def run(words: list[str]) -> None:
    """`evodsp` in this process. If the page and the test both set an option, the last one counts."""
    words = last_options(words)
    assert main(words) == 0, f"evodsp {' '.join(words)}"


def unpack(words: list[str]) -> None:
    subprocess.run(["tar", *words], check=True)


def check_options(words: list[str]) -> None:
    """An option that the command does not know."""
    if words[0] in ("fit", "validate"):
        run_quietly([*words, "--print_config"])
        return
    text = run_quietly([*words[: 2 if words[0] in ("data", "weights") else 1], "--help"])
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--\w+(?:\.\w+)*", text))


_FOLDERS = {"alignment_dir": "alignments", "structure_dir": "mmcif_files"}


def with_folders(words: list[str], folder: Path) -> list[str]:
    replaced = list(words)
    for at, name in enumerate(words[:-1]):
        if (sub := _FOLDERS.get(name.rpartition(".")[2].removeprefix("--"))) is not None:
            replaced[at + 1] = str(folder / sub)
    assert "DIR" not in replaced
    return replaced


def check_variables(words: list[str]) -> None:
    """Names with numbers."""
    assert all(re.fullmatch(r"[A-Z_]+=\d+", word) for word in words), words


def check_started(words: list[str]) -> None:
    """Options of evodsp behind `-m evodsp` that it does not know."""
    at = words.index("evodsp")
    assert words[at - 1] == "-m"
    assert run_quietly([*words[at + 1 :], "--print_config"])


def check_batch(words: list[str]) -> None:
    """A script that is not there, or options of evodsp behind it that it does not know."""
    [at] = [number for number, word in enumerate(words) if word.endswith(".sbatch")]
    assert Path(words[at]).is_file()
    assert run_quietly(["fit", *words[at + 1 :], "--print_config"])


def check_container(words: list[str]) -> None:
    """A recipe that is not there, or a command in the container that evodsp does not have."""
    for word in words:
        assert not word.startswith("scripts/") or (ROOT / word).is_file(), word
    if "evodsp" in words[:-1] and words[0] != "build":
        check_options(words[len(words) - words[::-1].index("evodsp") :])


def check_words(expected: str) -> Callable[[list[str]], None]:
    def check(words: list[str]) -> None:
        assert " ".join(words) == expected

    return check


def check_gpu_script(words: list[str]) -> None:
    """An option that the script does not know."""
    known = set(re.findall(r"^    (--[\w-]+)\)", text_of("scripts/paper/gpu.sh"), re.MULTILINE))
    assert known
    assert {word for word in words if word.startswith("--")} <= known


def check_benchmark_script(words: list[str]) -> None:
    """An option that the script does not know, or a value that it refuses."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert benchmark_gpu.main([*words, "--dry-run"]) == 0


def check_kit(words: list[str]) -> None:
    """An option that the script does not know."""
    known = set(re.findall(r"^    (--[\w-]+)\)", text_of("scripts/benchmarks/kit.sh"), re.MULTILINE))
    assert known
    assert {word for word in words if word.startswith("--")} <= known


def check_in_kit(words: list[str]) -> None:
    """The command that a kit is to find packages for, if it has a wrong option or is no program of this repository."""
    if words[:3] == ["python3", "-m", "scripts.benchmarks.gpu"]:
        check_benchmark_script(words[3:])
    elif words[:3] == ["python3", "-m", "evodsp"]:
        check_options(words[3:])
    else:
        CHECKS[words[0]](words[1:])


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "pip": check_pip,
    ".venv/bin/pip": check_pip,
    "python3": check_words("-m venv .venv"),
    "source": check_words(".venv/bin/activate"),
    "export": check_variables,
    "sbatch": check_batch,
    "srun": check_started,
    "mpirun": check_started,
    "docker": check_container,
    "apptainer": check_container,
    "scripts/paper/gpu.sh": check_gpu_script,
    "scripts/benchmarks/gpu.sh": check_benchmark_script,
    "scripts/benchmarks/kit.sh": check_kit,
    "../kit/run.sh": check_in_kit,
}


# ---- Tests ----


@pytest.fixture
def like_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the repository's data, configs and scripts, and with the data as a reader's family; a process
    group may be made in it."""
    for name in ("data", "configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    family = tmp_path / "family"
    family.mkdir()
    for name in ("alignments", "mmcif_files", "train.txt", "validation.txt"):
        (family / name).symlink_to(ROOT / "data" / name)
    (family / "test.txt").symlink_to(ROOT / "data" / "validation.txt")
    (family / "general.txt").write_text("s001_A\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("start_ranks", [False, pytest.param(True, marks=pytest.mark.verify)])
def test_every_command_and_block_runs(
    start_ranks: bool, like_the_root: Path, monkeypatch: pytest.MonkeyPatch, parsers: None
) -> None:
    """A renamed option or import, a command that the one before it spoils, a result that is elsewhere, wrong YAML."""
    reader = Reader(start_ranks)
    for block in (block for page in PAGES for block in blocks(page)):
        try:
            run_block(block, reader, like_the_root, monkeypatch)
        except BaseException as error:
            error.add_note(f"{block.place}:\n{block.text}")
            raise
    files = {path.relative_to("runs/quickstart").as_posix() for path in Path("runs/quickstart").rglob("*")}
    assert {"checkpoints/last.ckpt", "checkpoints/best.ckpt", "curve.csv", "tensorboard", "config.yaml"} <= files
    resumed = [STEPS - 1, 2 * STEPS - 1] if start_ranks else [STEPS - 1]
    assert list(read_curve(Path("runs/quickstart/curve.csv"))) == resumed, "the run was not resumed"
    assert {path.name for path in like_the_root.iterdir()} - {"block.yaml"} == {
        *("data", "configs", "family", "scripts", "runs", "predictions", "example", "dimers"),
    }


def run_block(block: Block, reader: Reader, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the block's language."""
    if block.included is not None:  # only programs; the test of the programs runs them
        programs = tuple(f"{name.replace('.', '/')}.py" for name in PROGRAMS)
        assert block.included.startswith(("scripts/examples/frameworks/", *programs)), "no rule tests this file"
        assert (ROOT / block.included).is_file()
    elif block.language == "python":
        if reader.all_run(block.page):
            run_python(block, monkeypatch)
        else:
            run_imports(block)
    elif block.language == "yaml":
        run_yaml(block, folder)
    elif block.language == "bash":
        for command in block.commands():
            reader.follow(block.page, command)
    else:
        assert block.language in ("text", ""), f"no rule for a block of {block.language}"
        assert block.language or block.page in INCLUDED, "name the block's language"


def run_python(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block; one that makes a process group has it to itself, as torchrun's only rank."""
    torch.manual_seed(0)
    with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if "init_process_group" in block.text:
            for name, value in values.items():
                patch.setenv(name, value)
        exec(compile(block.text, block.place, "exec"), {"__name__": "page"})
    assert printed.getvalue() or "init_process_group" in block.text


def run_imports(block: Block) -> None:
    """Catches a name that is not there, in seconds less than the whole block."""
    found = [node for node in ast.parse(block.text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert found
    exec(compile(ast.Module(found, []), block.place, "exec"), {})


def run_yaml(block: Block, folder: Path) -> None:
    """The block on top of the quickstart's configuration: unknown fields and wrong types."""
    (folder / "block.yaml").write_text(block.text)
    words = ["fit", "--config", "configs/quickstart.yaml", "--config", "block.yaml", "--print_config"]
    shown = yaml.safe_load(run_quietly(words))
    assert subset(yaml.safe_load(block.text), shown)


def subset(part: object, whole: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            name in whole and subset(value, whole[name]) for name, value in part.items()
        )
    if isinstance(part, list):
        return isinstance(whole, list) and len(part) == len(whole) and all(map(subset, part, whole))
    return part == whole


def test_the_readme_has_the_commands_that_a_newcomer_needs() -> None:
    """The pattern that finds blocks finding none, and everything passing."""
    found = [command for block in blocks("README.md") if block.language == "bash" for command in block.commands()]
    for start in (
        "make demo",
        "pip install .",
        "pip install dist/",
        "evodsp fit",
        "evodsp predict --example",
        "evodsp predict",
    ):
        assert any(command.startswith(start) for command in found), start
    [python] = [block for block in blocks("README.md") if block.language == "python"]
    assert len([line for line in python.text.splitlines() if line]) <= 5
    assert "predictions.png" in text_of("README.md")
    for page in PAGES:
        assert text_of(page).count("```") == 2 * len(blocks(page)), page


@pytest.mark.parametrize(
    "command",
    ["evodsp fti --config x", "evodsp", "git clone x", "make nothing", "pip install '.[nothing]'", "pip install x"],
)
def test_a_command_without_a_rule_fails(command: str) -> None:
    with pytest.raises((pytest.fail.Exception, AssertionError, KeyError)):
        Reader().follow("README.md", command)

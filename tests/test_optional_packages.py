"""What a user sees of a package that is not installed: one line with the command that installs it, and the exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from evodsp.cli import main
from evodsp.config import KernelsConfig
from evodsp.model.kernels import BACKENDS
from evodsp.model.kernels.operators import choose, summary
from tests.builders.pages import extras
from tests.builders.training_chains import write_chains

OF_DEVELOPERS = {"notebooks", "docs", "compat", "dev"}
FOR_ANOTHER_CUDA = {"cuequivariance-cu13"}
ROOTS = ["--alignment_dir", "alignments", "--structure_dir", "mmcif_files"]
COMMANDS = {
    "evodsp[hub]": ("huggingface_hub", ["predict", "a.fasta", "--checkpoint", "hf:organisation/name"]),
    "evodsp[relax]": ("openmm", ["predict", "a.fasta", "--checkpoint", "a.ckpt", "--relax", "best"]),
    "evodsp[cluster]": ("distributed", ["data", "build", *ROOTS, "--scheduler"]),
    "s3fs": ("s3fs", ["fit", "--config", "tiny.yaml", "--data.store", "s3://bucket/store"]),
}
"""What pip installs, its package, and a command that needs it."""
KERNELS = {
    "evodsp[triton]": ("triton", "triton"),
    "evodsp[gpu]": ("flash_attn", "flash_attn"),
    "evodsp[cuequivariance]": ("cuequivariance_torch", "cuequivariance"),
}
"""What pip installs, its package, and the backend that needs it."""


def take_away(package: str, patch: pytest.MonkeyPatch) -> None:
    """Let imports of a package fail as if it were not installed."""
    for name in {package, *(one for one in sys.modules if one.startswith(f"{package}."))}:
        patch.setitem(sys.modules, name, None)


def test_every_extra_is_here() -> None:
    """Catches a new extra whose absence nobody looks at."""
    named = {wanted.removeprefix("evodsp[").removesuffix("]") for wanted in (*COMMANDS, *KERNELS)}
    assert extras() - OF_DEVELOPERS - FOR_ANOTHER_CUDA == named - {"s3fs"}
    assert {f"evodsp[{backend.extra}]" for backend in BACKENDS.values() if backend.package} == set(KERNELS)


@pytest.mark.parametrize("wanted", COMMANDS)
def test_a_command_names_the_package_that_it_needs(
    wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback, and words without the command of pip."""
    package, words = COMMANDS[wanted]
    monkeypatch.chdir(write_chains(tmp_path))
    Path("a.fasta").write_text(">a\nMKT\n")
    take_away(package, monkeypatch)
    assert main([*words, "--output", "out"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    quote = "'" if "[" in wanted else ""
    assert line.startswith("evodsp: error: ")
    assert f"pip install {quote}{wanted}{quote}" in line


@pytest.mark.parametrize("wanted", KERNELS)
def test_a_kernel_that_needs_a_package_is_replaced_with_a_warning(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an import that ends the run, and words that do not say how the backend is had."""
    package, backend = KERNELS[wanted]
    take_away(package, monkeypatch)
    choices = choose(KernelsConfig(backend=backend), torch.device("cpu"), torch.float32)[1]
    lines = summary(choices, torch.device("cpu"))
    assert len(lines) == 2
    assert lines[1].startswith(
        f"warning: kernels: {backend}: not installed (pip install '{wanted}'); chunked is used instead"
    )


def test_a_package_that_lacks_a_package_is_not_called_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches 'not installed' of flash-attn, where it is a package of its own that is missing."""
    take_away("flash_attn", monkeypatch)
    monkeypatch.delitem(sys.modules, "flash_attn")
    (tmp_path / "flash_attn.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="No module named 'no_such_package'"):
        BACKENDS["flash_attn"].load()

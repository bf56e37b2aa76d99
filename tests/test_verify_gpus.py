"""`scripts/verify_gpus.sh` and the checks that it runs: what they compare, and that they fail where they should."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.model.kernels import chunked
from scripts import verify_ranks

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "verify_gpus.sh"
EXPECTED = ROOT / "scripts" / "verify_gpus.expected.txt"


def names(text: str) -> list[str]:
    """Of the checks that succeeded, in order."""
    return [line.rpartition(", ")[0].removeprefix("ok").strip() for line in text.splitlines() if line.startswith("ok ")]


@pytest.mark.verify
def test_one_cpu_rank(tmp_path: Path) -> None:
    """Catches a check that fails on one device, and an example of the output that is out of date."""
    words = ["bash", str(SCRIPT), "--cpu", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all verified"
    found, expected = names(done.stdout), names(EXPECTED.read_text())
    assert len(found) == 15
    assert found == expected[: len(found)]
    assert not any(path.name.startswith("tmp.") for path in tmp_path.iterdir()), "its temporary folder was left"


def test_the_example_of_the_output_has_every_check() -> None:
    """Catches a check that was renamed or added without a new example."""
    listed = [name for name in re.findall(r'check "([^"]+)"', SCRIPT.read_text()) if "$" not in name]
    assert len(listed) >= 14
    assert set(listed) <= set(names(EXPECTED.read_text()))


def curve(folder: Path, *losses: float) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.csv"
    path.write_text("step,train/loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses)))
    return path


def test_curves(tmp_path: Path) -> None:
    """Catches a comparison that ignores its tolerance, NaN, or a run that ended early."""
    first = curve(tmp_path, 4.0, 2.0)
    assert "agree" in verify_ranks.curves(0.02, [first, curve(tmp_path, 4.0, 2.02)])
    for others in ((4.0, 2.2), (4.0, float("nan")), (4.0,)):
        with pytest.raises(AssertionError):
            verify_ranks.curves(0.02, [first, curve(tmp_path, *others)])


def prediction(folder: Path, plddt: float, stretch: float) -> Path:
    """What `evodsp predict --format pdb` writes of a protein, as far as it is read."""
    folder.mkdir()
    (folder / "seed_0_scores.json").write_text(json.dumps({"plddt": [plddt] * 3}))
    atom = "ATOM  {0:5d}  {1:3s} ALA A{0:4d}    {2:8.3f}{3:8.3f}{4:8.3f}  1.00 50.00           C\n"
    lines = [atom.format(n, name, 3.8 * n * stretch, 0.0, 0.0) for n in range(1, 4) for name in ("N", "CA")]
    (folder / "seed_0.pdb").write_text("".join(lines))
    return folder


def test_predictions(tmp_path: Path) -> None:
    """Catches a comparison that does not see coordinates, or does not see confidence."""
    first = prediction(tmp_path / "a", 50, 1)
    assert "1.00 of 100" in verify_ranks.predictions(first, prediction(tmp_path / "b", 51, 1.05))
    for name, plddt, stretch in (("c", 53, 1), ("d", 50, 1.5), ("e", float("nan"), 1)):
        with pytest.raises(AssertionError):
            verify_ranks.predictions(first, prediction(tmp_path / name, plddt, stretch))


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that passes over a wrong operator, or ends at the first one."""
    assert "chunked: attention" in verify_ranks.kernels(None, torch.device("cpu"))  # type: ignore[arg-type]
    right = chunked.layer_norm, chunked.transition

    def wrong(function: Any) -> Any:
        return lambda *arguments, **keywords: 1.1 * function(*arguments, **keywords)

    monkeypatch.setattr(chunked, "layer_norm", wrong(right[0]))
    monkeypatch.setattr(chunked, "transition", wrong(right[1]))
    with pytest.raises(AssertionError) as raised:
        verify_ranks.kernels(None, torch.device("cpu"))  # type: ignore[arg-type]
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == [
        f"chunked, {operator}, {dtype}"
        for operator in ("layer_norm", "transition")
        for dtype in ("float32", "bfloat16")
    ]


def test_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check of half precision that compares a result with itself."""
    right = verify_ranks.choose

    def rounding(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
        kernels, choices = right(config, device, dtype)
        if config.backend == "auto":
            transition = kernels.transition
            kernels = dataclasses.replace(kernels, transition=lambda *x, **y: 1.2 * transition(*x, **y))
        return kernels, choices

    monkeypatch.setattr(verify_ranks, "choose", rounding)
    with pytest.raises(AssertionError, match="Evoformer block 11 x 13, errors"):
        verify_ranks.half(None, torch.device("cpu"))  # type: ignore[arg-type]

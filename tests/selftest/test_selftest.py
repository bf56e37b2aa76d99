"""`evodsp selftest` and the checks that it runs: what they compare, and that they fail where they should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.cli import main
from evodsp.model.kernels import chunked
from evodsp.selftest import command, ranks, shared_device
from evodsp.selftest.command import Check, CheckResult, Suite


@pytest.mark.verify
def test_one_cpu_rank(tmp_path: Path) -> None:
    """Catches a check that fails on one device, a row that is lost, and a temporary folder that stays."""
    words = [sys.executable, "-m", "evodsp", "selftest", "--cpu", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all 16 checks succeeded"
    suite = Suite("cpu", 1, tmp_path, 1)
    expected = [check.name for check in [*suite.kernels(), *suite.one_device()]]
    assert re.findall(r"(?m)^ok +\d+  (.+)$", done.stdout) == expected
    assert not any(path.name.startswith("tmp") for path in tmp_path.iterdir()), "its temporary folder was left"


def test_checks_that_several_ranks_run(tmp_path: Path) -> None:
    """Catches a check that is named twice, and a mesh that needs more ranks than there are."""
    suite = Suite("cpu", 3, tmp_path, 1)
    checks = [*suite.kernels(), *suite.one_device(), *suite.several()]
    assert len({check.name for check in checks}) == len(checks) == 26
    assert max(check.ranks for check in checks) == 3


def test_the_table_says_that_a_check_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an exit code of 0 and a last line that hide a failed check, and a check that runs although another that writes
    its files has failed."""
    wrong = program("raise SystemExit(3)", "wrong")
    checks = [program("print('result: 7')", "right"), wrong, program("1", "reader", after=(wrong,))]
    monkeypatch.setattr(Suite, "kernels", lambda suite: [])
    monkeypatch.setattr(Suite, "one_device", lambda suite: checks)
    assert main(["selftest", "--cpu", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:1] for line in lines[:4]] == [["result"], ["ok"], ["7"], ["FAILED"]]
    assert [line.split() for line in lines if line.endswith("reader")] == [["FAILED", "0", "reader"]]
    assert lines[-1] == "2 of 3 checks failed"


def program(source: str, name: str = "check", ranks: int = 0, after: tuple[Check, ...] = ()) -> Check:
    """A check that runs a line of Python: `python -m timeit` runs it once."""
    return Check(name, ("timeit", "-n1", "-r1", source), ranks, after)


def run(*checks: Check, jobs: int = 4, limit_s: float = 60.0) -> list[CheckResult]:
    return [outcome for _, outcome in command.CheckRunner(jobs, limit_s, dict(os.environ)).run(checks)]


def test_checks_at_once(tmp_path: Path) -> None:
    """Catches checks that run one after another, output in the order of the ends, and a reader that does not wait."""
    meet = "import os, time; open('{0}', 'w').close(); end = time.time() + 40\n"
    meet += "while not os.path.exists('{1}'): time.sleep(.05); assert time.time() < end"
    a, b = tmp_path / "a", tmp_path / "b"
    first, second = program(meet.format(a, b), "first"), program(meet.format(b, a), "second")
    third = program(f"assert open('{a}') and open('{b}'); print('result: read')", "third", after=(first, second))
    outcomes = run(first, second, third)
    assert all(outcome.succeeded for outcome in outcomes), [outcome.output for outcome in outcomes]
    said = [command.rows(check, outcome) for check, outcome in zip((first, third), outcomes[::2], strict=True)]
    assert said[0].split()[0] == "ok"
    assert said[0].endswith("  first")
    assert said[1].splitlines()[1].strip() == "read"


@pytest.mark.verify
def test_a_check_that_hangs_and_one_that_reads_its_files(tmp_path: Path) -> None:
    """Catches a hanging check that ends the others or is waited for, leaves processes, or is read although it failed."""
    left = tmp_path / "left"
    child = f"import time; time.sleep(9); open({str(left)!r}, 'w')"
    hangs = program(
        f"import subprocess, sys, time; print('began', flush=True); subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "time.sleep(300)",
        "hangs",
    )
    begun = time.monotonic()
    outcomes = run(hangs, program("1", "other"), program("1", "reader", after=(hangs,)), limit_s=4.0)
    assert [outcome.succeeded for outcome in outcomes] == [False, True, False]
    assert time.monotonic() - begun < 30
    lines = command.rows(hangs, outcomes[0]).splitlines()
    assert lines[0].split()[::2] == ["FAILED", "hangs"]
    assert [line.strip() for line in lines[1:]] == ["began", "it took longer than 4 s and was ended"]
    assert "left out, because it reads what 'hangs' writes" in outcomes[2].output
    time.sleep(max(0.0, begun + 14 - time.monotonic()))
    assert not left.exists(), "what it had started ran on"


def test_one_rank_knows_its_place() -> None:
    """Catches a rank without a launcher that is none, or whose port another one has."""
    source = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_PORT')))"
    outcomes = run(program(source, "a", ranks=1), program(source, "b", ranks=1))
    places = [outcome.output.split()[:3] for outcome in outcomes]
    assert [place[:2] for place in places] == [["0", "1"]] * 2
    assert places[0][2] != places[1][2]


def test_evodsp_need_not_be_installed(tmp_path: Path) -> None:
    """Catches a check that is run as a file: its folder, not the root, is then where packages are looked for."""
    suite = Suite("cuda", 8, tmp_path, 8)
    for check in [*suite.kernels(), *suite.one_device(), *suite.several()]:
        words = command.command_of(check)
        assert words[1] == "-m"
        assert not any(word.endswith(".py") for word in words)
        assert "-m" in words[2:] or check.ranks < 2


def test_comparison_of_ranks_that_share_a_device() -> None:
    """Catches a comparison that is blind to one result of many, to NaN, or to half precision."""
    exact = {"m": torch.arange(1.0, 9), "gradient of w": torch.ones(3), "gradient of zero": torch.zeros(3)}
    half = {name: x + 1e-2 for name, x in exact.items()}
    rounded = {name: x + 1e-8 for name, x in exact.items()}
    assert "3 results agree" in shared_device.compared([rounded, half], [exact, half], 1e-5)
    for name in exact:
        for wrong in (1e-3, float("nan")):
            with pytest.raises(AssertionError, match=f"float32 .{name}.; allowed is 1e-05"):
                shared_device.compared([{**exact, name: exact[name] + wrong}, half], [exact, half], 1e-5)
    with pytest.raises(AssertionError, match="allowed is"):
        shared_device.compared([exact, {name: x + 2e-2 for name, x in exact.items()}], [exact, half], 1e-5)


def curve(folder: Path, *losses: float) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.csv"
    path.write_text("step,train/loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses)))
    return path


def test_curves(tmp_path: Path) -> None:
    """Catches a comparison that ignores its tolerance, NaN, or a run that ended early."""
    first = curve(tmp_path, 4.0, 2.0)
    assert "2 steps: losses agree" in ranks.curves(0.02, 10, [first, curve(tmp_path, 4.0, 2.02)])
    assert "1 steps: losses agree" in ranks.curves(0.02, 1, [first, curve(tmp_path, 4.0, 2.2)])
    for others in ((4.0, 2.2), (4.0, float("nan")), (4.0,)):
        with pytest.raises(AssertionError):
            ranks.curves(0.02, 2, [first, curve(tmp_path, *others)])


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
    assert "1.00 of 100" in ranks.predictions(first, prediction(tmp_path / "b", 51, 1.05))
    for name, plddt, stretch in (("c", 53, 1), ("d", 50, 1.5), ("e", float("nan"), 1)):
        with pytest.raises(AssertionError):
            ranks.predictions(first, prediction(tmp_path / name, plddt, stretch))


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that passes over a wrong operator, or ends at the first one."""
    assert "chunked: attention" in ranks.kernels(torch.device("cpu"))
    right = chunked.layer_norm, chunked.transition

    def wrong(function: Any) -> Any:
        return lambda *arguments, **keywords: 1.1 * function(*arguments, **keywords)

    monkeypatch.setattr(chunked, "layer_norm", wrong(right[0]))
    monkeypatch.setattr(chunked, "transition", wrong(right[1]))
    with pytest.raises(AssertionError) as raised:
        ranks.kernels(torch.device("cpu"))
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == [
        f"chunked, {operator}, {dtype}"
        for operator in ("layer_norm", "transition")
        for dtype in ("float32", "bfloat16")
    ]


def test_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check of half precision that compares a result with itself."""
    right = ranks.choose

    def rounding(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
        kernels, choices = right(config, device, dtype)
        if config.backend == "auto":
            transition = kernels.transition
            kernels = kernels.replaced(transition=lambda *x, **y: 1.2 * transition(*x, **y))
        return kernels, choices

    monkeypatch.setattr(ranks, "choose", rounding)
    with pytest.raises(AssertionError, match="Evoformer block 11 x 13, errors"):
        ranks.half(torch.device("cpu"))

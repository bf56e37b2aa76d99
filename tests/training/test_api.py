"""`evodsp.fit`: training from Python."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import evodsp
from evodsp.errors import UserError
from evodsp.launch.environment import STOPPED
from evodsp.report.runs import read_curve
from evodsp.training.run_folder import RunFolder


def test_fit_trains_and_resumes(chains: Path, tmp_path: Path) -> None:
    """Catches options that are lost on their way, scores that are not the last ones, and a thread's run that fails for its
    signals, which only a main thread may handle."""
    quiet: dict[str, Any] = {"trainer": {"enable_progress_bar": False, "check_val_every_n_epoch": 1}}
    first = evodsp.fit(chains / "tiny.yaml", tmp_path / "run", max_steps=1, data={"samples_per_epoch": 2}, **quiet)
    assert (first.folder, first.stopped) == (tmp_path / "run", False)
    assert (first.last, first.best) == tuple(first.folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    with ThreadPoolExecutor(1) as thread:
        words: dict[str, Any] = {"max_steps": 3, "resume": True, "data": {"samples_per_epoch": 2}, **quiet}
        run = thread.submit(evodsp.fit, chains / "tiny.yaml", str(tmp_path / "run"), **words).result()
    rows = read_curve(run.folder / "curve.csv")
    assert list(rows) == [0, 1, 2]
    assert run.scores["lddt_ca"] == float(rows[2]["val/lddt_ca"])
    assert {"lddt_ca", "rmsd", "tm_score"} <= set(run.scores)
    assert not any("/" in name for name in run.scores)
    with pytest.raises(UserError, match="belongs to an earlier run"):
        evodsp.fit(chains / "tiny.yaml", tmp_path / "run")


def test_options_become_those_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a value that YAML reads otherwise, None that is left out of a group, and an option of another name."""
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "evodsp.training.api.trained", lambda _, words: (seen.append(words), (0, RunFolder(tmp_path)))[1]
    )
    evodsp.fit(
        ["configs/quickstart.yaml", Path("configs/family.yaml")],
        tmp_path,
        max_steps=3,
        resume="best",
        overwrite=True,
        seed=0,
        model={"evoformer": {"blocks": 2}, "ema_decay": None, "freeze": ["evoformer"], "optimizer.lr": 1e-5},
        data={"train_chains": Path("a.txt")},
        trainer={"logger": {"class_path": "a.B"}},
        max_samples=None,
        kernels={"backend": "chunked"},
        **{"data.batch_size": 2},
    )
    assert seen == [[
        "--config", "configs/quickstart.yaml", "--config", "configs/family.yaml", f"--output={tmp_path}", "--ckpt_path=best",
        "--overwrite=true", "--seed=0", "--trainer.max_steps=3", "--model.evoformer.blocks=2", "--model.ema_decay=null",
        '--model.freeze=["evoformer"]', "--model.optimizer.lr=1e-05", "--data.train_chains=a.txt",
        '--trainer.logger={"class_path": "a.B"}', "--max_samples=null", "--kernels.backend=chunked", "--data.batch_size=2",
    ]]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_step": 3}, "evodsp.fit: no option 'max_step'. Did you mean 'max_steps'? See help(evodsp.fit)"),
        ({"batch_size": 3}, "no option 'batch_size'. Did you mean 'data.batch_size'?"),
        ({"data": {"batchsize": 1}}, "unknown argument '--data.batchsize'. Did you mean '--data.batch_size'?"),
        ({"kernels": 3}, "--kernels: expected a group of options"),
        ({"trainer": {"max_steps": "x"}}, "--trainer.max_steps: expected int, found 'x'"),
        ({"model": {"optimizer": {"lr": 0.0}}}, "model.optimizer.lr is 0.0, but must be above 0"),
        ({"config": "quickstrat"}, "not one of the configs that come with evodsp"),
        ({"config": ()}, "nothing to train; give a config, such as 'quickstart'"),
        ({"resume": True, "ckpt_path": "last"}, "--ckpt_path is given more than once"),
    ],
)
def test_a_mistake_is_one_line(options: dict[str, Any], said: str) -> None:
    """Catches the end of the program (SystemExit), and Python's TypeError, which names no other option."""
    with pytest.raises(UserError) as caught:
        evodsp.fit(**{"config": "quickstart", **options})
    assert said in str(caught.value)


@pytest.mark.verify_but("2-*")
@pytest.mark.parametrize(("code", "error"), [(2, UserError), (1, RuntimeError), (130, KeyboardInterrupt)])
def test_ranks_that_fail(
    code: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a run of several ranks that failed and returns as if it had trained."""
    monkeypatch.setattr("evodsp.training.command.launch", lambda ranks, words: code)
    with pytest.raises(error):
        evodsp.fit("quickstart", tmp_path / "run", parallel={"sequence": 2})
    monkeypatch.setattr("evodsp.training.command.launch", lambda ranks, words: STOPPED)
    assert evodsp.fit("quickstart", tmp_path / "run", parallel={"sequence": 2}) == evodsp.training.api.TrainedRun(
        tmp_path / "run", None, None, {}, True
    )


def test_ranks_of_another_thread(tmp_path: Path) -> None:
    """Catches Python's ValueError about signals."""
    with ThreadPoolExecutor(1) as thread, pytest.raises(UserError, match="use the command"):
        thread.submit(evodsp.fit, "quickstart", tmp_path / "run", parallel={"sequence": 2}).result()


@pytest.mark.verify
def test_two_ranks(chains: Path, tmp_path: Path) -> None:
    """Catches ranks that Python cannot start, or whose files are not found."""
    run = evodsp.fit(chains / "tiny.yaml", tmp_path / "run", max_steps=1, parallel={"sequence": 2})
    assert run.last is not None
    assert read_curve(run.folder / "curve.csv").keys() == {0}

"""`evodsp predict` on one process or several: which of them this is, and who starts the others."""

from __future__ import annotations

from evodsp.errors import UserError
from evodsp.inference.config import PredictConfig
from evodsp.inference.predict import device_of, predict
from evodsp.launch.launcher import launch
from evodsp.launch.process_group import collective_timeout, guarded, place, start, stop, under_launcher
from evodsp.parallel.mesh import init_mesh


def run(config: PredictConfig, words: list[str]) -> int:
    """Predict; the exit code. `words`: the command line that `config` is of, for ranks that are to be started."""
    if not under_launcher():
        if config.parallel.sequence > 1:
            return launch(config.parallel.sequence, words)
        predict(config)
        return 0
    here = place()
    if here.ranks != config.parallel.sequence:
        raise UserError(
            f"{here.ranks} ranks were started, but --parallel.sequence is {config.parallel.sequence}; "
            "predict works on one structure at a time, so give the same number to both"
        )
    with guarded():
        start("gloo" if device_of(config.device).type == "cpu" else "nccl", config.parallel.timeout)
        mesh = init_mesh(config.parallel.sequence, timeout=collective_timeout(config.parallel.timeout))
        predict(config, print if here.rank == 0 else _silent, mesh.sequence_group())
        stop()
    return 0


def _silent(line: str) -> None:
    """Rank 0 reports."""

"""A first training run and prediction of a process: they take seconds longer than the next ones.

What functions make when they are called first, such as parsers and the checks of their signatures, is then there in the forks
of the process.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import evodsp
from evodsp.cli import main
from tests.builders.kept_parsers import kept_parsers
from tests.builders.training_chains import write_chains


def run_first() -> None:
    """Train for a step and predict."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()) as said, kept_parsers():
        words = ["fit", f"--config={write_chains(Path(name))}/tiny.yaml", f"--output={name}/run"]
        with contextlib.redirect_stdout(io.StringIO()):
            code = main([*words, "--trainer.max_steps=1", "--trainer.logger=false"])
    assert code == 0, said.getvalue()
    model = evodsp.AlphaFold(evodsp.ModelConfig.preset("test"))
    evodsp.predict("MKTAYIAK", None, model, report=lambda _: None, device="cpu", recycles=0)

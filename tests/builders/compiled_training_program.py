"""Trains twice, once with compiled blocks. In a process of its own, because torch cannot trace the checks of shapes.

The graphs run without a C++ compiler.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.debugging import aot_eager

from evodsp.cli import main
from evodsp.report.runs import read_curve
from evodsp.training import command, execution
from evodsp.training.execution import CompiledBlocks
from tests.builders.kept_parsers import kept_parsers


def run(chains: Path, output: Path, *options: str) -> dict[str, Any]:
    """The losses of a run, and the names in its checkpoint."""
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(output), *options]
    assert main([*words, "--trainer.enable_progress_bar", "false"]) == 0
    curve = read_curve(output / "curve.csv")
    checkpoint = torch.load(output / "checkpoints" / "last.ckpt", weights_only=True)
    return {
        "loss": [float(step["train/loss"]) for step in curve.values() if "train/loss" in step],
        "names": sorted(checkpoint["state_dict"]),
    }


def both(
    chains: Path, folder: Path, options: tuple[str, ...], quick: bool
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """What `run` finds uncompiled and compiled, and the number of graphs of the compiled run. `quick`: graphs run as they are
    traced, and small blocks are not compared at the start."""
    graphs = [0]

    def unasked(*_: Any) -> str:
        return ""

    def counted(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs[0] += 1
        return graph.forward if quick else aot_eager(graph, examples)

    with kept_parsers():
        with (
            mock.patch.object(command, "CompiledBlocks", functools.partial(CompiledBlocks, backend=counted)),
            mock.patch.object(execution, "problem_of_compiling", unasked if quick else execution.problem_of_compiling),
        ):
            compiled = run(chains, folder / "compiled", "--compile", "blocks", *options)
        return run(chains, folder / "plain", *options), compiled, graphs[0]

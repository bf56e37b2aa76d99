"""Trains twice, once with compiled blocks, and prints the losses of both and the number of graphs. Run by test_compilation.

In an interpreter of its own, because torch cannot trace the checks of shapes. The graphs run without a C++ compiler.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.debugging import aot_eager

from evodsp.cli import main
from evodsp.report.curve import read_curve
from evodsp.training import command
from evodsp.training.execution import CompiledBlocks


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


if __name__ == "__main__":
    chains, folder, *options = sys.argv[1:]
    torch.set_num_threads(1)
    graphs = [0]

    def counted(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs[0] += 1
        return aot_eager(graph, examples)

    with mock.patch.object(command, "CompiledBlocks", functools.partial(CompiledBlocks, backend=counted)):
        compiled = run(Path(chains), Path(folder) / "compiled", "--compile", "blocks", *options)
    plain = run(Path(chains), Path(folder) / "plain", *options)
    print("RESULT", json.dumps({"plain": plain, "compiled": compiled, "graphs": graphs[0]}))

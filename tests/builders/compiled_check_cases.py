"""Compiles small blocks with right and wrong backends. In a process of its own, because torch cannot trace checks of shapes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.training.execution import CompiledBlocks


def right(graph: torch.fx.GraphModule, examples: Any) -> Any:
    return graph.forward


def wrong_result(graph: torch.fx.GraphModule, examples: Any) -> Any:
    return lambda *arguments: [1.1 * x for x in graph(*arguments)]


def wrong_gradient(graph: torch.fx.GraphModule, examples: Any) -> Any:
    """Results are right, and so are their shapes."""

    def half(x: Tensor) -> Tensor:
        return x.detach() + 0.5 * (x - x.detach())

    return lambda *arguments: [half(x) for x in graph(*arguments)]


def broken(graph: torch.fx.GraphModule, examples: Any) -> Any:
    raise OSError("no code\nfor you")


class _Module(nn.Module):
    """What the callback needs of a TrainingModule."""

    device, world = torch.device("cpu"), SimpleNamespace(group=None)

    def __init__(self) -> None:
        super().__init__()
        self.model = AlphaFold(ModelConfig.preset("test"))


def refusal(backend: str, half: bool) -> str:
    """What the callback says with one of these backends; '' if it compiles the blocks. `half`: with autocast to bf16.

    Raises AssertionError if random numbers of the run are used up.
    """
    torch.set_num_threads(1)
    module: Any = _Module()
    plugin = SimpleNamespace(forward_context=lambda: torch.autocast("cpu", torch.bfloat16) if half else nullcontext())
    state = torch.get_rng_state()
    callback = CompiledBlocks(backend=globals()[backend])
    try:
        callback.on_fit_start(SimpleNamespace(precision_plugin=plugin), module)
    except UserError as error:
        return str(error)
    finally:
        assert torch.equal(torch.get_rng_state(), state)
    return ""

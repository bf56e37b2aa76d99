"""Records stacks of blocks as CUDA graphs and replays them, without launches by the host.

A block launches 85 kernels forward and 149 backward, each of which costs the host more time than the GPU takes for small
inputs. `use_graphs(model, Graphs(CudaRecorder()))` has the stacks of a model recorded: Evoformer, extra-MSA and template
stack. The first call of a stack with inputs of some shape runs as usual. The second call is recorded, with its backward
pass if gradients are needed, and later calls are replayed. Operators between the stacks are launched as before.

What a recording reads is at fixed addresses:

    inputs                    are copied to tensors of the recording; keys of dropout are inputs, so each replay draws anew
    parameters                are read where they are; copies in half precision stay in one buffer (`evodsp.model.casts`)
    activations               are in memory of the recording, which nothing else uses until the backward pass has been replayed
    results, gradients        are copied from there, so that the next replay does not change them

A call runs as usual if its recording waits for a backward pass, if there are `most` recordings already, or if `enabled` is
false. A call that cannot be recorded raises UserError, because a run without the requested graphs would be silently slow.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evodsp.errors import UserError
from evodsp.model.matmul import is_tf32
from evodsp.model.primitives import Computed, ShardedModule
from evodsp.model.recorders import Recorder
from evodsp.model.recordings import CallArguments, Forward, Place, Recording, WithGradient, addresses_of
from evodsp.parallel.dtensor import is_dtensor


class Graphs:
    """The recordings of a model's stacks."""

    def __init__(self, recorder: Recorder, most: int = 16, calls_before: int = 1, warm_ups: int = 2) -> None:
        """`most`: largest number of recordings, over all stacks. `calls_before`: number of calls with inputs of a shape
        that run as usual before one is recorded, so that a shape that occurs once costs nothing. `warm_ups`: number of runs
        before each recording.
        """
        self.recorder, self.most, self.calls_before, self.warm_ups = recorder, most, calls_before, warm_ups
        self.enabled = True
        """Whether calls are recorded and replayed. If False, every call runs as usual."""
        self._recordings: dict[Hashable, Recording] = {}
        self._seen: Counter[Hashable] = Counter()
        self._places: dict[nn.Module, list[Place]] = {}
        self._pool: Any = None
        self.replays = 0
        """Number of calls that were replayed."""

    def __len__(self) -> int:
        return len(self._recordings)

    def __deepcopy__(self, memo: object) -> Graphs:
        """A copy without recordings, because these would read the parameters of the original model."""
        return Graphs(self.recorder, self.most, self.calls_before, self.warm_ups)

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphs, (self.recorder, self.most, self.calls_before, self.warm_ups)

    def call(self, stack: Recorded, run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The result of `run(*arguments)`, the usual call of `stack`, by a replay if possible."""
        settings = stack.settings()
        inputs = CallArguments.of(arguments)
        if not self.enabled or settings is None or inputs is None or inputs.device != self.recorder.device:
            return run(*arguments)
        key = (stack, settings, inputs.kind, _modes(inputs.device))
        parameters = [getattr(*place) for place in self._places_of(stack)]
        recording = self._recordings.get(key)
        if recording is not None and recording.addresses != addresses_of(parameters):
            del self._recordings[key]  # the model was moved; the memory is freed before another recording
            recording = None
        if recording is None:
            self._seen[key] += 1
            if self._seen[key] <= self.calls_before or not self._has_room():
                return run(*arguments)
            recording = self._recorded(stack, run, inputs, parameters)
            self._recordings[key] = recording
        if recording.waits:
            return run(*arguments)
        self.replays += 1
        return recording(inputs.tensors, parameters)

    def _has_room(self) -> bool:
        if len(self._recordings) == self.most:
            warnings.warn(
                f"inputs have more than {self.most} shapes; further shapes run without CUDA graphs", stacklevel=2
            )
        return len(self._recordings) < self.most

    def _places_of(self, stack: nn.Module) -> list[Place]:
        """The places of the parameters of `stack`, which are listed once."""
        if stack not in self._places:
            self._places[stack] = [
                (module, name)
                for module in stack.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
        return self._places[stack]

    def _recorded(
        self, stack: nn.Module, run: Callable[..., Any], inputs: CallArguments, parameters: Sequence[Tensor]
    ) -> Recording:
        try:
            if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs.tensors, *parameters)):
                return WithGradient(self.recorder, self.warm_ups, run, inputs, self._places_of(stack), parameters)
            if self._pool is None:  # results of passes without gradients are copies, so recordings may share memory
                self._pool = self.recorder.pool()
            return Forward(self.recorder, self.warm_ups, run, inputs, parameters, self._pool)
        except Exception as error:
            first = error.__context__ or error  # the end of a recording reports the failure without its reason
            line = (str(first).strip().splitlines() or [""])[0]
            raise UserError(
                f"{type(stack).__name__} cannot be recorded as a CUDA graph: {type(first).__name__}: {line}; switch CUDA "
                "graphs off (cuda_graphs)"
            ) from error


class Recorded(Computed):
    """A module whose calls may be replayed. Its inputs are tensors and dropout keys, by position; its results are tensors."""

    graphs: Graphs | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.graphs is None or named:
            return super().__call__(*arguments, **named)
        return self.graphs.call(self, super().__call__, arguments)

    def settings(self) -> Hashable | None:
        """The settings, besides inputs and torch's modes, that determine a call. None while calls must not be recorded yet."""
        return self.training, self.kernels


def use_graphs(model: nn.Module, graphs: Graphs | None) -> None:
    """Record and replay calls of the stacks of `model`. `graphs`: None stops this.

    Raises UserError if samples or parameters are sharded, because collectives are not recorded.
    """
    if graphs is not None:
        if any(isinstance(module, ShardedModule) and module.exchange.ranks > 1 for module in model.modules()):
            raise UserError("CUDA graphs hold no collectives, but samples are sharded; set parallel.sequence to 1")
        if any(is_dtensor(parameter) for parameter in model.parameters()):
            raise UserError(
                "CUDA graphs hold no collectives, but parameters are sharded; set parallel.parameters to zero1"
            )
    for module in model.modules():
        if isinstance(module, Recorded):
            module.graphs = graphs


def _modes(device: str) -> Hashable:
    """The torch modes that determine the launches of a call."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        is_tf32(),
    )

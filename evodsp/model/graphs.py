"""Records stacks of blocks as CUDA graphs and replays them, without launches by the host.

A block launches 85 kernels forward and 149 backward, each of which costs the host more time than the GPU takes for small
inputs. `use_graphs(model, Graphs(CudaRecorder()))` has the stacks of a model recorded: Evoformer, extra-MSA and template
stack, the structure module, and the losses of a training step. A prediction records whole passes of a model instead. The
first call of a stack with inputs of some shape runs as usual. The second call is recorded, with its backward pass if
gradients are needed, and later calls are replayed. Operators between the stacks are launched as before.

What a recording reads is at fixed addresses:

    inputs                    are copied to tensors of the recording; keys of dropout are inputs, so each replay draws anew
    parameters                are read where they are; copies in half precision stay in one buffer (`evodsp.model.precision`)
    activations               are in memory of the recording, which nothing else uses until the backward pass has been replayed
    results, gradients        are copied from there, so that the next replay does not change them

A call runs as usual if its recording waits for a backward pass, if there are `most` recordings already, or if `enabled` is
false. With `renews` the recording that was used longest ago is freed for a new one instead. The first replay is compared
with launched runs. If it differs on any rank, all ranks of the sample go on without graphs, and `given_up` says why. So they
do if a call cannot be recorded, or UserError is raised if graphs are `required`, because a run without the requested graphs
would be silently slow.

A sharded stack's recording holds its collectives. All ranks of a sample record and replay the same calls in the same order,
because what decides is the same on all of them: the order of calls, the settings, torch's modes, and the sizes of masks,
which are whole on every rank. They tell each other so (`agree`) when a call is seen for the first time, and again what has
become of a recording; between the two nothing is exchanged but what the stack itself sends.

Samples whose sizes are rounded up to the same ones share a recording. Padding changes positions only by rounding: in fp32 on
a CPU by less than 1e-6 of the largest coordinate.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evodsp.errors import UserError
from evodsp.model.precision import is_tf32
from evodsp.model.primitives import ShardedModule
from evodsp.model.recordings import (
    CallArguments,
    Forward,
    NotRecorded,
    ParameterPlace,
    Recorder,
    Recording,
    WithGradient,
    addresses_of,
)
from evodsp.parallel.dtensor import is_dtensor

Agree = Callable[[str], Sequence[str]]
"""From the text of one rank to the texts of all ranks of its sample, in their order. They call it together."""


def _alone(text: str) -> Sequence[str]:
    return (text,)


class Graphs:
    """The recordings of a model's stacks."""

    def __init__(
        self,
        recorder: Recorder,
        most: int = 16,
        calls_before: int = 1,
        warm_ups: int = 2,
        agree: Agree = _alone,
        required: bool = True,
        renews: bool = False,
    ) -> None:
        """`most`: largest number of recordings, over all stacks. `calls_before`: number of calls with inputs of a shape
        that run as usual before one is recorded, so that a shape that occurs once costs nothing. `warm_ups`: number of runs
        before each recording. `agree`: gives a rank the texts of all ranks of its sample. `required`: whether a call that
        cannot be recorded is an error. `renews`: whether a further shape takes the place of another one.
        """
        self.recorder, self.most, self.calls_before, self.warm_ups = recorder, most, calls_before, warm_ups
        self.agree, self.required, self.renews = agree, required, renews
        self.enabled = True
        """Whether calls are recorded and replayed. If False, every call runs as usual."""
        self.given_up = ""
        """Reason why all calls run as usual, in words; '' as long as graphs work."""
        self._recordings: dict[Hashable, Recording] = {}
        """By call; the one that was used last is the last."""
        self._seen: Counter[Hashable] = Counter()
        self._places: dict[nn.Module, list[ParameterPlace]] = {}
        self._pool: Any = None
        self.replays = 0
        """Number of calls that were replayed."""

    def __len__(self) -> int:
        return len(self._recordings)

    def __deepcopy__(self, memo: object) -> Graphs:
        """A copy without recordings, because these would read the parameters of the original model."""
        return Graphs(
            self.recorder, self.most, self.calls_before, self.warm_ups, self.agree, self.required, self.renews
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has other ranks."""
        return Graphs, (self.recorder, self.most, self.calls_before, self.warm_ups)

    def call(self, stack: Recordable, run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The result of `run(*arguments)`, the usual call of `stack`, by a replay if possible."""
        settings = stack.settings()
        inputs = CallArguments.of(arguments)
        if not self.enabled or self.given_up or settings is None or inputs is None:
            return run(*arguments)
        if inputs.device != self.recorder.device:
            return run(*arguments)
        key = (stack, settings, inputs.kind, _modes(inputs.device))
        parameters = [getattr(module, name) for module, name, _ in self._places_of(stack)]
        recording = self._recordings.get(key)
        if recording is not None and recording.addresses != addresses_of(parameters):
            self._drop(self._recordings.pop(key))  # the model was moved; the memory is freed before another recording
            recording = None
        if recording is None:
            self._seen[key] += 1
            if self._seen[key] == 1:
                self._check_alike(stack, inputs, _modes(inputs.device))
            if self._seen[key] <= self.calls_before or not self._has_room():
                return run(*arguments)
            recording = self._recorded(stack, run, inputs, parameters)
            if recording is None:
                return run(*arguments)
            self._recordings[key] = recording
        if recording.waits:
            return run(*arguments)
        self._recordings[key] = self._recordings.pop(key)
        self.replays += 1
        return recording(inputs.tensors, parameters)

    def _has_room(self) -> bool:
        if len(self._recordings) == self.most and self.renews:
            self._drop(self._recordings.pop(next(iter(self._recordings))))
        if len(self._recordings) == self.most:
            warnings.warn(
                f"inputs have more than {self.most} shapes; further shapes run without CUDA graphs", stacklevel=2
            )
        return len(self._recordings) < self.most

    def free(self) -> None:
        """Give the memory of all recordings back; later calls are recorded anew.

        It must be called before a process group is left: NCCL ends no communicator whose collectives a graph holds.
        """
        for recording in self._recordings.values():
            recording.free()
        self._recordings.clear()
        self._seen.clear()
        self._pool = None

    def _drop(self, recording: Recording) -> None:
        """Free a recording that is not used again. One that waits for its backward pass is freed with autograd's graph."""
        if not recording.waits:
            recording.free()
        if not self._recordings:
            self._pool = None  # the last recording takes its memory along

    def _places_of(self, stack: nn.Module) -> list[ParameterPlace]:
        """The places of the parameters of `stack`, which are listed once."""
        if stack not in self._places:
            self._places[stack] = [
                ParameterPlace(module, name, f"{prefix}.{name}".lstrip("."))
                for prefix, module in stack.named_modules()
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
        return self._places[stack]

    def _check_alike(self, stack: Recordable, inputs: CallArguments, modes: Hashable) -> None:
        """Raise UserError on all ranks of the sample if they call different stacks, or with inputs of different sizes."""
        number = list(self._places).index(stack)
        sizes = [list(x.shape) for place, x in enumerate(inputs.tensors) if place not in stack.sharded_inputs]
        kinds = [(x.dtype, x.requires_grad and torch.is_grad_enabled()) for x in inputs.tensors]
        call = f"{type(stack).__name__} {number + 1}, training {stack.training}, sizes {sizes}, {kinds}, {modes}"
        calls = self.agree(call)
        if other := next((rank for rank, text in enumerate(calls) if text != calls[0]), None):
            raise UserError(
                f"the ranks of a sample make different calls: rank 0 of them {calls[0]}, rank {other} {calls[other]}; "
                "start all of them with the same settings and inputs"
            )

    def _recorded(
        self, stack: Recordable, run: Callable[..., Any], inputs: CallArguments, parameters: Sequence[Tensor]
    ) -> Recording | None:
        """A recording that all ranks of the sample have made, and whose replay is right on all of them; otherwise None."""
        name, recording = type(stack).__name__, None
        failure: BaseException | None = None
        try:
            recording = self._made(stack, run, inputs, parameters)
        except NotRecorded as error:
            failure = error.__cause__
        except Exception as error:
            if stack.exchange.ranks > 1:  # the other ranks wait for this one in the launched run
                raise
            failure = error
        if why := _first(self.agree(_reason(failure))):
            why = f"{name} cannot be recorded as a CUDA graph: {why}"
            if self.required:
                raise UserError(f"{why}; switch CUDA graphs off (cuda_graphs)") from failure
        elif recording is not None and (why := _first(self.agree(recording.difference()))):
            why = f"a replay of {name} is not what was launched: {why}"
        if not why:
            return recording
        for one in (*self._recordings.values(), *([] if recording is None else [recording])):
            self._drop(one)
        self._recordings.clear()
        self._pool, self.given_up = None, why
        while failure is not None:  # the call that follows may need the memory of what failed
            traceback.clear_frames(failure.__traceback__)
            failure = failure.__context__
        return None

    def _made(
        self, stack: Recordable, run: Callable[..., Any], inputs: CallArguments, parameters: Sequence[Tensor]
    ) -> Recording:
        recorder, exchange, warm_ups = self.recorder, stack.exchange, self.warm_ups
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs.tensors, *parameters)):
            return WithGradient(recorder, exchange, warm_ups, run, inputs, self._places_of(stack), parameters)
        if self._pool is None:  # results of passes without gradients are copies, so recordings may share memory
            self._pool = recorder.pool()
        return Forward(recorder, exchange, warm_ups, run, inputs, parameters, self._pool)


class Recordable(ShardedModule):
    """A module that has calls replayed by its `graphs`. Inputs of such a call are tensors and dropout keys, by position; its
    result is a tree of tensors.
    """

    graphs: Graphs | None = None
    sharded_inputs: tuple[int, ...] = ()
    """Positions of the inputs of which each rank has a shard. The others are the same on all ranks of a sample."""

    def settings(self) -> Hashable | None:
        """The settings, besides inputs and torch's modes, that determine a call. None while calls must not be recorded yet."""
        return self.training, self.kernels


class Recorded(Recordable):
    """A module that may be replayed as a whole."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.graphs is None or named:
            return super().__call__(*arguments, **named)
        return self.graphs.call(self, super().__call__, arguments)


def use_graphs(model: nn.Module, graphs: Graphs | None) -> None:
    """Record and replay calls of the stacks of `model`. `graphs`: None stops this.

    Raises UserError if what communicates cannot be recorded, or parameters are sharded, which gathers them inside of a stack.
    """
    if graphs is not None:
        backends = {module.exchange.backend for module in model.modules() if isinstance(module, ShardedModule)}
        if other := next((name for name in sorted(backends) if name and not graphs.recorder.holds(name)), ""):
            raise UserError(
                f"CUDA graphs hold collectives of NCCL, but samples are sharded over ranks that communicate by {other}; set "
                "parallel.sequence to 1"
            )
        if any(is_dtensor(parameter) for parameter in model.parameters()):
            raise UserError(
                "CUDA graphs read parameters where they are, but fsdp2 shards them; set parallel.parameters to zero1"
            )
    for module in model.modules():
        if isinstance(module, Recorded):
            module.graphs = graphs


def records_collectives(model: nn.Module) -> bool:
    """Whether stacks of `model` are recorded with collectives in them."""
    stacks = (module for module in model.modules() if isinstance(module, Recorded))
    return any(stack.graphs is not None and stack.exchange.ranks > 1 for stack in stacks)


def _reason(error: BaseException | None) -> str:
    if error is None:
        return ""
    first = error.__context__ or error  # the end of a recording reports the failure without its reason
    return f"{type(first).__name__}: {(str(first).strip().splitlines() or [''])[0]}"


def _first(texts: Sequence[str]) -> str:
    """The first rank's text that is not empty, with the rank's number if there are several; '' if all are empty."""
    rank = next((rank for rank, text in enumerate(texts) if text), None)
    if rank is None:
        return ""
    return texts[rank] if len(texts) == 1 else f"{texts[rank]} (rank {rank} of the sample)"


def _modes(device: str) -> Hashable:
    """The torch modes that determine the launches of a call."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        is_tf32(),
    )


_LONGEST = 500
"""A sample with fewer residues is padded and its passes are recorded. A longer one keeps the GPU busier than the host."""
_FEWEST_PASSES = 3
"""Passes that are worth a recording, which costs the host about as much time as two passes."""
_STEPS = 8


def worth_recording(residues: int, passes: int, ranks: int) -> bool:
    """Whether the passes of a prediction are recorded on a GPU."""
    return ranks == 1 and residues < _LONGEST and passes >= _FEWEST_PASSES


def rounded_up(number: int) -> int:
    """The next multiple of an eighth of the next power of two, by which a number grows by less than a quarter."""
    step = max(1, (1 << (number - 1).bit_length()) // _STEPS)
    return -(-number // step) * step

"""Recorded and replayed stacks (`evodsp.model.graphs`), with a recorder that computes again in the place of CUDA graphs.

It reads what a graph would read, at the same addresses, and fills the same tensors; scripts/benchmarks/gpu_graphs.py makes the
same comparison on a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.graphs import Graphs, use_graphs
from evodsp.model.precision import CastParameters
from evodsp.model.recomputation import Recomputed
from evodsp.model.recordings import Rerun, Taken
from evodsp.model.templates import TemplatePairStack
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from tests.builders.small_model import (
    chains,
    config,
    features,
    features_of_chains,
    halved,
    in_float32,
    small_stack,
    tensors,
)

Stack = EvoformerStack | TemplatePairStack


def recorded(model: nn.Module, **options: Any) -> Graphs:
    """Switches recording on, after one usual call of each kind."""
    graphs = Graphs(Rerun(), **options)
    use_graphs(model, graphs)
    return graphs


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


class Run:
    """Steps of a stack under bf16 autocast with casts, dropout and an optimizer."""

    def __init__(self, stack: Stack, inputs: tuple[Tensor, ...], representations: int, half: bool = True) -> None:
        self.stack, self.half = stack, half
        dtype = torch.bfloat16 if half else torch.float32
        self.leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs[:representations]]
        self.masks = inputs[representations:]
        self.casts = CastParameters(stack)
        self.optimizer = torch.optim.SGD(stack.parameters(), lr=1e-3)
        self.number = 0

    def keys(self) -> DropoutKeys:
        batch = len(self.leaves[0])
        return DropoutKeys.of(self.stack.dropout_streams([Draws.root(self.number).at(n) for n in range(batch)]))

    def forward(self, leaves: list[Tensor] | None = None) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half, cache_enabled=False):
            results = self.stack(*(leaves or self.leaves), *self.masks, self.keys())
        return [results] if isinstance(results, Tensor) else list(results)

    def step(self) -> list[Tensor]:
        """Results and gradients of all inputs and parameters; then a step of the optimizer, and new numbers for the next."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half, cache_enabled=False):
            self.casts.make()
        results = self.forward()
        wanted = [*self.leaves, *self.stack.parameters()]
        gradients = torch.autograd.grad(results, wanted, [x.detach().cos() for x in results])
        self.casts.drop()
        for parameter, gradient in zip(wanted[len(self.leaves) :], gradients[len(self.leaves) :], strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()
        with torch.no_grad():
            for leaf in self.leaves:
                leaf.mul_(0.9)
        self.number += 1
        return [x.detach().clone() for x in (*results, *gradients)]


def stack_of(kind: str, recompute: bool = False) -> tuple[Stack, tuple[Tensor, ...], int]:
    """A stack of two blocks, its inputs, and how many of them are representations."""
    preset = ModelConfig.preset("test")
    if kind == "templates":
        settings = dataclasses.replace(preset.templates, blocks=2, pair_dropout=0.25, checkpoint=recompute)
        stack: Stack = TemplatePairStack(settings)
        torch.manual_seed(0)
        inputs: tuple[Tensor, ...] = (torch.randn(2, 6, 6, settings.channels), torch.ones(2, 6, 6))
    else:
        _, inputs = small_stack(2)
        settings_ = dataclasses.replace(
            preset.extra_msa if kind == "extra" else preset.evoformer,
            blocks=2, msa_dropout=0.25, pair_dropout=0.25, checkpoint=recompute,
        )  # fmt: skip
        c_m = preset.channels.extra_msa if kind == "extra" else preset.channels.msa
        stack = EvoformerStack(c_m, preset.channels.pair, settings_, extra=kind == "extra")
        inputs = (torch.randn(2, 5, 7, c_m), *inputs[1:])
    torch.manual_seed(0)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stack, inputs, 1 if kind == "templates" else 2


@pytest.mark.verify_but("True-recomputed2-templates", "True-recomputed2-extra", "True-recomputed3-evoformer")
@pytest.mark.parametrize("kind", ["evoformer", "extra", "templates"])
@pytest.mark.parametrize(
    ("half", "recomputed"),
    [
        (False, Recomputed(0)),
        (False, Recomputed(2)),
        (True, Recomputed(0)),
        (True, Recomputed(2)),
        (True, Recomputed(0, 2)),
    ],
)
def test_a_replay_is_the_step(kind: str, recomputed: Recomputed, half: bool) -> None:
    """Catches old weights, keys or inputs in a replay, a gradient that goes to another parameter, and autocast in the recorded
    backward pass, which has none; of projections that are computed again, old weights."""
    stack, inputs, representations = stack_of(kind)
    stack.recompute(recomputed)
    usual, replayed = (Run(copy.deepcopy(stack), inputs, representations, half) for _ in range(2))
    graphs = recorded(replayed.stack)
    for number in range(3):
        expected, found = usual.step(), replayed.step()
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True)), number
    assert (len(graphs), graphs.replays) == (1, 2)


def test_results_and_gradients_outlive_the_next_replay() -> None:
    """Catches results that a replay overwrites while the caller holds them, such as the recycled pair representation, and
    gradients that a parameter keeps, so that accumulated batches would each count as the last one."""
    run = Run(*stack_of("evoformer"), half=False)
    recorded(run.stack, calls_before=0)
    run.stack(*run.leaves, *run.masks, run.keys())[1].square().sum().backward()
    first = [grad_of(p).clone() for p in run.stack.parameters()]
    held = run.forward()
    before = [x.detach().clone() for x in held]
    held[1].sum().backward()
    run.number = 1
    with torch.no_grad():
        passes = run.forward()
        kept = [x.clone() for x in passes]
        run.number = 2
        run.forward()
    run.forward()
    assert all(torch.equal(*pair) for pair in zip(held, before, strict=True))
    assert all(torch.equal(*pair) for pair in zip(passes, kept, strict=True))

    alone = copy.deepcopy(run.stack)
    use_graphs(alone, None)
    alone.zero_grad()
    run.number = 0
    alone(*run.leaves, *run.masks, run.keys())[1].sum().backward()
    for parameter, one, other in zip(run.stack.parameters(), first, alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, one + grad_of(other))


def test_a_second_call_before_the_backward_pass_runs_as_usual() -> None:
    """Catches activations of one call that another one overwrites before its backward pass has read them."""
    run = Run(*stack_of("evoformer"), half=False)
    graphs = recorded(run.stack, calls_before=0)
    others = [x.detach().flip(0).clone().requires_grad_() for x in run.leaves]
    first, second = run.forward(), run.forward(others)
    assert graphs.replays == 1
    found = [torch.autograd.grad(x, y, [v.detach() for v in x]) for x, y in ((second, others), (first, run.leaves))]
    use_graphs(run.stack, None)
    for gradients, leaves in zip(found, (others, run.leaves), strict=True):
        results = run.forward(leaves)
        expected = torch.autograd.grad(results, leaves, [v.detach() for v in results])
        assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))

    use_graphs(run.stack, graphs)
    held = run.forward()
    torch.autograd.grad(held, run.leaves, [v.detach() for v in held], retain_graph=True)
    run.forward()
    with pytest.raises(RuntimeError, match="overwritten by a later call"):
        torch.autograd.grad(held, run.leaves, [v.detach() for v in held])


def test_a_call_whose_result_is_dropped_does_not_hold_the_recording() -> None:
    """Catches a recording that waits for ever for the backward pass of a batch that was left out."""
    run = Run(*stack_of("evoformer"), half=False)
    graphs = recorded(run.stack, calls_before=0)
    for _ in range(3):
        run.forward()
    assert graphs.replays == 3


def test_shapes_modes_and_settings_are_told_apart() -> None:
    """Catches a replay of a recording for other inputs, without gradients, of another precision or of other kernels; and
    memory that grows with each length that comes once."""
    run = Run(*stack_of("evoformer"), half=False)
    graphs = recorded(run.stack, most=4)
    for _ in range(3):
        run.forward()
    assert (len(graphs), graphs.replays) == (1, 2)
    run.stack.recompute(Recomputed(0, 1))
    run.forward()
    assert (len(graphs), graphs.replays) == (1, 2), "a recording that keeps other activations"
    run.stack.recompute(Recomputed(0))
    with torch.no_grad():
        for _ in range(3):
            run.forward()
    assert (len(graphs), graphs.replays) == (2, 4)
    run.half = True
    for _ in range(3):
        run.forward([x.detach().bfloat16() for x in run.leaves])
    assert (len(graphs), graphs.replays) == (3, 6)
    graphs.enabled = False
    run.forward([x.detach().bfloat16() for x in run.leaves])
    assert graphs.replays == 6
    graphs.enabled = True
    run.half = False
    one = [x[:1].detach() for x in (*run.leaves, *run.masks)]
    for _ in range(2):
        run.stack(*one)
    assert len(graphs) == 4
    with torch.no_grad():
        run.stack(*one)
        with pytest.warns(UserWarning, match="more than 4 shapes"):
            run.stack(*one)


def test_what_fails_to_be_recorded_is_one_line() -> None:
    """Catches a run that is silently as slow as without graphs, and CUDA's words without ours."""

    class Failing(Rerun):
        def record(self, run: Any, pool: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    run = Run(*stack_of("evoformer"), half=False)
    use_graphs(run.stack, Graphs(Failing(), calls_before=0))
    with pytest.raises(UserError) as error:
        run.forward()
    assert str(error.value) == (
        "EvoformerStack cannot be recorded as a CUDA graph: RuntimeError: operation not permitted when stream is capturing; "
        "switch CUDA graphs off (cuda_graphs)"
    )
    assert not [name for module in run.stack.modules() for name in module._parameters if name in module.__dict__]


@pytest.mark.verify
def test_the_whole_model_with_recycling() -> None:
    """Catches a recycled pass that changes what a later pass reads, and copies or recordings that change the model: its names,
    its copies, a move, and weights that are loaded."""
    half = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    model = halved(config()).float()
    plain = copy.deepcopy(model)
    graphs = recorded(model)
    batch = in_float32(features(1))
    passes = batch["aatype"].shape[1]
    names = list(model.state_dict())
    casts = {id(one): CastParameters(one) for one in (model, plain)}

    def step(one: AlphaFold, number: int) -> list[Tensor]:
        one.zero_grad()
        with half:
            casts[id(one)].make()
            found = tensors(one(batch, [Draws.root(number)]))
        torch.stack([value.float().square().mean() for value in found.values()]).sum().backward()
        casts[id(one)].drop()
        gradients = [grad_of(p).clone() for p in one.parameters()]
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.sub_(0.01 * grad_of(parameter).sign() * parameter.abs())
        return [*(x.detach() for x in found.values()), *gradients]

    for number in range(3):
        expected, found = step(plain, number), step(model, number)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True)), number
    assert graphs.replays > 2 * passes
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    assert copied.evoformer.graphs is not None
    assert len(copied.evoformer.graphs) == 0
    model.double().float()  # moves the parameters
    plain.double().float()
    plain.load_state_dict({name: 0.9 * x for name, x in plain.state_dict().items()})
    model.load_state_dict({name: 0.9 * x for name, x in model.state_dict().items()})
    for number in range(2):
        expected, found = step(plain, number), step(model, number)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True)), number


def test_copies_stay_at_aligned_addresses() -> None:
    """Catches copies that a captured graph would look for where they were, and matrices that vectorised kernels cannot read."""
    stack, _ = small_stack(1)
    casts = CastParameters(stack)
    found = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), casts:
            found.append(
                [x.data_ptr() for m in stack.modules() for name in m._parameters if (x := getattr(m, name)) is not None]
            )
    assert found[0] == found[1]
    assert all(address % 16 == 0 for address in found[0])
    with torch.autocast("cpu", torch.float16), casts:
        assert stack.blocks[0].msa_stack.transition.widen.weight.dtype == torch.float16


def test_copies_that_a_validation_makes_first_serve_training() -> None:
    """Catches a buffer that was made in inference mode, which no later step could write."""
    stack, _ = small_stack(1)
    casts = CastParameters(stack)
    for context in (torch.inference_mode(), torch.enable_grad()):
        with context, torch.autocast("cpu", torch.bfloat16), casts:
            assert stack.blocks[0].msa_stack.transition.widen.weight.dtype == torch.bfloat16


def test_parameters_that_moved_are_recorded_again() -> None:
    """Catches a recording that reads the memory where the parameters were before a move or a load with `assign`."""
    run = Run(*stack_of("evoformer"), half=False)
    graphs = recorded(run.stack, calls_before=0)
    run.forward()
    for parameter in run.stack.parameters():
        parameter.data = 0.9 * parameter.data
    found = run.forward()
    assert (len(graphs), graphs.replays) == (1, 2)
    graphs.enabled = False
    assert all(torch.equal(*pair) for pair in zip(found, run.forward(), strict=True))


@pytest.mark.parametrize("kind", ["evoformer", "templates"])
def test_recomputation_leaves_the_states_of_generators_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches torch's checkpoint that reads the GPU's generator, which ends the recording of a CUDA graph."""

    def refuse(*_: object) -> None:
        raise AssertionError("the state of a generator was read")

    run = Run(*stack_of(kind, recompute=True), half=False)
    monkeypatch.setattr(torch, "get_rng_state", refuse)
    run.step()


@pytest.mark.verify_but("multimer")
@pytest.mark.parametrize("settings", [config(), chains()], ids=["monomer", "multimer"])
def test_torsions_of_templates_are_made_once(settings: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches 130 launches more in each pass, and torsions of the first pass where the passes have other templates."""
    model = dense(AlphaFold(settings))
    batch = features_of_chains(1) if settings.arrangement == "multimer" else features(1)
    templates = [name for name in model.features if name.startswith("template_")]
    expanded = {name: x[:, :1].expand_as(x) if name in templates else x for name, x in batch.items()}
    copied = {name: x.contiguous() for name, x in expanded.items()}
    calls: list[int] = []
    embedder = type(model.template_torsion_embedder)
    made = embedder.features
    monkeypatch.setattr(embedder, "features", staticmethod(lambda of: (calls.append(1), made(of))[1]))
    found, expected, other = (tensors(model(one)) for one in (expanded, copied, batch))
    assert len(calls) == 1 + 2 * batch["aatype"].shape[1]
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    assert not torch.equal(found["msa"], other["msa"])


def test_recordings_are_freed() -> None:
    """Catches graphs that live on: NCCL ends no communicator whose collectives one holds, and a run would hang at its end."""
    freed: list[int] = []

    class Counting(Rerun):
        def record(self, run: Any, pool: Any) -> Taken:
            return dataclasses.replace(super().record(run, pool), free=lambda: freed.append(1))

    run = Run(*stack_of("evoformer"), half=False)
    graphs = Graphs(Counting(), calls_before=0)
    use_graphs(run.stack, graphs)
    run.step()
    with torch.no_grad():
        run.forward()
    assert (len(graphs), freed) == (2, [])
    graphs.free()
    assert (len(graphs), len(freed)) == (0, 3)  # two passes of a call with gradients, and one without

"""Are stacks that are replayed as CUDA graphs (`evodsp.model.graphs`) the same, bit by bit, and how much faster are they?

    python -m scripts.benchmarks.gpu_graphs            # on a GPU; --cpu tries the script with a stand-in for graphs

Each case makes a few training steps with and without graphs, from the same weights: new dropout keys, inputs and weights in
every step. It compares results, and gradients of all inputs and parameters. Steps without graphs are also made twice, to see
whether the GPU repeats itself. Prints a line `result: CASE ok` or `FAILED` for each, with times. The exit code is 1 if any
failed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import faulthandler
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from evodsp.config import ModelConfig
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.dropout import DropoutKeys, Streams
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.graphs import Graphs, use_graphs
from evodsp.model.kernels.operators import Kernels
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_kernels
from evodsp.model.recordings import CudaRecorder, Recorder, Rerun
from evodsp.model.templates import TemplatePairStack
from evodsp.rng import Draws
from evodsp.selftest.shared_device import EVERY_TERM, random_features
from evodsp.weights.command import randomise

from .gpu_cases import Inputs, autocast, labelled

STEPS = 4
"""Training steps of a case. The first step of a replayed stack runs as usual, the second is recorded."""
LIMIT_S = 240
"""A case that hangs shows where, and ends the script."""
Step = Callable[[int], list[Tensor]]


def stack_case(
    kind: str, first: int, residues: int, config: ModelConfig, device: torch.device
) -> tuple[nn.Module, Callable]:
    """A stack of two blocks, the first of which is recomputed, and what makes a step of a copy of it."""
    stack: nn.Module
    channels = config.channels
    if kind == "templates":
        stack = TemplatePairStack(dataclasses.replace(config.templates, blocks=2, checkpoint=1))
        shapes, masks = [(first, residues, residues, config.templates.channels)], [(first, residues, residues)]
    else:
        extra = kind == "extra"
        settings = dataclasses.replace(config.extra_msa if extra else config.evoformer, blocks=2, checkpoint=1)
        c_m = channels.extra_msa if extra else channels.msa
        stack = EvoformerStack(c_m, channels.pair, settings, extra)
        shapes = [(1, first, residues, c_m), (1, residues, residues, channels.pair)]
        masks = [(1, first, residues), (1, residues, residues)]

    def step_of(one: nn.Module) -> Step:
        casts = CastParameters(one)
        adam = torch.optim.Adam(one.parameters(), lr=1e-4, fused=True)
        samples = first if kind == "templates" else 1
        streams_of: Callable[..., Streams] = one.dropout_streams  # type: ignore[assignment]

        def step(number: int) -> list[Tensor]:
            generator = torch.Generator(device).manual_seed(number)
            leaves = [torch.randn(s, generator=generator, device=device).bfloat16().requires_grad_() for s in shapes]
            ones = [(torch.rand(s, generator=generator, device=device) < 0.9).float() for s in masks]
            keys = DropoutKeys.of(streams_of([Draws.root(number).at(n) for n in range(samples)]), device)
            adam.zero_grad()
            with autocast(device, torch.bfloat16):
                casts.make()
                results = one(*leaves, *ones, keys)
            results = [results] if isinstance(results, Tensor) else list(results)
            torch.autograd.backward(results, [x.detach().cos() for x in results])
            casts.drop()
            found = [x.detach().clone() for x in (*results, *(x.grad for x in leaves), *_gradients(one))]
            adam.step()
            return found

        return step

    return stack, step_of


def model_case(inputs: Inputs, config: ModelConfig, device: torch.device) -> tuple[nn.Module, Callable]:
    """The whole model with two blocks a stack, and a training step with one recycled pass and all terms of the loss."""
    parts = {n: dataclasses.replace(getattr(config, n), blocks=2, checkpoint=1) for n in ("extra_msa", "evoformer")}
    templates = dataclasses.replace(config.templates, enabled=True, checkpoint=1)
    model = AlphaFold(dataclasses.replace(config, templates=templates, **parts))
    passes = random_features(inputs.sequences, inputs.extra, inputs.residues, inputs.templates, cycles=2)
    batch = {name: x.to(device) for name, x in (labelled(inputs) | passes).items()}
    pae = EVERY_TERM.pae if config.heads.predicted_aligned_error else 0.0
    loss_config = dataclasses.replace(EVERY_TERM, experimentally_resolved=0.0, pae=pae)

    def step_of(one: nn.Module) -> Step:
        assert isinstance(one, AlphaFold)
        casts = CastParameters(one)
        adam = torch.optim.Adam(one.parameters(), lr=1e-4, fused=True)

        def step(number: int) -> list[Tensor]:
            adam.zero_grad()
            with autocast(device, torch.bfloat16):
                casts.make()
                output = one(batch, [Draws.root(number)])
                loss, _ = total_loss(output, batch, loss_config, one.config.heads)
            loss.backward()
            casts.drop()
            found = [output.structure.positions, output.representations["pair"], loss, *_gradients(one)]
            found = [x.detach().clone() for x in found]
            adam.step()
            return found

        return step

    return model, step_of


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    return (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def compared(model: nn.Module, step_of: Callable, recorder: Recorder, device: torch.device) -> str:
    """The words after "result: CASE"."""
    randomise(model)
    model.to(device)
    if device.type == "cuda":
        from evodsp.model.kernels import triton

        use_kernels(model, Kernels.of(triton))
    models = [model, copy.deepcopy(model), copy.deepcopy(model)]
    usual, again, replayed = (step_of(one) for one in models)
    graphs = Graphs(recorder)
    use_graphs(models[2], graphs)
    itself = other = 0.0
    for number in range(STEPS):
        expected, repeated, found = usual(number), again(number), replayed(number)
        if not all(bool(x.isfinite().all()) for x in expected):
            return "FAILED numbers are not finite without graphs"
        itself, other = max(itself, _distance(expected, repeated)), max(other, _distance(expected, found))
    times = [_seconds(step, device) for step in (usual, replayed)]
    speed = f"a step {1e3 * times[0]:.2f} ms, replayed {1e3 * times[1]:.2f} ms"
    counts = f"{len(graphs)} recordings, {graphs.replays} replays"
    said = f"largest difference {other:.1e} (without graphs, twice: {itself:.1e}); {counts}; {speed}"
    if graphs.replays == 0 or not other <= 10 * itself:  # Adam makes a difference of one bit larger
        return f"FAILED {said}"
    return f"ok {said}"


def _distance(expected: list[Tensor], found: list[Tensor]) -> float:
    """Largest difference of a tensor, as a share of its largest number; not finite if any number is not."""
    pairs = zip(expected, found, strict=True)
    shares = [(x.float() - y.float()).abs().max() / x.float().abs().max().clamp(min=1e-20) for x, y in pairs]
    return float(torch.stack(shares).max())


def _seconds(step: Step, device: torch.device, runs: int = 5) -> float:
    """Median of a whole step, with the host's time."""
    taken = []
    for number in range(runs if device.type == "cuda" else 1):
        begun = time.perf_counter()
        step(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begun)
    return sorted(taken)[len(taken) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="try the script without a GPU, on small sizes")
    cpu = parser.parse_args().cpu
    device = torch.device("cpu" if cpu else "cuda")
    config = ModelConfig.preset("test" if cpu else "model_1_ptm")
    rows, extra, residues, templates = (5, 6, 7, 2) if cpu else (32, 64, 64, 2)
    cases: dict[str, Callable[[], tuple[nn.Module, Callable]]] = {
        "evoformer": lambda: stack_case("evoformer", rows, residues, config, device),
        "extra": lambda: stack_case("extra", extra, residues, config, device),
        "templates": lambda: stack_case("templates", templates, residues, config, device),
        "model": lambda: model_case(Inputs(rows, extra, residues, templates), config, device),
    }
    failed = 0
    for name, make in cases.items():
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            said = compared(*make(), Rerun() if cpu else CudaRecorder(), device)
        except Exception as error:
            traceback.print_exc()
            said = f"FAILED {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        failed += said.startswith("FAILED")
        faulthandler.cancel_dump_traceback_later()
        print(f"result: {name} {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

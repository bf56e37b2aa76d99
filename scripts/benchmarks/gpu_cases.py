"""What is measured on a GPU: blocks, stacks and the whole model as steps on random numbers, and their sizes.

Shape legend: S rows of the MSA, E rows of the extra MSA, R residues, T templates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from evodsp.config import ModelConfig
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerStack, MSAStack, PairStack
from evodsp.model.kernels.operators import Kernels
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_kernels
from evodsp.model.templates import TemplatePairStack
from evodsp.rng import Draws
from evodsp.selftest.shared_device import EVERY_TERM, random_features, with_labels
from evodsp.weights.command import randomise

from .gpu_clock import Step


@dataclass(frozen=True)
class Inputs:
    """Sizes of a sample of the whole model."""

    sequences: int
    extra: int
    residues: int
    templates: int
    """Number of templates, whose rows of the MSA come on top of `sequences`."""
    passes: int = 1
    """Passes of the model: the recycling iterations and one."""
    recomputed: int | bool = True
    """Evoformer blocks that training computes again. Blocks of other stacks are computed again only if all of these are."""
    preset: str = ""
    """Preset of the model; '' takes that of the sizes."""

    def __str__(self) -> str:
        again = "" if self.recomputed is True else f", {int(self.recomputed)} blocks recomputed"
        return (
            f"{self.sequences} + {self.extra} x {self.residues}, {self.templates} templates, {self.passes} "
            f"pass{'es' * (self.passes > 1)}{again}"
        )


@dataclass(frozen=True)
class Sizes:
    """Sizes of everything that is measured."""

    model: str
    """Preset of all widths and depths; templates are switched on."""
    blocks: tuple[tuple[str, int, int], ...]
    """A block's kind ("evoformer", "extra" or "templates"), and its two sizes: S R, E R, or T R."""
    operators: tuple[tuple[str, int, int], ...]
    """Blocks whose operators are timed by themselves."""
    profiled: tuple[tuple[str, int, int], ...]
    """Blocks whose time is told apart by kernel."""
    checks: tuple[tuple[str, int, int], ...]
    """Blocks whose operators are compared with the formulas, with the preset's widths: of odd sizes, and of training's."""
    training: tuple[Inputs, ...]
    inference: tuple[Inputs, ...]
    step: int
    """The largest R is found to a multiple of this."""
    most: int
    """Larger R are not tried."""
    copied: int
    """Bytes of the copy that shows the bandwidth of memory."""
    matrix: int
    """Rows of the square matrices whose product shows the speed of matrix products."""
    seconds: float
    """Seconds for the runs of one case that are timed."""
    runs: int
    """Largest number of these runs."""


FULL = Sizes(
    model="model_1_ptm",
    blocks=(("evoformer", 128, 256), ("evoformer", 512, 384), ("extra", 5120, 384), ("templates", 4, 256)),
    operators=(("evoformer", 128, 256), ("extra", 1024, 256)),
    profiled=(("evoformer", 128, 256), ("evoformer", 512, 384), ("extra", 5120, 384), ("evoformer", 512, 381)),
    checks=(
        ("evoformer", 37, 50),
        ("evoformer", 128, 256),
        ("extra", 70, 53),
        ("templates", 2, 50),
        ("extra", 256, 128),
        ("evoformer", 65, 131),
    ),
    training=(Inputs(124, 1024, 256, 4, 4, 0, "model_1"), Inputs(508, 5120, 384, 4, 4, 30, "model_1")),
    inference=tuple(Inputs(508, 5120, residues, 4, 4) for residues in (98, 304, 562, 914)),
    step=128,
    most=8192,
    copied=1 << 30,
    matrix=8192,
    seconds=0.4,
    runs=20,
)
TINY = Sizes(
    model="test",
    blocks=(("evoformer", 5, 7), ("extra", 6, 7), ("templates", 2, 7)),
    operators=(("evoformer", 5, 7),),
    profiled=(("evoformer", 5, 7),),
    checks=(("evoformer", 5, 7), ("extra", 6, 7)),
    training=(Inputs(5, 4, 8, 1, 2, 0),),
    inference=(Inputs(5, 4, 8, 1, 2),),
    step=4,
    most=8,
    copied=1 << 16,
    matrix=32,
    seconds=0.0,
    runs=1,
)


def config_of(sizes: Sizes, inputs: Inputs | None = None) -> ModelConfig:
    """The configuration of the preset, with templates, for these inputs if they are given."""
    config = ModelConfig.preset((inputs.preset if inputs else "") or sizes.model)
    config = dataclasses.replace(config, templates=dataclasses.replace(config.templates, enabled=True))
    if inputs is None or inputs.recomputed is True:
        return config
    return dataclasses.replace(
        config,
        evoformer=dataclasses.replace(config.evoformer, checkpoint=int(inputs.recomputed)),
        extra_msa=dataclasses.replace(config.extra_msa, checkpoint=False),
        templates=dataclasses.replace(config.templates, checkpoint=False),
    )


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Half precision as Lightning's `bf16-mixed` switches it on; for float32 nothing."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)


def stack_of(config: ModelConfig, kind: str) -> EvoformerStack | TemplatePairStack:
    """One block, or the template pair stack, with random parameters: always the same ones. Nothing is recomputed."""
    channels = config.channels
    stack: EvoformerStack | TemplatePairStack
    if kind == "templates":
        stack = TemplatePairStack(dataclasses.replace(config.templates, checkpoint=False))
    else:
        extra = kind == "extra"
        settings = dataclasses.replace(config.extra_msa if extra else config.evoformer, blocks=1, checkpoint=False)
        stack = EvoformerStack(channels.extra_msa if extra else channels.msa, channels.pair, settings, extra)
    randomise(stack)
    return stack


def inputs_of(
    config: ModelConfig, kind: str, first: int, residues: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """m [1, S, R, c_m] and z [1, R, R, c_z], or a pair of each template [T, R, R, c_t]; and their masks, all ones. The inputs
    require gradients.
    """
    channels = config.channels
    if kind == "templates":
        shapes = [(first, residues, residues, config.templates.channels)]
    else:
        c_m = channels.extra_msa if kind == "extra" else channels.msa
        shapes = [(1, first, residues, c_m), (1, residues, residues, channels.pair)]
    generator = torch.Generator(device).manual_seed(0)
    leaves = [torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_() for shape in shapes]
    return leaves, [torch.ones(shape[:-1], device=device) for shape in shapes]


def step_of(
    run: Callable[[], Tensor | Sequence[Tensor]],
    wanted: Sequence[Tensor],
    device: torch.device,
    dtype: torch.dtype,
    casts: CastParameters | None = None,
) -> Step:
    """`run` under autocast, and the gradients of what is wanted. `casts`: of the parameters, once a step."""

    def step() -> Iterator[str]:
        with autocast(device, dtype):
            if casts:
                casts.make()
            results = run()
        results = [results] if isinstance(results, Tensor) else list(results)
        yield "forward"
        torch.autograd.grad(results, wanted, [x.detach() for x in results])
        if casts:
            casts.drop()
        yield "backward"

    return step


def block(
    config: ModelConfig,
    kind: str,
    first: int,
    residues: int,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels,
    *,
    inputs_dtype: torch.dtype | None = None,
    compiled: bool = False,
) -> Step:
    """One block with dropout, or the template pair stack, forward and backward as in training.

    `dtype`: of autocast; float32: none. `inputs_dtype`: of m and z; None: the same. `compiled`: each half by torch.compile, as
    with `compile: blocks`; autocast then casts the parameters, which the compiler puts into the kernels that need them.
    """
    stack = stack_of(config, kind).to(device)
    use_kernels(stack, kernels)
    samples = first if kind == "templates" else 1
    keys = DropoutKeys.of(stack.dropout_streams([Draws.root(0)] * samples), device)
    leaves, masks = inputs_of(config, kind, first, residues, device, inputs_dtype or dtype)
    if compiled:
        for half in compiled_afresh(stack):
            half.compile(dynamic=False)
    casts = None if compiled else CastParameters(stack)
    return step_of(partial(stack, *leaves, *masks, keys), [*leaves, *stack.parameters()], device, dtype, casts)


def compiled_afresh(stack: nn.Module) -> list[nn.Module]:
    """The parts that training compiles. Forgets earlier graphs; as in training, autocast acts on the forward pass only."""
    torch._dynamo.reset()
    torch._functorch.config.backward_pass_autocast = "off"
    return [module for module in stack.modules() if isinstance(module, MSAStack | PairStack)]


def model(config: ModelConfig, kernels: Kernels, device: torch.device) -> AlphaFold:
    """The whole model with random parameters, made on the device, which takes a fraction of the time."""
    with device:
        whole = AlphaFold(config)
    randomise(whole)
    use_kernels(whole, kernels)
    return whole.to(device)


def inference(whole: AlphaFold, inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Step:
    """The passes without gradients."""
    whole.eval()
    batch = _on(device, features_of(inputs))
    casts = CastParameters(whole)

    def step() -> Iterator[str]:
        with torch.no_grad(), autocast(device, dtype), casts:
            whole(batch)
        yield "inference"

    return step


def features_of(inputs: Inputs) -> dict[str, Tensor]:
    """Random features of one sample."""
    return random_features(inputs.sequences, inputs.extra, inputs.residues, inputs.templates, inputs.passes)


def training(whole: AlphaFold, inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Step:
    """A training step: one pass with dropout and recomputation, all terms of the loss, the gradient, Adam."""
    whole.train()
    batch = _on(device, labelled(inputs))
    heads = whole.config.heads
    loss_config = dataclasses.replace(
        EVERY_TERM,
        experimentally_resolved=EVERY_TERM.experimentally_resolved if heads.experimentally_resolved else 0.0,
        pae=EVERY_TERM.pae if heads.predicted_aligned_error else 0.0,
    )
    casts = CastParameters(whole)
    adam = torch.optim.Adam(whole.parameters(), lr=1e-5, fused=True)
    draws = [Draws.root(0)]

    def step() -> Iterator[str]:
        with autocast(device, dtype):
            casts.make()
            output = whole(batch, draws)
            loss, _ = total_loss(output, batch, loss_config, heads)
        yield "forward"
        loss.backward()
        casts.drop()
        yield "backward"
        adam.step()
        adam.zero_grad()
        yield "optimizer"

    return step


def labelled(inputs: Inputs) -> dict[str, Tensor]:
    """Random features of one sample, with labels for every term of the loss."""
    return with_labels(features_of(inputs))


def _on(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items()}

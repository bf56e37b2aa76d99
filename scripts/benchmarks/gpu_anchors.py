"""Operators at the shapes and in the precision of published figures, beside other programs'.

Triangle attention's core and the whole triangle multiplication as in the quickstart of LambdaLabsML's TurboPairFormer: batch 1,
bf16. And MSA row attention with its bias, column attention, and global column attention, for which nobody has published any.
Times are those of `gpu_clock`, by the GPU's own clock; memory is the allocator's peak, above the inputs.

evodsp's attention also applies its gate, which it reads with queries, keys and values, and reads a mask; the others compute the
core alone. Its triangle multiplication has biases and a mask, as AlphaFold2's, and here everybody's has.

Shape legend: B batch, N rows (each attends within itself), L positions, H heads, D head width, s sequences, r columns.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from evodsp.model.kernels.operators import Kernels
from evodsp.model.layers import TriangleMultiplication
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_kernels
from evodsp.model.sharded import Sharded
from evodsp.weights.command import randomise

from . import gpu_clock
from .gpu_cases import autocast
from .gpu_clock import Step
from .gpu_peers import FORMULAS, cueq_absent, cueq_triangle_attention, cueq_triangle_multiplication, relative, sdpa
from .gpu_rows import Case, Measured, Setup, operators_of

HALF = torch.bfloat16
RUNS = 10
LIMIT = 0.1
"""Error, relative to the largest number, above which nothing is timed: bf16 makes one of about 0.01."""
_CHECKED = 1 << 27
"""Logits up to which results are compared with float32: the formula needs 20 bytes for each."""


@dataclass(frozen=True)
class Sizes:
    """What is measured; the most interesting sizes first, in case time ends."""

    triangle: tuple[int, ...]
    """N of triangle attention and triangle multiplication."""
    heads: tuple[int, int]
    """Heads and width of triangle attention."""
    channels: int
    """Channels of triangle multiplication."""
    msa: tuple[tuple[int, int], ...]
    """Rows and residues of MSA row and column attention."""
    msa_heads: tuple[int, int]
    extra: tuple[tuple[int, int], ...]
    """Rows and residues of global attention."""
    extra_heads: tuple[int, int]


FULL = Sizes(
    (256, 512, 1024, 128, 768), (4, 32), 128, ((128, 256), (512, 384)), (8, 32), ((1024, 256), (5120, 384)), (8, 8)
)
TINY = Sizes((6, 7), (2, 8), 32, ((3, 5),), (2, 8), ((4, 5),), (2, 8))


@dataclass(frozen=True)
class Contender:
    """One way to compute something."""

    backend: str
    function: Callable[..., Tensor]
    leaves: Sequence[Tensor]
    """The function's arguments, all of which want gradients."""
    exact: Callable[..., Tensor]
    """The function that computes the same from these arguments in float32."""
    checked: bool = True
    """Whether `exact` is affordable at this size."""
    note: str = ""

    def step(self) -> Step:
        """Forward and backward pass, from random gradients to all arguments."""
        upstream: list[Tensor] = []

        def step() -> Iterator[str]:
            result = self.function(*self.leaves)
            yield "forward"
            upstream[:] = upstream or [_random(result)]
            torch.autograd.grad(result, self.leaves, upstream)
            yield "backward"

        return step

    def error(self) -> float:
        """The largest difference from float32, of the result and all gradients, each over its largest number."""
        wide = [x.detach().float().requires_grad_() for x in self.leaves]
        expected = self.exact(*wide)
        upstream = _random(expected)
        result = self.function(*self.leaves)
        found = [result, *torch.autograd.grad(result, self.leaves, upstream.to(result.dtype))]
        truth = [expected, *torch.autograd.grad(expected, wide, upstream)]
        return max(relative(x.detach(), y.detach()) for x, y in zip(found, truth, strict=True))


def _random(like: Tensor) -> Tensor:
    """Always the same numbers, never smooth ones: a smooth gradient vanishes where a norm subtracts the mean."""
    generator = torch.Generator(like.device).manual_seed(1)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def measure(make: Callable[[], Contender], device: torch.device, seconds: float) -> Iterator[Measured]:
    """The error, memory and times. Nothing but the error of what is wrong."""
    contender = make()
    if contender.checked:
        error = contender.error()
        yield Measured("error", error, "", "of the result and all gradients, from float32")
        if not error <= LIMIT:
            raise ValueError(f"its error of {error:.3g} is more than {LIMIT}")
    step = contender.step()
    yield Measured("peak memory", gpu_clock.memory(step, device).peak, "MiB")
    for stage, times in gpu_clock.timed(step, device, seconds, RUNS).items():
        yield Measured(stage, 1000 * median(times), "ms", contender.note)
    for stage, kernels in gpu_clock.kernels(step, device).items():
        yield Measured(f"busy {stage}", 1000 * sum(kernel.seconds for kernel in kernels), "ms")


# ---- Attention ----


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Float[Tensor, "B N H L D"]:
    """The textbook's attention: softmax in float32, products in the precision of q. bias [B, 1, H, L, L]."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        logits = logits + bias
    return logits.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def gated(keys: Tensor, operators: Any, projected: Tensor, *bias: Tensor) -> Float[Tensor, "B N L H D"]:
    """evodsp's operator of projected queries, keys, values, gates [B, N, L, 4, H, D]; perhaps with a bias [B, 1, H, L, L]."""
    if not bias:
        return operators.attention(projected, keys)
    return operators.biased_attention(projected, keys, bias[0].squeeze(1))


def attention_contender(
    backend: str, rows: int, length: int, heads: tuple[int, int], biased: bool, device: torch.device
) -> Contender:
    """q, k and v [1, rows, H, length, D], by themselves or projected as evodsp has them, and the bias, all bf16 and random."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(HALF).requires_grad_()

    bias = [normal(1, 1, heads[0], length, length)] if biased else []
    checked = rows * heads[0] * length**2 <= _CHECKED
    if backend not in _PEERS:
        keys = torch.ones(1, rows, length, device=device)
        operators = importlib.import_module(f"evodsp.model.kernels.{backend}")
        leaves = [normal(1, rows, length, 4, *heads), *bias]
        return Contender(
            backend,
            partial(gated, keys, operators),
            leaves,
            partial(gated, keys, FORMULAS),
            checked,
            "gate and mask included",
        )
    function = {"cuequivariance": cueq_triangle_attention, "sdpa": sdpa}[backend]
    leaves = [*(normal(1, rows, heads[0], length, heads[1]) for _ in range(3)), *bias]
    return Contender(backend, function, leaves, attention, checked)


# ---- Global attention ----


def global_attention(q: Tensor, key_value: Tensor) -> Float[Tensor, "B r H D"]:
    """The textbook's: softmax in float32. q [B, r, H, D], key_value [B, s, r, 2, D]."""
    k, v = key_value.unbind(3)
    logits = torch.einsum("brhd,bsrd->brhs", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("brhs,bsrd->brhd", logits.softmax(-1, dtype=torch.float32).to(q.dtype), v)


def global_by_sdpa(q: Tensor, key_value: Tensor) -> Float[Tensor, "B r H D"]:
    """The heads, which share keys and values, as queries of one head: nothing has to be repeated."""
    k, v = (x.transpose(1, 2).unsqueeze(2) for x in key_value.unbind(3))  # [B, r, 1, s, D]
    return sdpa(q.unsqueeze(2), k, v).squeeze(2)


def global_by_sums(keys: Tensor, operators: Any, q: Tensor, key_value: Tensor) -> Float[Tensor, "B r H D"]:
    """evodsp's operator, whose sums are not yet divided, and the division."""
    sums = operators.global_attention(q, key_value, keys)
    return (sums[..., :-2] / sums[..., -2:-1]).to(q.dtype)


def global_contender(
    backend: str, sequences: int, columns: int, heads: tuple[int, int], device: torch.device
) -> Contender:
    generator = torch.Generator(device).manual_seed(0)
    shapes = (1, columns, *heads), (1, sequences, columns, 2, heads[1])
    leaves = [torch.randn(s, generator=generator, device=device).to(HALF).requires_grad_() for s in shapes]
    checked = sequences * columns * heads[0] <= _CHECKED
    if backend in _PEERS:
        return Contender(backend, global_by_sdpa, leaves, global_attention, checked)
    keys = torch.ones(1, sequences, columns, device=device)
    operators = importlib.import_module(f"evodsp.model.kernels.{backend}")
    return Contender(
        backend,
        partial(global_by_sums, keys, operators),
        leaves,
        global_attention,
        checked,
        "mask and division included",
    )


# ---- Triangle multiplication ----


class Whole(nn.Module):
    """A representation plus the update of a layer."""

    def __init__(self, layer: TriangleMultiplication) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, z: Float[Tensor, "B N N c"], mask: Float[Tensor, "B N N"]) -> Float[Tensor, "B N N c"]:
        pair = Sharded.whole(z, "j", mask)
        pair += self.layer(pair)
        return pair.x


def multiplication_contender(backend: str, residues: int, channels: int, device: torch.device) -> Contender:
    """z [1, N, N, c] in bf16 plus its outgoing update, with parameters in float32 that want gradients, too."""
    layer = TriangleMultiplication(channels, channels, "outgoing")
    randomise(layer)
    layer.to(device)
    generator = torch.Generator(device).manual_seed(0)
    z = torch.randn(1, residues, residues, channels, generator=generator, device=device).to(HALF).requires_grad_()
    mask = torch.ones(1, residues, residues, device=device)
    half_mask = mask.to(HALF)
    whole = Whole(layer)
    truth = copy.deepcopy(whole)
    use_kernels(truth, FORMULAS)
    casts = CastParameters(layer)

    def exact(z: Tensor, *parameters: Tensor) -> Tensor:
        names = [name for name, _ in truth.named_parameters()]
        found: Tensor = functional_call(truth, dict(zip(names, parameters, strict=True)), (z, mask))
        return found

    def own(z: Tensor, *_: Tensor) -> Tensor:
        with autocast(device, HALF):
            casts.make()
            found: Tensor = whole(z, mask)
        return found

    def theirs(precision: str | None, z: Tensor, *_: Tensor) -> Tensor:
        with autocast(device, HALF if precision is None else torch.float32):
            return z + cueq_triangle_multiplication(layer, z, half_mask, precision)

    checked = residues**2 * channels <= _CHECKED
    leaves = [z, *layer.parameters()]
    if backend.startswith("cuequivariance"):
        precision = "bfloat16" if backend.endswith("bfloat16") else None
        return Contender(backend, partial(theirs, precision), leaves, exact, checked)
    use_kernels(layer, Kernels(**operators_of(backend)))
    return Contender(backend, own, leaves, exact, checked)


# ---- Cases ----

_PEERS = ("cuequivariance", "sdpa")


def cases(setup: Setup) -> Iterator[Case]:
    """Each operator at each size: evodsp's, and then the peers', as far as they are here."""
    device = setup.device
    cuda = device.type == "cuda"
    sizes = FULL if cuda else TINY
    absent = cueq_absent(device)
    cueq = [] if absent else ["cuequivariance"]
    own = "triton" if cuda else "chunked"
    if absent:
        yield Case("all", "cuequivariance", "", lambda: [Measured("absent", None, note=absent)])

    def case(name: str, backend: str, make: Callable[..., Contender], *arguments: object) -> Case:
        made = partial(make, backend, *arguments, device)
        return Case(name, backend, "bf16", partial(measure, made, device, _SECONDS))

    for n in sizes.triangle:
        for backend in (own, *cueq, "sdpa"):
            yield case(f"triangle attention core {n}", backend, attention_contender, n, n, sizes.heads, True)
    for n in sizes.triangle:
        for backend in (own, *cueq, *(f"{name}, bfloat16" for name in cueq)):
            yield case(f"triangle multiplication {n}", backend, multiplication_contender, n, sizes.channels)
    for s, r in sizes.msa:
        for backend in (own, *cueq, "sdpa"):
            yield case(f"MSA row attention {s} x {r}", backend, attention_contender, s, r, sizes.msa_heads, True)
        for backend in (own, "sdpa"):
            yield case(f"MSA column attention {s} x {r}", backend, attention_contender, r, s, sizes.msa_heads, False)
    for s, r in sizes.extra:
        for backend in (own, "sdpa"):
            yield case(f"global attention {s} x {r}", backend, global_contender, s, r, sizes.extra_heads)


_SECONDS = 0.1
"""Seconds for the runs of one case that `gpu_clock` times; there are at least three runs."""

"""Blocks and operators of other programs that compute the same on a GPU, in the same process, for `gpu.py` to time.

- OpenFold's blocks with evodsp's parameters, of the folder OPENFOLD_SOURCE or of the environment. Its `openfold` folder has to
  be alone in there: a whole clone also has a `scripts` package, which could hide this one. Blocks need scipy and nothing else.
  Its CUDA extension, which only the extra-MSA block uses, is replaced by torch's softmax; DeepSpeed is hidden.
- evodsp's blocks by the plain formulas, eager or compiled by torch.
- torch's fused attention, and NVIDIA's cuEquivariance: two packages, cuequivariance-torch and cuequivariance-ops-torch, which
  need platformdirs and nvidia-ml-py.

What is not installed gives a reason, not an error.

Shape legend: B batch, N rows (each attends within itself), L positions, Q of them as queries, H heads, D head width, S rows of
the MSA, R residues, K keys.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from evodsp.config import ModelConfig
from evodsp.model.dropout import NO_DROPOUT
from evodsp.model.kernels import reference
from evodsp.model.kernels.operators import Kernels
from evodsp.model.layers import TriangleMultiplication
from evodsp.model.primitives import use_kernels
from evodsp.weights.names import Prefix, evoformer_block
from scripts.parity.openfold_side import SOURCE, hide_deepspeed

from .gpu_cases import autocast, block, compiled_afresh, config_of, inputs_of, stack_of, step_of
from .gpu_clock import Step
from .gpu_rows import Case, Measured, Setup, chosen, measured

FORMULAS = Kernels.of(reference)
"""Every operator by its formula."""
STAND_IN = "OpenFold's CUDA extension for the softmax of row attention is replaced by torch's softmax, in place"
"""Note on times of OpenFold's extra-MSA block."""
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Differences between two programs' results, as norms, over the norm of the result, that rounding can make."""


# ---- Operators ----


def relative(x: Tensor, exact: Tensor) -> float:
    """The largest difference, over the largest number of `exact`."""
    exact = exact.float()
    return float((x.float() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def fused(device: str) -> list[SDPBackend]:
    """torch's fused ways of attention; without a GPU the plain one, too, because none of them has the bias's gradient there."""
    plain = [] if device == "cuda" else [SDPBackend.MATH]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, *plain]


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Float[Tensor, "B N H Q D"]:
    """torch's attention on a fused path. q [B, N, H, Q, D], k and v [B, N, H, L, D], bias [B, 1, H, Q, L], which rows share.

    Its fused kernels want four axes. Raises RuntimeError if none of them can do it: a GPU never takes the unfused path here. A
    CPU does, where the bias wants a gradient.
    """
    mask = None if bias is None else bias.expand(*q.shape[:2], *bias.shape[2:]).flatten(0, 1)
    with sdpa_kernel(fused(q.device.type)):
        return F.scaled_dot_product_attention(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), attn_mask=mask
        ).unflatten(0, q.shape[:2])


def cueq_absent(device: torch.device) -> str:
    """Why cuEquivariance cannot run here; '' if it can."""
    if device.type != "cuda":
        return "cuEquivariance is for cuda"
    try:
        for package in ("cuequivariance_torch", "cuequivariance_ops_torch"):
            importlib.import_module(package)
    except Exception as error:  # a library that is not found, or a Triton that does not fit, can raise anything
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def cueq_triangle_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Float[Tensor, "B N H Q D"]:
    """cuEquivariance's attention, without a mask. q, k, v [B, N, H, L, D], bias [B, 1, H, L, L], which it casts to float32."""
    found: Tensor = importlib.import_module("cuequivariance_torch").triangle_attention(
        q, k, v, bias, mask=None, scale=q.shape[-1] ** -0.5
    )
    return found


def cueq_triangle_multiplication(
    layer: TriangleMultiplication,
    z: Float[Tensor, "B R R c"],
    mask: Float[Tensor, "B R R"],
    precision: str | None = None,
) -> Float[Tensor, "B R R c"]:
    """cuEquivariance's whole update with evodsp's parameters. `precision`: "bfloat16" rounds them; None: autocast does."""
    update = importlib.import_module("cuequivariance_torch").triangle_multiplicative_update
    places = {
        "norm_in": layer.norm, "p_in": layer.projection, "g_in": layer.projection_gate,
        "norm_out": layer.product_norm, "p_out": layer.output, "g_out": layer.output_gate,
    }  # fmt: skip
    weights = {f"{name}_{kind}": getattr(own, kind) for name, own in places.items() for kind in ("weight", "bias")}
    found: Tensor = update(z, direction=layer.edges, mask=mask, precision=precision, **weights)
    return found


# ---- Blocks ----


def _replace_kernel() -> None:
    """Stand in for OpenFold's CUDA extension as cheaply as torch can, in place: the softmax of attention, and its gradient."""

    def forward(logits: Tensor, rows: int, columns: int) -> None:
        torch.ops.aten._softmax.out(logits, -1, False, out=logits)

    def backward(weights: Tensor, grad: Tensor, values: Tensor, *sizes: int) -> None:
        """Replace the weights [*, Q, K] by the gradient of the logits, from the output's gradient and the values."""
        torch.ops.aten._softmax_backward_data.out(grad @ values.mT, weights, -1, weights.dtype, grad_input=weights)

    kernel = types.ModuleType("attn_core_inplace_cuda")
    kernel.__spec__ = importlib.machinery.ModuleSpec(kernel.__name__, None)
    kernel.__dict__.update(forward_=forward, backward_=backward)
    sys.modules[kernel.__name__] = kernel


def openfold_absent() -> str:
    """Why OpenFold's blocks cannot be built here; '' if they can. Puts the folder OPENFOLD_SOURCE on the path, once."""
    source = os.environ.get(SOURCE)
    if source and source not in sys.path:
        sys.path.append(source)  # last, because a whole clone has packages of the same names as ours
    if importlib.util.find_spec("openfold") is None:
        return f"there is no OpenFold in this environment, nor in the folder {SOURCE}"
    if importlib.util.find_spec("attn_core_inplace_cuda") is None:
        _replace_kernel()
    hide_deepspeed()
    try:
        importlib.import_module("openfold.model.evoformer")
    except Exception as error:  # a version that does not fit the environment can raise anything
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def _openfold_module(config: ModelConfig, kind: str, stack: nn.Module) -> nn.Module:
    """OpenFold's block with the settings and the parameters of evodsp's."""
    if absent := openfold_absent():
        raise ImportError(f"OpenFold: {absent}")
    evoformer = importlib.import_module("openfold.model.evoformer")
    made = evoformer.ExtraMSABlock if kind == "extra" else evoformer.EvoformerBlock
    extra = kind == "extra"
    settings = config.extra_msa if extra else config.evoformer
    c_m = config.channels.extra_msa if extra else config.channels.msa
    arguments: dict[str, Any] = {
        "c_m": c_m, "c_z": config.channels.pair, "c_hidden_msa_att": settings.msa_head_width,
        "c_hidden_opm": settings.outer_product_channels, "c_hidden_mul": settings.triangle_channels,
        "c_hidden_pair_att": settings.pair_head_width, "no_heads_msa": settings.msa_heads,
        "no_heads_pair": settings.pair_heads, "transition_n": settings.transition_factor,
        "msa_dropout": settings.msa_dropout, "pair_dropout": settings.pair_dropout, "no_column_attention": False,
        "opm_first": False, "fuse_projection_weights": False, "inf": 1e9, "eps": 1e-8, "ckpt": False,
    }  # fmt: skip
    known = inspect.signature(made.__init__).parameters  # releases differ
    module: nn.Module = made(**{name: value for name, value in arguments.items() if name in known})
    ours = dict(stack.named_parameters())
    theirs: dict[str, Tensor] = {}
    for name in evoformer_block(Prefix("blocks.0", "", "block"), extra, settings):
        parts = ours[name.ours].detach().chunk(len(name.openfold))
        theirs |= {key.removeprefix("block."): x.clone() for key, x in zip(name.openfold, parts, strict=True)}
    module.load_state_dict(theirs)
    return module


_OPTIONS = {"chunk_size": None, "_mask_trans": False}
"""OpenFold's settings in training, without chunks."""


def openfold_block(
    config: ModelConfig,
    kind: str,
    first: int,
    residues: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    inputs_dtype: torch.dtype,
    compiled: bool = False,
) -> Step:
    """OpenFold's block with dropout and evodsp's parameters, forward and backward to m, z and all parameters.

    `kind`: "evoformer" or "extra". `dtype`: of autocast; float32: none. `inputs_dtype`: of m and z; under Lightning they are in
    float32. `compiled`: by torch.compile as a whole, where it breaks into several graphs. Raises ImportError without OpenFold.
    """
    module = _openfold_module(config, kind, stack_of(config, kind)).to(device).train()
    leaves, masks = inputs_of(config, kind, first, residues, device, inputs_dtype)
    if compiled:
        compiled_afresh(module)
        module.compile(dynamic=False)
    return step_of(partial(module, *leaves, *masks, **_OPTIONS), [*leaves, *module.parameters()], device, dtype)


def openfold_outputs_equal(
    config: ModelConfig,
    kind: str,
    first: int,
    residues: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    inputs_dtype: torch.dtype,
) -> float:
    """The largest difference between OpenFold's block and evodsp's by the formulas, without dropout, over the largest number of
    each: of both outputs, and of the gradients of m and z. Raises ValueError where rounding cannot explain it.
    """
    stack = stack_of(config, kind)
    module = _openfold_module(config, kind, stack).to(device).eval()
    use_kernels(stack.to(device), FORMULAS)
    leaves, masks = inputs_of(config, kind, first, residues, device, inputs_dtype)
    found: list[list[Tensor]] = []
    weights: list[Tensor] = []
    generator = torch.Generator(device).manual_seed(1)
    for run in (partial(stack, *leaves, *masks, NO_DROPOUT), partial(module, *leaves, *masks, **_OPTIONS)):
        with autocast(device, dtype):
            results = list(run())
        weights = weights or [torch.randn(x.shape, generator=generator, device=device) for x in results]
        gradients = torch.autograd.grad(results, leaves, [w.to(x.dtype) for w, x in zip(weights, results, strict=True)])
        found.append([*(x.detach() for x in results), *gradients])
    ours, theirs = found
    pairs = [(x.float(), y.float()) for x, y in zip(theirs, ours, strict=True)]
    apart = max(float((x - y).norm() / y.norm()) for x, y in pairs)
    limit = LIMITS[torch.bfloat16 if torch.bfloat16 in (dtype, inputs_dtype) else torch.float32]
    if not apart <= limit:
        raise ValueError(f"OpenFold's {kind} block differs from evodsp's by {apart:.3g} of the norm, more than {limit}")
    return max(relative(x, y) for x, y in pairs)


# ---- Cases ----


def cases(setup: Setup) -> Iterator[Case]:
    """Is OpenFold's block the same function? Then the blocks of `setup.sizes` by evodsp, OpenFold and the formulas."""
    if absent := openfold_absent():
        yield Case("all", "OpenFold", "", lambda: [Measured("absent", None, note=absent)])
    for kind, first, residues in () if absent else setup.sizes.checks:
        for dtype in (torch.float32, torch.bfloat16) if kind in _KINDS else ():
            name = "fp32" if dtype == torch.float32 else "bf16-mixed"
            yield Case(
                f"{kind} {first} x {residues}", "OpenFold", name, partial(_compare, setup, kind, first, residues, dtype)
            )
    for kind, first, residues in setup.sizes.blocks:
        for inputs, name in _INPUTS.items() if kind in _KINDS else ():
            own = {"triton": partial(block, kernels=_chosen(setup))} if "triton" in setup.present else {}
            for backend, make in (own | _makers()).items():
                measure = partial(_timed, setup, make, kind, first, residues, inputs)
                yield Case(f"{kind} {first} x {residues}", backend, name, measure)


def compiled_cases(setup: Setup) -> Iterator[Case]:
    """The first of the blocks by OpenFold and the formulas under torch.compile, which takes minutes: a part of its own."""
    kind, first, residues = next(block for block in setup.sizes.blocks if block[0] in _KINDS)
    inputs = torch.bfloat16
    for backend, make in _makers().items():
        measure = partial(_timed, setup, partial(make, compiled=True), kind, first, residues, inputs, compiled=True)
        yield Case(f"{kind} {first} x {residues}", f"{backend}, compiled", _INPUTS[inputs], measure)


MakeBlock = Callable[..., Step]
_KINDS = ("evoformer", "extra")
_INPUTS = {torch.bfloat16: "bf16-mixed, bf16 m and z", torch.float32: "bf16-mixed, fp32 m and z"}


def _makers() -> dict[str, MakeBlock]:
    """The peers that are here."""
    return ({} if openfold_absent() else {"OpenFold": openfold_block}) | {"reference": partial(block, kernels=FORMULAS)}


def _chosen(setup: Setup) -> Kernels:
    return chosen("triton", setup.device, torch.bfloat16)[0]


def _compare(setup: Setup, kind: str, first: int, residues: int, dtype: torch.dtype) -> Iterator[Measured]:
    config = config_of(setup.sizes)
    found = openfold_outputs_equal(config, kind, first, residues, setup.device, dtype, inputs_dtype=dtype)
    yield Measured("difference from evodsp's formulas", found, "", "outputs, and gradients of m and z; no dropout")


def _timed(
    setup: Setup, make: MakeBlock, kind: str, first: int, residues: int, inputs: torch.dtype, compiled: bool = False
) -> Iterator[Measured]:
    if kind == "extra" and make is openfold_block:
        yield Measured("stand-in", None, note=STAND_IN)
    step = make(config_of(setup.sizes), kind, first, residues, setup.device, torch.bfloat16, inputs_dtype=inputs)
    yield from measured(setup, step, replay=not compiled)

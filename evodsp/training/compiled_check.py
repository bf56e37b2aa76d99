"""Compares small compiled blocks with the same ones uncompiled, on the device of the run and in its precision.

A compiler may be wrong without a word: torch 2.11 made gradients 0 that are not. A run that trains on such numbers looks like
one that learns slowly. Therefore each kind of block is compiled once at a small size before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from evodsp.model.alphafold import AlphaFold
from evodsp.model.casts import CastParameters
from evodsp.model.dropout import DropoutKeys, block_streams, draw_blocks
from evodsp.model.evoformer import EvoformerBlock
from evodsp.model.precision import activation_dtype
from evodsp.model.primitives import use_exchange, use_kernels
from evodsp.rng import Draws

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Largest difference of results and gradients, as a fraction of their own root mean square. fp32 allows for TF32."""
_LEAST = 0.1
"""Some gradients of parameters are nothing but rounding errors, such as that of a constant added to all logits. A difference is
a fraction of at least this share of the largest of all parameters' gradients."""
_SEQUENCES, _RESIDUES = 8, 16


def problem_of_compiling(
    model: AlphaFold, device: torch.device, precision: Callable[[], AbstractContextManager[Any]], backend: Any
) -> str:
    """What is wrong with blocks as torch.compile makes them; '' if they compute what they do uncompiled.

    `precision`: makes the context of a forward pass, such as autocast. `backend`: of torch.compile. All ranks of a sequence
    group call this together. The random numbers of the run stay as they are.
    """
    for name, region, inputs, fixed in _cases(model, device, precision):
        try:
            expected = _results(region, region, inputs, fixed, precision)
            compiled = torch.compile(region, fullgraph=True, dynamic=False, backend=backend)
            found = _results(region, compiled, inputs, fixed, precision)
        except Exception as error:  # whatever it is, a run cannot be compiled so
            said = " ".join(str(error).split("\n")[:2])  # torch's first line may only name the backend
            return f"{name}: {type(error).__name__}: {said.strip()}"
        finally:
            torch.compiler.reset()  # graphs of small sizes would be asked first whether they fit, at each call
        if difference := _difference(found, expected):
            return f"{name}: {difference}"
    return ""


def _cases(
    model: AlphaFold, device: torch.device, precision: Callable[[], AbstractContextManager[Any]]
) -> Iterator[tuple[str, nn.Module, list[Tensor], tuple[Any, ...]]]:
    """Yields a name, a half of a block, its inputs that get gradients, and the others."""
    config, channels = model.config, model.config.channels
    exchange, kernels, dtype = model.exchange, model.evoformer.kernels, next(model.parameters()).dtype
    sequences, residues = max(_SEQUENCES, exchange.ranks), max(_RESIDUES, exchange.ranks)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    for extra, c_m, settings in (
        (False, channels.msa, config.evoformer),
        (True, channels.extra_msa, config.extra_msa),
    ):
        with torch.random.fork_rng(devices=[]):
            block = EvoformerBlock(c_m, channels.pair, settings, extra).to(device, dtype)
        with torch.no_grad():
            for parameter in block.parameters():  # with the zeros that a model begins with, most gradients would be 0
                parameter.add_(0.1 * random(*parameter.shape))
        use_exchange(block, exchange, model.plan)
        use_kernels(block, kernels)
        keys = DropoutKeys.of(block_streams([block], [Draws.root(0)]), device)
        (dropout,) = draw_blocks([block], keys, residues, kernels)
        with precision():
            activations = activation_dtype(next(block.parameters()))
        msa, pair = random(1, sequences, residues, c_m), random(1, residues, residues, channels.pair)
        m, z = exchange.shard(msa, "seq").to(activations), exchange.shard(pair, "j").to(activations)
        msa_mask, pair_mask = ((random(1, n, residues) > -1).to(dtype) for n in (sequences, residues))
        name = "a block's MSA stack" if not extra else "an extra block's MSA stack"
        yield name, block.msa_stack, [m, z], (msa_mask, pair_mask, dropout)
        if not extra:  # the other stack's differs in sizes only
            yield "a block's pair stack", block.pair_stack, [z], (pair_mask, dropout)


def _results(
    region: nn.Module,
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    fixed: Sequence[Any],
    precision: Callable[[], AbstractContextManager[Any]],
) -> dict[str, Tensor]:
    """What the function, which computes what the region does, returns, and all gradients, by name."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with precision(), CastParameters(region):
        results = function(*leaves, *fixed)
    results = results if isinstance(results, tuple) else (results,)
    upstream = [torch.linspace(-1, 2, x.numel(), device=x.device).to(x.dtype).view(x.shape) for x in results]
    parameters = dict(region.named_parameters())
    gradients = torch.autograd.grad(results, [*leaves, *parameters.values()], upstream, materialize_grads=True)
    names = [f"result {n + 1}" for n in range(len(results))]
    names += [f"the gradient of input {n + 1}" for n in range(len(leaves))]
    names += [_OF_PARAMETER + name for name in parameters]
    return dict(zip(names, [x.detach() for x in (*results, *gradients)], strict=True))


_OF_PARAMETER = "the gradient of "


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """The first of these that differs, in words; '' if none does."""
    sizes = {name: _size(x) for name, x in expected.items()}
    # Parameters come last.
    of_parameters = {name for name in expected if name.startswith(_OF_PARAMETER) and " input " not in name}
    least = _LEAST * max(sizes[name] for name in of_parameters)
    tolerance = max(_TOLERANCE[x.dtype] for x in expected.values())
    for name, x in expected.items():
        if found[name].shape != x.shape:
            return f"{name} has shape {list(found[name].shape)} instead of {list(x.shape)}"
        difference = _size(found[name].to(x.dtype) - x) / max(sizes[name], least if name in of_parameters else 0.0)
        if not difference <= tolerance:  # NaN is no good either
            return f"{name} differs by {difference:.1e} of its size, more than {tolerance:.0e}"
    return ""


def _size(x: Tensor) -> float:
    """The root mean square."""
    return float(x.to(torch.promote_types(x.dtype, torch.float32)).square().mean().sqrt())

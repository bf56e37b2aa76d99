"""Operators of other programs that compute the same on a GPU: torch's fused attention, and NVIDIA's cuEquivariance.

cuEquivariance is two packages, cuequivariance-torch and cuequivariance-ops-torch, which need platformdirs and nvidia-ml-py.
What is not installed gives a reason, not an error.

Shape legend: B batch, N rows (each attends within itself), L positions, Q of them as queries, H heads, D head width, R
residues.
"""

from __future__ import annotations

import importlib

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from evodsp.model.layers import TriangleMultiplication


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

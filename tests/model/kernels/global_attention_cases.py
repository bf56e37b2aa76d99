"""What tests of Triton's global attention do inside the interpreting process. Shapes are (B, s, r, H, D)."""

from __future__ import annotations

import torch
from torch import Tensor

from evodsp.model.kernels.triton import global_attention
from evodsp.parallel.exchange import added_softmax_sums
from tests.model.kernels.interpreter import check, far_apart, random

Shape = tuple[int, int, int, int, int]


def in_shards(q: Tensor, key_value: Tensor, keys: Tensor, shards: int) -> Tensor:
    """The average of v over all sequences, from the sums of each shard, put together as ranks do it."""
    parts = zip(*(x.tensor_split(shards, 1) for x in (key_value, keys)), strict=True)
    sums = added_softmax_sums(torch.stack([global_attention(q, *part) for part in parts]))
    return (sums[..., :-1] / sums[..., -1:]).to(q.dtype)


def formula(q: Tensor, key_value: Tensor, keys: Tensor, shards: int) -> Tensor:
    """The softmax average over all sequences."""
    k, v = key_value.unbind(3)
    logits = torch.einsum("brhd,bsrd->brhs", q, k) / q.shape[-1] ** 0.5
    absent = (keys == 0).all(1)[:, :, None, None]  # as in fp32, -1e9 swallows these logits
    logits = torch.where(
        absent, logits - logits.detach(), logits + ((keys.double() - 1) * 1e9).transpose(1, 2).unsqueeze(2)
    )
    return torch.einsum("brhs,bsrd->brhd", logits.softmax(-1), v)


def agrees(shape: Shape, dtype: torch.dtype, shards: int, seed: int = 0, apart: bool = False) -> None:
    """`apart`: with 2^30 elements between sequences."""
    b, s, r, h, d = shape
    draw = random(seed, dtype)
    tensors = {"q": draw(b, r, h, d), "key_value": draw(b, s, r, 2, d)}
    keys = (torch.rand(b, s, r, generator=torch.Generator().manual_seed(seed)) < 0.7).to(dtype)
    keys[:, :, :1] = 0

    def layout(name: str, x: Tensor) -> Tensor:
        return far_apart(x, 1, (1 << 30) - 16) if apart and name == "key_value" else x

    check(in_shards, formula, tensors, {"keys": keys, "shards": shards}, layout)


def operators_are_sound() -> None:
    draw = random(1, torch.float32)
    inputs = [draw(2, 3, 4, 8), draw(2, 5, 3, 2, 8)]
    torch.library.opcheck(
        torch.ops.evodsp.global_attention.default,
        (*(x.requires_grad_() for x in inputs), torch.ones(2, 5, 3)),
        test_utils=("test_schema", "test_faketensor"),
    )

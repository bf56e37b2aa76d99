"""A training or inference step of one case on this rank's device, as the paper's appendix A.2 describes it.

bf16, with fp32 weights in the optimizer (Adam). ZeRO-2 over all ranks (FSDP2 that keeps the gathered weights), except for the
tensor parallel methods: the paper does not use it for Megatron-SP. They hold all of their slice, and average gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from evodsp.parallel import average_gradients, init_mesh

from .experiments import Case
from .methods import Groups, Parallel, method_named
from .methods.megatron_tp import TensorParallelMethod
from .transformer import Transformer

LEARNING_RATE = 1e-4


def built(case: Case, device: torch.device) -> tuple[Callable[[], None], Parallel]:
    """A step of the case and the model. Every rank of the default group calls it.

    Raises UserError if the method cannot spread the model over this number of ranks.
    """
    method, workload = method_named(case.method), case.workload
    config = workload.config
    method.check(config, config.token_sizes(workload.latents), case.sequence)
    mesh = init_mesh(case.sequence, device.type)
    torch.manual_seed(0)
    with torch.device(device):
        parallel = method.apply(Transformer(config), Groups(mesh.sequence_group().handle))
        torch.manual_seed(1 + mesh.data_rank)  # the ranks of a sequence group share their samples
        latents = torch.randn(workload.latents, dtype=torch.bfloat16)
    if not case.training:
        return _inference(parallel.bfloat16(), latents), parallel
    if isinstance(method, TensorParallelMethod):
        optimizer: Optimizer = MasterAdam(parallel.bfloat16())

        def reduce() -> None:
            method.reduce_gradients(parallel)
            average_gradients(parallel.parameters(), mesh.data_group())
    else:
        _shard(parallel, device)
        optimizer = ShardedAdam(parallel)

        def reduce() -> None:
            """FSDP2 has averaged over all ranks."""

    return _training(parallel, latents, reduce, optimizer), parallel


def _shard(parallel: Parallel, device: torch.device) -> None:
    """ZeRO-2: gradients and optimizer sharded over all ranks; weights stay whole from the forward to the backward pass."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in parallel.model.blocks:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    fully_shard(parallel, mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def _inference(parallel: Parallel, latents: Tensor) -> Callable[[], None]:
    def step() -> None:
        _forget(parallel)
        with torch.no_grad():
            parallel(latents)

    return step


def _training(
    parallel: Parallel, latents: Tensor, reduce: Callable[[], None], optimizer: Optimizer
) -> Callable[[], None]:
    def step() -> None:
        _forget(parallel)
        parallel(latents).float().square().mean().backward()
        reduce()
        optimizer.step()

    return step


def _forget(parallel: Parallel) -> None:
    """Ledgers would grow from step to step."""
    for ledger in (parallel.groups.layer_ledger, parallel.groups.end_ledger):
        ledger.entries.clear()


class ShardedAdam:
    """Adam on the shards that FSDP2 leaves this rank, which are fp32."""

    def __init__(self, model: nn.Module) -> None:
        self._adam = torch.optim.AdamW(model.parameters(), LEARNING_RATE)

    def step(self) -> None:
        """Update the weights and drop the gradients."""
        self._adam.step()
        self._adam.zero_grad()


class MasterAdam:
    """Adam on fp32 copies of bf16 weights, as Megatron has it."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = list(model.parameters())
        self._masters = [weight.detach().float() for weight in self._weights]
        self._adam = torch.optim.AdamW(self._masters, LEARNING_RATE)

    def step(self) -> None:
        """Update the weights and drop the gradients."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self._adam.step()
        self._adam.zero_grad()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)


Optimizer = ShardedAdam | MasterAdam

"""Parameters sharded by FSDP2, under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evodsp.model.alphafold import AlphaFold
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import Linear
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from evodsp.training.world import shard_parameters
from tests.builders.small_model import config, features, tensors
from tests.ranks import RankPool

Measured = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, torch.dtype]]


def measured(group: object, sharded: bool, recompute: bool) -> Measured:
    """Outputs of the same sample on every rank under bf16 autocast, gradients, and the precision in which each layer's weight
    was used. `recompute`: whole blocks; otherwise the projections of attention."""
    model = dense(AlphaFold(config(recompute, projections=not recompute))).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    names = [name for name, _ in model.named_parameters()]
    casts = CastParameters(model)
    if sharded:
        shard_parameters(model, torch.bfloat16)
    used: dict[str, torch.dtype] = {}

    def note(name: str, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(lambda module, _: used.__setitem__(name, module.weight.dtype))

    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            note(name, layer)
    batch = {name: x.float() if x.is_floating_point() else x for name, x in features(1).items()}
    with casts:  # in the backward pass too, which recomputes activations
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            found = tensors(model(batch, [Draws.root(0)]))
        torch.stack([value.float().square().mean() for value in found.values()]).sum().backward()
    gradients = {}
    for name, parameter in zip(names, model.parameters(), strict=True):
        gradient = parameter.grad
        assert gradient is not None, name
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return {name: value.detach() for name, value in found.items()}, gradients, used


@pytest.mark.verify_but("True")
@pytest.mark.parametrize("recompute", [True, False])
def test_blocks_gather_their_parameters_in_half_precision(pool: RankPool, recompute: bool) -> None:
    """Catches parameters that are gathered in float32 and cast at each use, gradients summed in half precision or scaled, a
    part that computes in float32 but gets cast parameters, and projections from parameters that have been freed."""
    expected, expected_gradients, _ = measured(None, False, True)
    for outputs, gradients, used in pool.run(4, measured, True, recompute):
        for name, value in outputs.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32, name
            assert (gradient - expected_gradients[name]).norm() <= 2**-7 * expected_gradients[name].norm(), name
        in_blocks = {used[name] for name in used if "msa_stack" in name or "pair_stack" in name}
        assert in_blocks == {torch.bfloat16}, used
        assert {used[name] for name in used if name.startswith("structure_module")} == {torch.float32}, used

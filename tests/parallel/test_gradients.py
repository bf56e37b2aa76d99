"""`average_gradients`: the mean over ranks, for programs without DDP."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evodsp.parallel import average_gradients, functional, init_mesh
from evodsp.parallel.group import Group
from tests.ranks import RankPool


def parameter(*shape: int, dtype: torch.dtype = torch.float32, gradient: float | None = None) -> nn.Parameter:
    """A parameter whose gradient has this value plus the number of each element."""
    made = nn.Parameter(torch.zeros(shape, dtype=dtype))
    if gradient is not None:
        made.grad = (gradient + torch.arange(made.numel())).view(shape).to(dtype)
    return made


def mixed(rank: int) -> dict[str, nn.Parameter]:
    """Parameters of several types and shapes; some have no gradient on some ranks."""
    turned = parameter(2, 3)
    turned.grad = (rank + torch.arange(6.0)).view(3, 2).T
    return {
        "every rank": parameter(3, gradient=rank),
        "first rank": parameter(2, 2, gradient=8.0 if rank == 0 else None),
        "no rank": parameter(4),
        "double": parameter(5, dtype=torch.float64, gradient=2.0 * rank),
        "frozen": parameter(2, gradient=rank).requires_grad_(False),
        "bfloat16": parameter(2, dtype=torch.bfloat16, gradient=4.0 * rank),
        "empty": parameter(0, 3, gradient=0.0),
        "scalar": parameter(gradient=rank),
        "turned": turned,
        "double again": parameter(3, dtype=torch.float64, gradient=-rank),
    }


def averaged(handle: Any, bucket: int | None) -> tuple[dict[str, Tensor | None], list[int]]:
    """The gradients after averaging, and the number of elements of each all-reduce."""
    parameters, sizes, reduce = mixed(dist.get_rank(handle)), [], Group.all_reduce

    def counted(group: Group, x: Tensor) -> Any:
        sizes.append(x.numel())
        return reduce(group, x)

    bucketed = mock.patch.object(functional, "BUCKET", bucket if bucket is not None else functional.BUCKET)
    with bucketed, mock.patch.object(Group, "all_reduce", counted):
        average_gradients((p for p in parameters.values()), handle)
        average_gradients([parameters["frozen"]], handle)
    return {name: p.grad for name, p in parameters.items()}, sizes


def test_the_mean_over_ranks(pool: RankPool) -> None:
    """Catches a sum, a parameter that some ranks did not use and that therefore stops the group or counts too much, a gradient
    made up for one that none used, types that are mixed, and gradients that are not contiguous."""
    for ranks, bucket in ((2, None), (3, 4)):
        ordinals = [mixed(rank) for rank in range(ranks)]
        for found, sizes in pool.run(ranks, averaged, bucket):
            for name, gradient in found.items():
                if name in ("no rank", "frozen"):
                    continue
                parts = [o[name].grad for o in ordinals]
                total = sum(part.double() for part in parts if part is not None)
                assert gradient is not None
                assert gradient.dtype == ordinals[0][name].dtype
                torch.testing.assert_close(
                    gradient.double(), total / ranks, rtol=1e-2 if name == "bfloat16" else 1e-6, atol=0
                )
            assert found["no rank"] is None
            # First which parameters were used. One bucket for each run of parameters of one type, or of four numbers at most.
            assert sizes == [9, 7, 5, 2, 7, 3] if bucket is None else [9, 3, 4, 5, 2, 1, 6, 3]


def test_frozen_parameters_keep_their_gradients(pool: RankPool) -> None:
    """Catches gradients of frozen parameters that are averaged, and a group that hangs on an empty list."""
    for rank, (found, _) in enumerate(pool.run(2, averaged, None)):
        assert found["frozen"] is not None
        assert torch.equal(found["frozen"], rank + torch.arange(2.0))


def over_a_mesh(handle: Any) -> tuple[Tensor | None, Tensor | None]:
    """The mean over all ranks of a mesh, and over its sequence group."""
    mesh = init_mesh(sequence=2)
    both = [parameter(2, gradient=float(dist.get_rank())) for _ in range(2)]
    average_gradients(both[:1], mesh)
    average_gradients(both[1:], mesh.sequence_group())
    return both[0].grad, both[1].grad


def test_a_mesh_names_all_of_its_ranks(pool: RankPool) -> None:
    """Catches samples of other data ranks that are left out: with a mesh, the mean is over sequence and data ranks."""
    for rank, (everywhere, sequence) in enumerate(pool.run(4, over_a_mesh)):
        assert everywhere is not None
        assert torch.equal(everywhere, 1.5 + torch.arange(2.0))
        assert sequence is not None
        assert torch.equal(sequence, (0.5 if rank < 2 else 2.5) + torch.arange(2.0))

"""Ranks that share one GPU, to check sharded kernels where there is no second GPU. For correctness only.

NCCL needs a GPU for each rank. Here ranks exchange copies on the host, by gloo, and everything else is as on several GPUs:
each rank computes its shards by the GPU's kernels. What this cannot show is in `UNSEEN`.

A random sample has features of the model, and labels for every term of the loss.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evodsp.config import LossConfig, ModelConfig
from evodsp.geometry.frames import structure_labels
from evodsp.geometry.residues import RESTYPE_ATOM14_MASK, RESTYPE_ATOM37_MASK
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.graphs import Graphs, use_graphs
from evodsp.model.kernels import BACKENDS
from evodsp.model.kernels.operators import Kernels
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_exchange, use_kernels
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group
from evodsp.planner.program import SampleSizes
from evodsp.rng import Draws
from evodsp.weights.command import randomise

EVERY_TERM = LossConfig(experimentally_resolved=0.01, violation=1.0, pae=0.1)
"""The weights of fine-tuning: every term of the loss is computed."""


def random_features(
    sequences: int, extra: int, residues: int, templates: int = 0, cycles: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """Processed features of one sample, of shapes [1, cycles, ...] and without padding. They are a function of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    s, e, r, t = sequences, extra, residues, templates

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, cycles, *shape, generator=generator)

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, (1, cycles, *shape), generator=generator, dtype=torch.int32)

    def ones(*shape: int) -> Tensor:
        return torch.ones(1, cycles, *shape)

    features = {
        "aatype": integers(20, r)[:, :1].expand(-1, cycles, -1),
        "residue_index": torch.arange(r, dtype=torch.int32).expand(1, cycles, r),
        "seq_mask": ones(r),
        "target_feat": normal(r, 22),
        "msa_feat": normal(s, r, 49),
        "msa_mask": ones(s, r),
        "extra_msa": integers(23, e, r),
        "extra_msa_mask": ones(e, r),
        "extra_has_deletion": normal(e, r).sign().clamp(min=0),
        "extra_deletion_value": normal(e, r),
    }
    if templates:
        features |= {
            "template_aatype": integers(22, t, r),
            "template_all_atom_positions": 10 * normal(t, r, 37, 3),
            "template_all_atom_masks": ones(t, r, 37),
            "template_pseudo_beta": 10 * normal(t, r, 3),
            "template_pseudo_beta_mask": ones(t, r),
            "template_mask": ones(t),
        }
    return features


def with_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The features `batch` of one sample with labels for every term of the loss: atoms anywhere within 20 Å or so."""
    generator = torch.Generator().manual_seed(1)
    passes, sequences, residues = batch["msa_feat"].shape[1:4]
    aatype = batch["aatype"][0, 0].long()
    exists = torch.from_numpy(RESTYPE_ATOM37_MASK).float()[aatype]
    positions = 10 * torch.randn(residues, 37, 3, generator=generator) * exists[..., None]
    labels = {name: value[None] for name, value in structure_labels(aatype, positions, exists).items()}
    features = {
        "atom37_atom_exists": exists,
        "atom14_atom_exists": torch.from_numpy(RESTYPE_ATOM14_MASK).float()[aatype],
        "true_msa": torch.randint(22, (sequences, residues), generator=generator),
        "bert_mask": (torch.rand(sequences, residues, generator=generator) < 0.15).float(),
    }
    return {
        **labels,
        **batch,
        **{name: value.expand(1, passes, *value.shape) for name, value in features.items()},
        "resolution": torch.tensor([2.0]),
    }


STACK, MODEL = 1e-5, 1e-4
"""Largest difference from one rank in float32, as a fraction of the largest number of each result. In the whole model the
geometry of random atoms amplifies rounding: perturbing every parameter by 6e-8 of itself changes as much."""
SLACK = 1.5
"""Allowed ratio of errors in bf16-mixed: several ranks over one rank, both against float32."""
UNSEEN = (
    "NCCL itself, and that each rank takes its own GPU",
    "collectives that overlap with computation, on streams of their own",
    "the speed of anything that communicates, and peak memory of a rank",
    "graphs of torch.compile or CUDA that contain collectives",
    "zero1 and fsdp2, whose exchanges are torch's, over several ranks",
)
"""Checks that need several GPUs."""


@dataclass
class _Returning:
    """An exchange between copies on the host, whose result goes back to the device."""

    work: Any
    to: Tensor
    copy: Tensor
    sent: Tensor | None = field(default=None, repr=False)
    """Kept until the exchange is done."""

    def wait(self) -> None:
        self.work.wait()
        self.to.copy_(self.copy)
        self.sent = None


class HostGroup(Group):
    """A group that exchanges copies on the host, made when an exchange begins. Tensors may be on any device."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        """`handle`: connected by gloo."""
        super().__init__(handle)
        self._host = Group(handle)
        self.exchanges = 0
        """Number of exchanges begun."""

    def all_to_all(self, received: Tensor, sent: Tensor, arriving: Sequence[int], leaving: Sequence[int]) -> Any:
        return self._copied(received, sent, lambda to, values: self._host.all_to_all(to, values, arriving, leaving))

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        return self._copied(received, sent, self._host.all_gather)

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> Any:
        return self._copied(received, sent, self._host.reduce_scatter)

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Any:
        return self._in_place(x, lambda copy: self._host.all_reduce(copy, maximum))

    def broadcast(self, x: Tensor, root: int) -> Any:
        return self._in_place(x, lambda copy: self._host.broadcast(copy, root))

    def reduce(self, x: Tensor, root: int) -> Any:
        return self._in_place(x, lambda copy: self._host.reduce(copy, root))

    def _copied(self, received: Tensor, sent: Tensor, exchange: Callable[[Tensor, Tensor], Any]) -> _Returning:
        to, values = torch.empty(received.shape, dtype=received.dtype), _on_host(sent)
        self.exchanges += 1
        return _Returning(exchange(to, values), received, to, values)

    def _in_place(self, x: Tensor, exchange: Callable[[Tensor], Any]) -> _Returning:
        copy = _on_host(x)
        self.exchanges += 1
        return _Returning(exchange(copy), x, copy)


def _on_host(x: Tensor) -> Tensor:
    """A copy, also where `x` is on the host: what is sent may not be what a rank computes with."""
    return x.detach().to("cpu", copy=True)


Module = TypeVar("Module", bound=nn.Module)
Results = dict[str, Tensor]
"""Results of one rank by name; their mean over the ranks is the result."""


@dataclass(frozen=True)
class Setting:
    """Setting of a rank's computation."""

    exchange: Exchange
    device: torch.device
    dtype: torch.dtype
    """float32, or bfloat16 for bf16-mixed."""
    graphs: Graphs | None = None
    """Records the stacks; None: they are launched."""

    def prepared(self, module: Module) -> Module:
        """A module on the device with dense random parameters, this rank's exchange and the device's kernels.

        Half of the units before a ReLU are always on, the others off: one near zero, switched by rounding, is no mistake.
        """
        randomise(module)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.ndim > 1:
                    parameter.mul_(0.5)
                elif name.endswith("widen.bias"):
                    parameter.copy_(8 * parameter.sign())
        backend = importlib.import_module(BACKENDS["triton" if self.device.type == "cuda" else "chunked"].module)
        use_kernels(module, Kernels.of(backend))
        use_exchange(module, self.exchange)
        use_graphs(module, self.graphs)
        return module.to(self.device)

    def gradients(self, module: nn.Module, compute: Callable[[], tuple[Tensor, Results]], leaves: Results) -> Results:
        """The results that `compute` returns beside the loss, and the gradients of the loss."""
        casts = CastParameters(module)
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16, cache_enabled=False
        ):
            casts.make()
            loss, found = compute()
        loss.backward()
        casts.drop()
        of = {**leaves, **dict(module.named_parameters())}
        return {
            **{name: x.detach().float() for name, x in found.items()},
            **{f"gradient of {name}": x.grad.float() for name, x in of.items() if x.grad is not None},
        }


def stack(config: ModelConfig, extra: bool, sizes: SampleSizes, setting: Setting) -> Results:
    """Blocks with dropout, from whole random representations to their gradients."""
    c_m, c_z = (config.channels.extra_msa if extra else config.channels.msa), config.channels.pair
    module = EvoformerStack(c_m, c_z, config.extra_msa if extra else config.evoformer, extra)
    module = setting.prepared(module)
    generator = torch.Generator().manual_seed(1)
    s, r, exchange = sizes.extra if extra else sizes.clusters, sizes.residues, setting.exchange
    shapes = {"m": (1, s, r, c_m), "z": (1, r, r, c_z)}
    given = {name: torch.randn(shape, generator=generator).to(setting.device) for name, shape in shapes.items()}
    weights = {name: torch.randn(shape, generator=generator).to(setting.device) for name, shape in shapes.items()}
    leaves = {name: x.to(setting.dtype).requires_grad_() for name, x in given.items()}
    masks = [(torch.rand(shape[:3], generator=generator) > 0.1).float().to(setting.device) for shape in shapes.values()]
    keys = DropoutKeys.of(module.dropout_streams([Draws.root(0).at(0)]), setting.device)

    def compute() -> tuple[Tensor, Results]:
        m, z = module(exchange.shard(leaves["m"], "seq"), exchange.shard(leaves["z"], "j"), *masks, keys)
        axis = module.result_axis  # along which m leaves in shards
        loss = (m.float() * exchange.shard(weights["m"], axis)).sum()
        loss = loss + (z.float() * exchange.shard(weights["z"], "j")).sum()
        whole = {
            "m": exchange.gather(m.detach(), axis, s if axis == "seq" else r),
            "z": exchange.gather(z.detach(), "j", r),
        }
        return exchange.ranks * loss, whole

    return setting.gradients(module, compute, leaves)


def whole_model(config: ModelConfig, sizes: SampleSizes, setting: Setting) -> Results:
    """The model with templates and dropout, and every term of the loss."""
    module = setting.prepared(AlphaFold(config))
    features = random_features(sizes.clusters, sizes.extra, sizes.residues, sizes.templates)
    batch = {name: x.to(setting.device) for name, x in with_labels(features).items()}

    def compute() -> tuple[Tensor, Results]:
        output = module(batch, [Draws.root(0)])
        loss, terms = total_loss(output, batch, EVERY_TERM, config.heads, setting.exchange)
        return loss, terms | {"atoms": output.structure.atom14, "torsion angles": output.structure.angles}

    return setting.gradients(module, compute, {})


@dataclass(frozen=True)
class Subject:
    """A part of the model that is compared."""

    name: str
    compute: Callable[[Setting], Results]
    tolerance: float


def subjects(device: torch.device) -> list[Subject]:
    """Full widths, few blocks, sizes that no number of ranks divides."""
    config = ModelConfig.preset("model_1_ptm")
    config = dataclasses.replace(
        config,
        evoformer=dataclasses.replace(config.evoformer, blocks=2),
        extra_msa=dataclasses.replace(config.extra_msa, blocks=1),
        templates=dataclasses.replace(config.templates, blocks=1),
        structure_module=dataclasses.replace(config.structure_module, iterations=2),
    )
    # On a GPU longer than the tiles of the kernels, so that shards begin within one.
    sizes = SampleSizes(73, 47, 149, 3) if device.type == "cuda" else SampleSizes(13, 11, 17, 3)
    return [
        Subject("Evoformer", partial(stack, config, False, sizes), STACK),
        Subject("extra-MSA stack", partial(stack, config, True, sizes), STACK),
        Subject("whole model and loss", partial(whole_model, config, sizes), MODEL),
    ]


def shared(world: Group, device: torch.device) -> str:
    """Compare 2 to `world.size` ranks that share `device` with one rank, in float32 and in bf16-mixed."""
    groups = [HostGroup(handle) if handle else None for handle in _handles(world)]
    lines: list[str] = []
    for subject in subjects(device):
        # The other ranks wait at the barrier, and find kernels compiled.
        alone = both(subject, LocalExchange(), device) if world.rank == 0 else []
        dist.barrier()
        for size, group in enumerate(groups, 2):
            if group is None:
                continue
            before = group.exchanges
            found = [mean_of(results, group) for results in both(subject, ShardedExchange(group), device)]
            if world.rank == 0:
                text = compared(found, alone, subject.tolerance)
                lines.append(f"{subject.name} on {size} ranks, {group.exchanges - before} exchanges: {text}")
    return "\n".join([*lines, "only several GPUs can show:", *(f"  {line}" for line in UNSEEN)])


def both(
    subject: Subject, exchange: Exchange, device: torch.device, graphs: Callable[[], Graphs | None] = lambda: None
) -> list[Results]:
    """The results in float32 and in bf16-mixed. `graphs`: makes what records the stacks of each."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        recorded = graphs()
        found.append(subject.compute(Setting(exchange, device, dtype, recorded)))
        if recorded is not None:
            recorded.free()
            if recorded.given_up or not recorded.replays:
                raise AssertionError(recorded.given_up or f"nothing of {subject.name} was replayed")
    return found


def compared(found: Sequence[Results], alone: Sequence[Results], tolerance: float) -> str:
    """The difference of several ranks' results from one rank's, in words. Each pair: in float32 and in bf16-mixed.

    Raises AssertionError if it is larger than `tolerance` in float32, or than `SLACK` allows in bf16-mixed.
    """
    exact, half = alone
    scales = _scales(exact)
    errors = {name: float((found[0][name] - exact[name]).abs().max()) / scales[name] for name in exact}
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    text = f"{len(exact)} results agree to {errors[worst]:.0e} of the largest number in float32 ({worst})"
    if not errors[worst] <= tolerance:
        raise AssertionError(f"{text}; allowed is {tolerance:.0e}")
    ours, theirs = (_root_mean_square(x, exact, scales) for x in (found[1], half))
    text += f"; in bf16-mixed they differ from it by {ours:.1e}, and one rank by {theirs:.1e}"
    if not ours <= SLACK * theirs:
        raise AssertionError(f"{text}; allowed is {SLACK} times as much")
    return text


def _scales(exact: Results) -> dict[str, float]:
    """The size by which errors of each result are divided: its largest number, or a hundredth of that of all gradients.

    Some gradients are zero but for rounding, such as that of a number that is added to all logits of a softmax.
    """
    largest = {name: float(x.abs().max()) for name, x in exact.items()}
    floor = 1e-2 * max(value for name, value in largest.items() if name.startswith("gradient"))
    return {name: max(value, floor) if name.startswith("gradient") else value for name, value in largest.items()}


def _root_mean_square(x: Results, exact: Results, scales: dict[str, float]) -> float:
    """Root mean square of the errors of all results, each as a fraction of its scale."""
    squares = [((x[name] - exact[name]) / scales[name]).square().mean() for name in exact]
    return float(torch.stack(squares).mean().sqrt())


def _handles(world: Group) -> list[dist.ProcessGroup | None]:
    """The process groups of the first 2, 3 … ranks; None where this rank is not in one."""
    made = [(size, dist.new_group(list(range(size)), backend="gloo")) for size in range(2, world.size + 1)]
    return [handle if world.rank < size else None for size, handle in made]


def mean_of(results: Results, group: Group) -> Results:
    """The mean over the ranks of what each has computed, on all of them."""
    vector = torch.cat([x.flatten() for x in results.values()])
    group.all_reduce(vector).wait()
    parts = (vector / group.size).split([x.numel() for x in results.values()])
    return {name: part.view(x.shape) for part, (name, x) in zip(parts, results.items(), strict=True)}

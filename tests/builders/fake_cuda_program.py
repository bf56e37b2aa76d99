"""Runs one `Case` on tensors that say they are on a GPU and returns its `Counts` (see `fake_cuda.py`)."""

from __future__ import annotations

# isort: off
import guard  # noqa: F401  (of ../shared/fake_cuda: before torch)

# isort: on
import collections
import dataclasses
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evodsp.config import EvoformerConfig, ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerStack, MSAStack, PairStack
from evodsp.model.kernels import triton
from evodsp.model.kernels.operators import Kernels
from evodsp.model.kernels.triton import REPORTS
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import Linear, use_exchange, use_kernels
from evodsp.parallel.collectives import shard_sizes
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group, Ledger
from evodsp.rng import Draws
from scripts.benchmarks.calling_lines import calling_lines
from tests.builders.fake_cuda import Case

torch.cuda.get_device_properties = lambda device: SimpleNamespace(shared_memory_per_block_optin=227 << 10)  # H100's

_NO_KERNEL = {
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "_unsafe_view", "lift_fresh",
    "view", "_reshape_alias", "reshape", "resize_", "is_same_size", "set_", "promote_types",
}  # fmt: skip
_SILENT = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "prim", "profiler", "rngprims"}
"""Namespaces whose operators are collectives, or launch nothing."""
_WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_consecutive"}


class Counter(TorchDispatchMode):
    """Counts launches and bytes of every operator that runs while it is entered."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        parameters = list(parameters)
        self._parameters = {p.untyped_storage()._cdata for p in parameters}
        self._largest = max(p.numel() for p in parameters)
        self._like_parameters = {(tuple(p.shape), p.dtype) for p in parameters}
        self.operators: collections.Counter[str] = collections.Counter()
        self.host: collections.Counter[str] = collections.Counter()
        self.launches = self.casts = self.bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._note_host(func, name, args, read, written)
        for x in written:
            storage = x.untyped_storage()
            self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if func.namespace in _SILENT or (func.namespace == "aten" and _is_view(func)):
            return out
        if func.namespace != "aten":
            name = f"{func.namespace}::{name}"
        overwritten = {id(kwargs[a.name]) for a in func._schema.arguments if a.is_out and a.name in kwargs}
        launches, moved = 1, sum(_bytes(x) for x in (*(x for x in read if id(x) not in overwritten), *written))
        if name in REPORTS:
            launches, moved = REPORTS[name](args, kwargs, out)
        elif name.startswith("_foreach"):
            launches = max(len(a) for a in args if isinstance(a, (list, tuple)))
        if self._casts_parameter(name, read, written):
            self.casts += 1
        else:
            self.launches += launches
        self.operators[name] += launches
        self.bytes += moved
        return out

    def _casts_parameter(self, name: str, read: list[Tensor], written: list[Tensor]) -> bool:
        """Whether this casts a parameter, or a gradient to its parameter's precision, or concatenates many for one cast."""
        if name == "_foreach_copy_":
            return True
        if name not in ("_to_copy", "cat"):
            return False
        x, y = read[0], written[0]
        if name == "cat":
            return y.ndim == 1 and y.numel() > self._largest
        return (
            x.untyped_storage()._cdata in self._parameters
            or (x.dtype != y.dtype and (tuple(y.shape), y.dtype) in self._like_parameters)
            or (y.ndim == 1 and y.numel() > self._largest)
        )

    def _note_host(self, func: Any, name: str, args: Any, read: list[Tensor], written: list[Tensor]) -> None:
        devices = {x.device.type for x in (*read, *written)}
        copies = devices >= {"cpu", "cuda"} and (
            name in ("_to_copy", "copy_") or any(x.device.type == "cpu" and x.ndim > 0 for x in read)
        )
        by_mask = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if copies or by_mask or name in _WAITS:
            self.host[f"{name} at {_place()}"] += 1

    def held(self, results: Iterable[Tensor]) -> int:
        """Bytes of what operators made here and something still holds, `results` aside."""
        left_out = {x.untyped_storage()._cdata for x in results}
        return sum(size for key, (ref, size) in self._made.items() if key not in left_out and not ref.expired())

    def summary(self) -> dict[str, Any]:
        """The fields of a `Pass`."""
        return {
            "launches": self.launches,
            "parameter_casts": self.casts,
            "bytes": self.bytes,
            "operators": dict(self.operators.most_common()),
            "host": dict(self.host),
        }


def _is_view(func: Any) -> bool:
    schema = func._schema
    return func.overloadpacket.__name__ in _NO_KERNEL or (
        not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
    )


def _bytes(x: Tensor) -> int:
    """Bytes of memory behind a tensor; an expanded axis counts once."""
    numbers = 1 if x.numel() else 0
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numbers *= size if stride != 0 else 1
    return numbers * x.element_size()


def _place() -> str:
    """The innermost line of the package that is running."""
    return next((f"{file}:{line}" for file, line in calling_lines(sys._getframe(1))), "autograd")


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """What autograd saves, each storage once."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._seen = {p.untyped_storage()._cdata for p in parameters}
        self.tensors: list[tuple[int, str]] = []
        self._held: list[Any] = []
        super().__init__(self._pack, lambda x: x)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._held.append(storage)  # so that no other storage gets its address
            self.tensors.append((storage.nbytes(), f"{list(x.shape)} {x.dtype} at {_place()}"))
        return x


def note_dtypes(model: nn.Module, parts: dict[str, nn.Module]) -> dict[str, list[str]]:
    """Have each part of `model` write down the precision of its results; returns where."""
    found: dict[str, list[str]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, out: Any) -> None:
            leaves = [
                x for x in tree_leaves(vars(out) if dataclasses.is_dataclass(out) else out) if isinstance(x, Tensor)
            ]
            found[name] = [str(x.dtype).removeprefix("torch.") for x in leaves]

        return hook

    for name, part in parts.items():
        part.register_forward_hook(note(name))
    return found


def stack_case(case: Case, exchange: ShardedExchange | None) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    """A stack, and its forward pass."""
    extra = case.what == "extra_msa"
    base = ModelConfig().extra_msa if extra else EvoformerConfig()
    c_m, c_z = (ModelConfig().channels.extra_msa if extra else ModelConfig().channels.msa), ModelConfig().channels.pair
    again = {"checkpoint": case.recompute, "checkpoint_projections": case.projections}
    config = dataclasses.replace(base, blocks=case.blocks, **again)
    stack = EvoformerStack(c_m, c_z, config, extra)
    s, r = shard_sizes(case.sequences, case.ranks)[0], shard_sizes(case.residues, case.ranks)[0]
    dtype = getattr(torch, case.inputs)
    m = torch.empty(1, s, case.residues, c_m, dtype=dtype, requires_grad=True)
    z = torch.empty(1, case.residues, r, c_z, dtype=dtype, requires_grad=True)
    masks = torch.empty(1, case.sequences, case.residues), torch.empty(1, case.residues, case.residues)
    draws = [Draws.root(0)] if case.dropout else []
    keys = DropoutKeys.of(stack.dropout_streams(draws))
    return stack, lambda: stack(m.view_as(m), z.view_as(z), *masks, keys)


def model_case(case: Case) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    """The whole model of model_1_ptm with few blocks, and its forward pass on a batch without numbers."""
    preset = ModelConfig.preset("model_1_ptm")
    templates = dataclasses.replace(preset.templates, enabled=case.templates > 0, checkpoint=case.recompute)
    stacks = {
        name: dataclasses.replace(getattr(preset, name), blocks=case.blocks, checkpoint=case.recompute)
        for name in ("extra_msa", "evoformer")
    }
    structure = preset.structure_module
    if case.iterations is not None:
        templates = dataclasses.replace(templates, blocks=case.iterations)
        structure = dataclasses.replace(structure, iterations=case.iterations)
    model = AlphaFold(dataclasses.replace(preset, templates=templates, structure_module=structure, **stacks))
    for module in model.modules():  # buffers are made from NumPy arrays
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to("cuda")
    s, e, r, t = case.sequences, case.extra_sequences, case.residues, case.templates
    shapes = {
        "seq_mask": (r,), "target_feat": (r, 22), "msa_feat": (s, r, 49), "msa_mask": (s, r),
        "extra_msa_mask": (e, r), "extra_has_deletion": (e, r), "extra_deletion_value": (e, r),
    }  # fmt: skip
    numbers = {"aatype": (r,), "residue_index": (r,), "extra_msa": (e, r)}
    if t:
        shapes |= {
            "template_all_atom_positions": (t, r, 37, 3), "template_all_atom_masks": (t, r, 37),
            "template_pseudo_beta": (t, r, 3), "template_pseudo_beta_mask": (t, r), "template_mask": (t,),
        }  # fmt: skip
        numbers |= {"template_aatype": (t, r)}
    batch = {name: torch.empty(1, 1, *shape) for name, shape in shapes.items()}
    batch |= {name: torch.empty(1, 1, *shape, dtype=torch.int32) for name, shape in numbers.items()}
    draws = [Draws.root(0)] if case.dropout else []

    def forward() -> tuple[Tensor, ...]:
        output = model(batch, draws)
        return (
            *output.representations.values(),
            output.structure.positions,
            output.structure.angles,
            *output.logits.values(),
        )

    return model, forward


def run(case: Case) -> dict[str, Any]:
    """The fields of `Counts`."""
    ledger, exchange = Ledger(), None
    if case.ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
        exchange = ShardedExchange(Group(dist.group.WORLD, ledger))
    Linear.reset_parameters = nn.LayerNorm.reset_parameters = lambda self: None  # type: ignore[method-assign]
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model, forward = model_case(case) if case.what == "model" else stack_case(case, exchange)
        if exchange is not None:
            use_exchange(model, exchange)
        if case.kernels == "triton":
            use_kernels(model, Kernels.of(triton))
        parts = {name: module for name, module in model.named_modules() if isinstance(module, (MSAStack, PairStack))}
        if isinstance(model, AlphaFold):
            parts |= {name: module for name, module in model.named_children() if name != "heads"}
            parts |= {f"heads.{name}": head for name, head in model.heads.items()}
        dtypes = note_dtypes(model, parts)
        parameters = list(model.parameters())
        first, second, saved = Counter(parameters), Counter(parameters), Saved(parameters)
        casts = CastParameters(model)
        bf16_mixed = torch.autocast("cuda", torch.bfloat16, enabled=case.autocast, cache_enabled=False)  # Lightning's
        with saved, first, bf16_mixed:
            if case.cast_once:
                casts.make()
            results = forward()
        kept = first.held(results)
        differentiable = [x for x in results if x.requires_grad]
        gradients = [torch.empty_like(x) for x in differentiable]
        with second:
            torch.autograd.backward(differentiable, gradients)
        casts.drop()
    return {
        "forward": first.summary(),
        "backward": second.summary(),
        "kept": kept,
        "saved": sorted(saved.tensors, reverse=True),
        "sent": [
            {"kind": e.kind, "phase": e.phase, "bytes": e.bytes, "element_size": e.bytes // max(1, e.elements)}
            for e in ledger.entries
        ],
        "dtypes": dtypes,
    }


def answer(**case: Any) -> dict[str, object]:
    """The fields of `Counts`, of the `Case` with these fields."""
    return run(Case(**case))

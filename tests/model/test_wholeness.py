"""On four ranks no rank ever holds a complete tensor of size R x R x c or S x R x c, in any part of a training step.

Every axis has a prime length that divides no channel count and no shard's length. So the number of entries of a tensor
that holds all R x R pairs is a multiple of R^2, whatever its shape, and no other tensor's is. The exceptions are the
design's: attention biases, one operand of the outer product mean, masks without channels, and the features as the
loader gives them. (All pairs for a shard of the CHANNELS are a shard. So are all logits of a row, if rows are sharded.)
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evodsp.config import ChannelsConfig, EvoformerConfig, LossConfig, ModelConfig, TemplateConfig
from evodsp.data.samples.dataset import existing_entries
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.kernels import chunked
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import DAP, CommunicationPlan
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group
from evodsp.rng import Draws
from evodsp.selftest.shared_device import random_features
from scripts.benchmarks.calling_lines import calling_lines
from tests.builders.labelled_batch import batch_of
from tests.ranks import RankPool

RANKS = 4
RESIDUES, CLUSTERS, TEMPLATES, EXTRA = 47, 41, 2, 53
ROWS = (CLUSTERS, CLUSTERS + TEMPLATES, EXTRA)
"""Numbers of MSA rows: clusters, clusters with the templates' torsion rows, extra sequences."""
STACK = EvoformerConfig(
    blocks=2, msa_heads=5, msa_head_width=3, pair_heads=2, pair_head_width=3, triangle_channels=16,
    outer_product_channels=6, transition_factor=2, checkpoint=False,
)  # fmt: skip
WEIGHTS = LossConfig(experimentally_resolved=0.15, violation=0.9, pae=0.1)

# Numbers for each pair of residues that a rank may hold for all pairs: a mask, also of both templates; the biases of MSA and
# pair attention; a rank's channels of one or both operands of triangle multiplication; and these for two templates.
PAIR = {1, 2, STACK.msa_heads, STACK.pair_heads, 2 * STACK.pair_heads, 16 // RANKS, 2 * 16 // RANKS}
# Numbers for each sequence and residue: a mask, one operand of the outer product mean.
MSA = {1, STACK.outer_product_channels}


def lines_of(*functions: Any) -> set[int]:
    """Numbers of the source lines of functions or classes."""
    found = [(start, len(lines)) for lines, start in map(inspect.getsourcelines, functions)]
    return {number for start, length in found for number in range(start, start + length)}


LOGITS = lines_of(chunked._weights, chunked._Attention)
"""Where the logits of attention are computed."""


def config() -> ModelConfig:
    base = ModelConfig.preset("test")
    return dataclasses.replace(
        base,
        channels=ChannelsConfig(msa=18, pair=24, extra_msa=15, single=20),
        evoformer=STACK,
        extra_msa=dataclasses.replace(STACK, msa_heads=2),
        templates=TemplateConfig(
            True, channels=10, blocks=2, pair_heads=2, pair_head_width=3, triangle_channels=8, attention_heads=2,
            attention_head_width=3, unit_vector=True, checkpoint=False,
        ),
        heads=dataclasses.replace(base.heads, experimentally_resolved=True, predicted_aligned_error=True),
    )  # fmt: skip


def whole(numbers: int) -> str | None:
    """What a tensor with this number of entries must not hold but does, such as "R x R x 24"; None if it is allowed."""
    if numbers == 0:
        return None
    each, rest = divmod(numbers, RESIDUES**2)
    if rest == 0:
        return None if each in PAIR else f"R x R x {each}"
    for rows in ROWS:
        each, rest = divmod(numbers, rows * RESIDUES)
        if rest == 0 and each not in MSA:
            return f"{rows} x R x {each}"
    return None


class Watcher(TorchDispatchMode):
    """Checks every tensor that an operator returns, and the inputs and outputs of every module."""

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.modules: set[nn.Module] = set()
        self._given = {x.untyped_storage().data_ptr() for x in given}

    def __enter__(self) -> Watcher:
        self._hook = register_module_forward_hook(self._module_ran)
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *exception: Any) -> None:
        self._hook.remove()
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._look(result, str(function))
        return result

    def _module_ran(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.modules.add(module)
        self._look((inputs, list(_tensors(output))), type(module).__name__)

    def _look(self, tree: Any, what: str) -> None:
        for x in _tensors(tree):
            # An expanded tensor counts with its full size, because it may be copied next. Views of features are allowed.
            held = whole(x.numel())
            if held is None or x.untyped_storage().data_ptr() in self._given:
                continue
            lines = list(islice(calling_lines(sys._getframe(1)), 2))[::-1]
            if any(line in LOGITS and file.endswith("kernels/chunked.py") for file, line in lines):
                continue  # logits: all pairs of positions of one row, for the rows that this rank has
            places = [f"{file}:{line}" for file, line in lines]
            self.found.add(f"{held} {list(x.shape)} {what} {' > '.join(places)}")


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors in nested containers and dataclasses."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            yield from _tensors(list(vars(leaf).values()))


def watch(handle: Any, plan: CommunicationPlan, cycles: int = 2) -> tuple[list[str], list[str]]:
    """Tensors found in passes with loss and gradients, and the modules that did not run."""
    torch.manual_seed(0)
    exchange = ShardedExchange(Group(handle))
    model = AlphaFold(config())
    use_exchange(model, exchange, plan)
    labels = {name: x.float() if x.is_floating_point() else x for name, x in batch_of(1, RESIDUES).items()}
    batch = labels | random_features(CLUSTERS, EXTRA, RESIDUES, TEMPLATES, cycles=cycles)
    batch["true_msa"] = torch.randint(22, (1, cycles, CLUSTERS, RESIDUES))
    batch["bert_mask"] = torch.ones(1, cycles, CLUSTERS, RESIDUES)
    batch |= existing_entries(batch)  # as the loader does; all 8 frames of a fourth of the residues would be 2 R
    with Watcher(batch.values()) as watcher:
        output = model(batch, [Draws.root(0).at(0)])
        loss, _ = total_loss(output, batch, WEIGHTS, config().heads, exchange)
        loss.backward()
    with_parameters = {
        name: x for name, x in model.named_modules() if next(x.parameters(recurse=False), None) is not None
    }
    return sorted(watcher.found), [name for name, x in with_parameters.items() if x not in watcher.modules]


USED_BY_PARENTS = (
    "relative_position", "outer_product_mean.output", "outer_product_mean.left_right", ".projection", ".projection_gate",
    ".output_gate", ".product_norm", "outgoing.output", "incoming.output", ".qkv", "attention.gate", ".pair_bias", ".pair_norm",
    "attention.norm", "attention_starting.norm", "attention_ending.norm", "outgoing.norm", "incoming.norm",
    "column_attention.key_value", "column_attention.gate", "column_attention.output",
    "outer_product_mean.norm", "transition.norm", "transition.widen", "transition.narrow", "structure_module.attention.query",
    "structure_module.attention.key_value", "attention.query_points", "attention.key_value_points", "attention.output",
)  # fmt: skip


def test_nothing_large_is_ever_whole(pool: RankPool) -> None:
    """Catches a gathered representation anywhere: relative positions, recycling, templates, heads, losses, gradients."""
    for found, unseen in pool.run(RANKS, watch, CommunicationPlan()):
        assert not found, "\n".join(found)
        # The parent modules use the parameters of these directly, and the parents' tensors are checked.
        assert [name for name in unseen if not name.endswith(USED_BY_PARENTS)] == []


@pytest.mark.verify
def test_what_dap_gathers_is_found(pool: RankPool) -> None:
    """Catches a `Watcher` that finds nothing: DAP gathers an operand of triangle multiplication in every block."""
    for found, _ in pool.run(RANKS, watch, DAP, 1):
        assert any(line.startswith("R x R x 16 ") for line in found)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, RESIDUES, RESIDUES, 24), "R x R x 24"),
        ((RESIDUES**2, 24), "R x R x 24"),
        ((RESIDUES, 3, RESIDUES), "R x R x 3"),
        ((1, RESIDUES, 12, 24), None),
        ((1, RESIDUES, RESIDUES, STACK.msa_heads), None),
        ((1, EXTRA, RESIDUES, 15), f"{EXTRA} x R x 15"),
        ((1, EXTRA, RESIDUES), None),
        ((0, RESIDUES, RESIDUES, 24), None),
    ],
    ids=str,
)
def test_a_whole_tensor_is_known_by_its_size(shape: tuple[int, ...], expected: str | None) -> None:
    """Catches a reshaped complete tensor that is not found, and a shard or an exception that is reported."""
    assert whole(torch.Size(shape).numel()) == expected


def test_sizes_cannot_be_mistaken() -> None:
    """Catches test sizes that defeat the check: a multiple of an axis would make a shard look complete."""
    axes = (RESIDUES, *ROWS)
    assert len({*axes}) == len(axes)
    for axis in axes:
        assert all(axis % factor for factor in range(2, axis))
    shards = [len(part) for axis in axes for part in torch.arange(axis).tensor_split(RANKS)]
    assert all(shard % axis for shard in shards for axis in axes)

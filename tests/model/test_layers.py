"""Blocks with other sub-layers than AlphaFold2's, or in another order."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.config import ALPHAFOLD2, MULTIMER, EvoformerConfig, ModelConfig, as_multimer, check_layers, import_layers
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.model.dropout import DropoutKeys, draw_blocks
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.layers import TriangleMultiplication
from evodsp.model.primitives import SubLayer
from evodsp.model.schedule import CommunicationPlan
from evodsp.model.sharded import Sharded, Update
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from scripts.benchmarks.traffic import StackSizes, inner_block
from tests.builders.sharded_stacks import Case, check
from tests.ranks import RankPool

TEST = ModelConfig.preset("test")
NO_ATTENTION = tuple(name for name in ALPHAFOLD2 if not name.startswith("attention"))
NO_PRODUCT = tuple(name for name in ALPHAFOLD2 if name != "outer_product_mean")
LINEAR = {f"attention_{node}": f"scripts.examples.linear_attention:{node.title()}" for node in ("starting", "ending")}
OWN = tuple(f"{name}={LINEAR[name]}" if name in LINEAR else name for name in ALPHAFOLD2)
MIXED = (
    *("triangle_incoming", "msa_transition", "row_attention", "attention_ending", "outer_product_mean"),
    *("triangle_outgoing", "column_attention"),
)
REPEATED = (*ALPHAFOLD2[:5], "triangle_outgoing", "row_attention", *ALPHAFOLD2[5:])
HERE = f"own={__name__}"
SIZES = StackSizes(8, 0, 1, 128, 256, 256, 128, EvoformerConfig())


@pytest.mark.verify_but(
    "evoformer*no outer_product_mean,no triangle_outgoing*", "evoformer*no column_attention,no msa_transition*"
)
@pytest.mark.parametrize(
    "case",
    [
        Case("evoformer", layers=NO_ATTENTION, recompute=True),
        Case("evoformer", layers=REPEATED),
        Case("evoformer", layers=OWN, projections=True),
        Case("evoformer", layers=MIXED, batch=2),
        Case("evoformer", layers=NO_PRODUCT),
        Case("evoformer", layers=tuple(name for name in MULTIMER if name != "column_attention")),
        Case("evoformer", layers=ALPHAFOLD2[:3]),
        Case("evoformer", layers=ALPHAFOLD2[4:]),
        Case("evoformer", layers=NO_ATTENTION[1:], plan=CommunicationPlan(triangle_incoming="gather")),
        Case("extra", layers=NO_ATTENTION),
        Case("extra_deep", layers=MIXED, plan=CommunicationPlan(extra_msa_axis="res")),
    ],
    ids=str,
)
def test_ranks_compute_what_one_device_does(pool: RankPool, case: Case) -> None:
    """Catches a sub-layer that gets its representation along another axis than it takes, and a lost switch."""
    check(pool, case, (2, 3, 4))


def drawn_stack(order: tuple[str, ...], extra: bool) -> tuple[EvoformerStack, tuple[Tensor, ...]]:
    """A stack with random parameters; m, z and their masks, in double precision."""
    sizes = dataclasses.replace(TEST.extra_msa if extra else TEST.evoformer, blocks=3, layers=order)
    c_m = TEST.channels.extra_msa if extra else TEST.channels.msa
    stack = dense(EvoformerStack(c_m, TEST.channels.pair, sizes, extra))
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    m, z = random(2, 5, 7, c_m), random(2, 7, 7, TEST.channels.pair)
    return stack, (m, z, (random(2, 5, 7) > -1).double(), (random(2, 7, 7) > -1).double())


def one_after_another(
    stack: EvoformerStack, order: tuple[str, ...], m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The sub-layers as they are named."""
    msa, pair = Sharded.whole(m, "seq", msa_mask), Sharded.whole(z, "j", pair_mask)
    for block in stack.blocks:
        for name in order:
            of_msa = name.startswith(("row", "column", "msa", "outer"))
            own = block.msa_stack if of_msa else block.pair_stack
            layer = getattr(own, name.removeprefix("msa_").removeprefix("pair_"))
            if name == "outer_product_mean":
                pair += layer(msa)
            elif name == "row_attention":
                msa += layer(msa, layer.bias(pair))
            elif of_msa:
                msa += layer(msa)
            else:
                pair += layer(pair)
    return msa.x, pair.x


@pytest.mark.parametrize(("order", "extra"), [(MIXED, False), (MULTIMER, False), (MULTIMER, True)])
def test_the_order_of_sub_layers(order: tuple[str, ...], extra: bool) -> None:
    """Catches sub-layers that swap places although one depends on the other, as a bias of the pair and its update do; a bias
    that is projected before the outer product mean or after its own update, and an outer product mean of updated rows. Of the
    MSA of the last extra-MSA block, which nobody reads: computing it; its parameters exist, as published files hold them."""
    assert (ALPHAFOLD2[3], *ALPHAFOLD2[:3], *ALPHAFOLD2[4:]) == MULTIMER  # as DeepMind's code calls them
    stack, given = drawn_stack(order, extra)
    called: list[int] = []
    for number, block in enumerate(stack.blocks):
        for layer in (block.msa_stack.row_attention, block.msa_stack.column_attention, block.msa_stack.transition):
            layer.register_forward_hook(lambda *_, number=number: called.append(number))
    found = stack(*given)
    assert called == [number for number in range(2 if extra else 3) for _ in range(3)]
    expected = one_after_another(stack, order, *given)
    for own, theirs in [*zip(found, expected, strict=True)][extra:]:
        torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("order", [ALPHAFOLD2, MULTIMER])
def test_what_lies_between_the_halves_of_a_pair_stack_is_freed(order: tuple[str, ...]) -> None:
    """Catches a name for the pair representation before the attentions, which keeps a shard of it during all of them."""
    stack, (m, z, *masks) = drawn_stack(order, extra=False)
    between: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    for block in stack.blocks:
        starting, ending = block.pair_stack.attention_starting, block.pair_stack.attention_ending
        starting.register_forward_pre_hook(lambda _, given: between.append(weakref.ref(given[0].x)))
        ending.register_forward_pre_hook(lambda *_: alive.append(between[-1]() is not None))
    with torch.no_grad():
        stack(m, z, *masks)
    assert alive == [False] * len(stack.blocks)


def drawn(layers: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[tuple[int, str], Tensor]]:
    """Initial weights of a model by name, and masks of dropout by block and sub-layer."""
    torch.manual_seed(3)
    own = {name: dataclasses.replace(getattr(TEST, name), layers=layers) for name in ("evoformer", "extra_msa")}
    model = AlphaFold(import_layers(dataclasses.replace(TEST, **own)))
    stack = model.evoformer
    keys = DropoutKeys.of(stack.dropout_streams([Draws.root(0)]))
    masks = draw_blocks(stack.blocks, keys, residues=7, kernels=stack.kernels)
    return dict(model.named_parameters()), {
        (n, name): mask for n, own in enumerate(masks) for name, mask in own.items()
    }


@pytest.mark.parametrize(
    "layers", [*(tuple(n for n in ALPHAFOLD2 if n != out) for out in ALPHAFOLD2), REPEATED, OWN, MULTIMER]
)
def test_other_sub_layers_change_no_draw_of_the_rest(layers: tuple[str, ...]) -> None:
    """Catches initial weights and masks that depend on which sub-layers stand beside them."""
    weights, masks = drawn(ALPHAFOLD2)
    other_weights, other_masks = drawn(layers)
    replaced = [entry.partition("=")[0] for entry in layers if "=" in entry]
    shared = [name for name in weights.keys() & other_weights if not any(f".{own}." in name for own in replaced)]
    assert all(torch.equal(weights[name], other_weights[name]) for name in shared)
    assert all(torch.equal(masks[place], other_masks[place]) for place in masks.keys() & other_masks)


def test_a_repeated_sub_layer_has_weights_and_masks_of_its_own() -> None:
    """Catches a second sub-layer that shares the first one's weights, draws the same numbers, or has its mask."""
    weights, masks = drawn(REPEATED)
    for stack, name in (("msa_stack", "row_attention"), ("pair_stack", "triangle_outgoing")):
        first, second = (f"evoformer.blocks.{n}.{stack}.{own}" for n, own in ((0, name), (0, f"{name}_2")))
        own = [key for key in weights if key.startswith(f"{second}.") and weights[key].unique().numel() > 1]
        assert own
        for key in own:
            assert not torch.equal(weights[key], weights[key.replace(second, first)])
            assert not torch.equal(weights[key], weights[key.replace("blocks.0", "blocks.1")])
        assert not torch.equal(masks[0, name], masks[0, f"{name}_2"])
    weights, _ = drawn((*ALPHAFOLD2, "pair_transition", "pair_transition"))
    second, third = (weights[f"evoformer.blocks.0.pair_stack.transition_{n}.widen.weight"] for n in (2, 3))
    assert not torch.equal(second, third)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            [],
            "model.evoformer.layers is a list of 0, but must be a list of 1 to 64 sub-layers, each one of row_attention, ",
        ),
        (
            ["row_atention"],
            "with 'row_atention', but must be .* NAME=PACKAGE.MODULE:CLASS. Did you mean 'row_attention'?",
        ),
        (["own=pkg"], "a list with 'own=pkg', but must be"),
        (["own=pkg:A b"], "a list with 'own=pkg:A b', but must be"),
        ("row_attention", "is 'row_attention', but must be null or a list"),
        ([3], "must be null or a list"),
        (["a=b:C", "a=b:C", "a_2=b:C"], "two sub-layers called a_2"),
        (["row_attention"] * 65, "a list of 65"),
    ],
)
def test_a_wrong_list_is_one_line(layers: Any, said: str) -> None:
    """Catches a name that nothing has, and a list that a model cannot be made of."""
    with pytest.raises(UserError, match=said):
        check_layers("model.evoformer.layers", tuple(layers) if isinstance(layers, list) else layers)


def test_an_arrangement_has_one_way_to_say_its_own_order() -> None:
    """Catches two configs of the same model that differ, and a model of complexes in AlphaFold2's order."""
    named = dataclasses.replace(TEST, evoformer=dataclasses.replace(TEST.evoformer, layers=ALPHAFOLD2))
    assert named == TEST
    assert as_multimer(named).in_order(named.evoformer).layers == MULTIMER
    other = dataclasses.replace(TEST, evoformer=dataclasses.replace(TEST.evoformer, layers=MIXED))
    assert ModelConfig.from_dict(other.to_dict()) == other


class NoAxes(SubLayer):
    """Lacks `takes`."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def forward(self, pair: Sharded) -> Update:
        raise AssertionError


class NoForward(SubLayer):
    """Lacks `forward`."""

    takes = ("i",)

    def __init__(self, *_: Any) -> None:
        super().__init__()


class WrongAxes(NoAxes):
    """Takes an axis that no representation has."""

    takes = ("k",)


class Own(NoAxes):
    """Keeps the contract."""

    takes = ("i",)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            "own=evodsp.nowhere:Class",
            "cannot import the sub-layer 'own=evodsp.nowhere:Class': ModuleNotFoundError: No module",
        ),
        ("own=math:Nothing", "cannot import .* AttributeError: module 'math' has no attribute 'Nothing'"),
        ("own=collections:Counter", "'own=collections:Counter' is no class below evodsp.model.primitives.SubLayer"),
        (f"{HERE}:NoAxes", "lacks `takes`"),
        (f"{HERE}:NoForward", "lacks `forward`"),
        (f"{HERE}:WrongAxes", "`takes` is \\('k',\\), but must be one of \\('seq',\\), "),
        (f"{HERE.replace('own', 'forward')}:Own", "cannot be called 'forward'"),
    ],
)
def test_a_class_that_is_no_sub_layer_is_one_line(entry: str, said: str) -> None:
    """Catches a class without the contract that fails in the first step, and a traceback of an import."""
    config = dataclasses.replace(TEST, evoformer=dataclasses.replace(TEST.evoformer, layers=(entry,)))
    with pytest.raises(UserError, match=said):
        AlphaFold(import_layers(config))


def test_a_config_of_a_file_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches code that runs because a file names it: it may only if the user names it, too."""
    (tmp_path / "planted.py").write_text("raise SystemError('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    entry = "own=planted:Class"
    config = dataclasses.replace(TEST, evoformer=dataclasses.replace(TEST.evoformer, layers=(*ALPHAFOLD2, entry)))
    read = ModelConfig.from_dict(config.to_dict())
    with pytest.raises(UserError, match="'own=planted:Class' is not imported"):
        AlphaFold(read)
    for named in ([], ["own=planted:Other", "planted:Class", "planted"]):
        with pytest.raises(
            UserError, match=r"a.ckpt: its model has .* only if you name it, too: --layers '\[own=planted:Class\]'"
        ):
            import_layers(read, named, "a.ckpt")
    assert "planted" not in sys.modules
    with pytest.raises(UserError, match="cannot import the sub-layer 'own=planted:Class': SystemError: ran"):
        import_layers(read, [entry], "a.ckpt")


def test_what_was_imported_is_not_written() -> None:
    """Catches a class in a checkpoint, which would be unpickled, or would not be read."""
    config = import_layers(dataclasses.replace(TEST, evoformer=dataclasses.replace(TEST.evoformer, layers=OWN)))
    layers = config.to_dict()["evoformer"]["layers"]
    assert layers == list(OWN)
    assert {type(entry) for entry in layers} == {str}


def test_blocks_without_triangle_attention_send_no_pair() -> None:
    """Catches a switch to an axis that nothing needs."""
    layers = tuple(
        call.layer for call in inner_block(dataclasses.replace(SIZES, config=EvoformerConfig(layers=NO_ATTENTION)))
    )
    assert Counter(layers) == Counter(
        ["row_attention", "switch m", "outer_product_mean", "switch m outside"]
        + ["triangle_outgoing", "triangle_incoming"] * 2
    )


class BatchedProducts(TorchDispatchMode):
    """Collects the operands of batched matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.bmm:
            self.operands += args[:2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("edges", ["outgoing", "incoming"])
def test_products_get_matrices_without_gaps(edges: Any) -> None:
    """Catches operands or a gradient with channels last: a CPU copies and multiplies such matrices one after another."""
    module = TriangleMultiplication(6, 4, edges)
    with BatchedProducts() as seen:
        z = torch.randn(1, 5, 5, 6, requires_grad=True)
        pair = Sharded.whole(z, "j", torch.ones(1, 5, 5))
        pair += module(pair)
        pair.x.sum().backward()
    assert len(seen.operands) == 2 + 4
    assert all(1 in x.stride()[1:] for x in seen.operands)

"""The elements that dropout removes in a real forward pass, against masks computed here from the documented rules.

The rules (supplement 1.11.6): one mask for all sequences after MSA row attention; one mask for all rows of the pair
representation after triangle multiplication and attention around the starting node; one mask for all columns after
attention around the ending node. Kept elements are divided by 1 - rate. A random draw is determined by its address
(seed, "dropout", sample, "cycle", c, stack, "block", b, layer) and its position in the full mask. Comparing a parallel
run with a serial one cannot find mistakes in these rules, because both would make them.

At the start of training every update equals its output layer's bias. Each layer's bias is set to 1 in a channel that no
other layer uses, so what a stack adds to its input shows the layer's mask in that channel.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evodsp.config import ChannelsConfig, EvoformerConfig, ModelConfig, StructureModuleConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.dropout import DropoutKeys
from evodsp.model.structure_module import StructureModule
from evodsp.rng import Draws
from evodsp.training.config import TrainingConfig
from evodsp.training.module import TrainingModule
from tests.builders.small_model import CYCLES, SMALL, TEMPLATES, config, features

SEED, SAMPLES, BLOCKS = 5, (3, 8), 2
CLUSTERS, EXTRA, RESIDUES = SMALL
RATES = {"msa": 0.15, "pair": 0.25, "structure": 0.3}
# Layer, the representation that it updates, the axis along which its mask is constant (None: no dropout).
RULES = (
    ("row_attention", "msa", 1),
    ("column_attention", "msa", None),
    ("msa_transition", "msa", None),
    ("triangle_outgoing", "pair", 1),
    ("triangle_incoming", "pair", 1),
    ("attention_starting", "pair", 1),
    ("attention_ending", "pair", 2),
    ("transition", "pair", None),
)
CHANNELS = len(RULES) * BLOCKS


def channel(layer: str, block: int) -> int:
    """The channel in which a layer's update is visible."""
    return [name for name, _, _ in RULES].index(layer) * BLOCKS + block


def expected_mask(stream: Draws, shape: tuple[int, int, int], rate: float, constant_axis: int | None) -> np.ndarray:
    """The mask of one layer, [axis 1, axis 2, channels], with entries 0 or 1 / (1 - rate).

    `stream`: the layer's random stream. `shape`: one sample's update. `constant_axis`: None for no dropout.
    """
    if constant_axis is None:
        return np.ones(shape)
    drawn = list(shape)
    drawn[constant_axis - 1] = 1
    keep = stream.uniform(*drawn) >= rate
    return np.broadcast_to(keep, shape) / (1.0 - rate)


@dataclass
class Update:
    """What one call of a stack added to its inputs, [sample, axis 1, axis 2, channels]."""

    msa: Tensor | None
    pair: Tensor


@dataclass
class Step:
    """The effect of dropout in one training step."""

    updates: dict[str, list[Update]]
    """What each stack added, for each cycle."""
    singles: list[Tensor]
    """The single representation [sample, residue, channel] before and after the structure module's dropout, for each cycle."""


class ForwardDone(Exception):
    """Ends a training step after its forward pass."""


def show_updates(stack: nn.Module) -> None:
    """Set each update's bias to 1 in a channel that no other update uses. The update's weights are zero at the start."""
    for name, parameter in stack.named_parameters():
        block = re.search(r"blocks\.(\d+)\.", name)
        name = name.replace(".msa_stack.transition.", ".msa_transition.")
        layers = [layer for layer, _, _ in RULES if f".{layer}." in name]
        if block and layers and re.search(r"\.(output|narrow)\.bias$", name):
            with torch.no_grad():
                parameter[channel(layers[0], int(block[1]))] = 1.0


def watch(stack: nn.Module, found: list[Update], has_msa: bool) -> None:
    """Append to `found` what each call of `stack` adds to its inputs."""

    def record(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if has_msa:
            found.append(Update((output[0] - inputs[0]).detach(), (output[1] - inputs[1]).detach()))
        else:
            found.append(Update(None, (output - inputs[0]).detach()))

    stack.register_forward_hook(record)


def check(update: Tensor, sample: int, stream: Draws, representation: str) -> None:
    """Check the masks of all layers and blocks of one sample. `stream`: the stack's random stream."""
    for layer, updated, constant_axis in RULES:
        if updated != representation:
            continue
        for block in range(BLOCKS):
            column = channel(layer, block)
            layer_stream = stream.at("block", block).at(layer)
            mask = expected_mask(layer_stream, tuple(update.shape[1:]), RATES[representation], constant_axis)[
                ..., column
            ]
            shown = update[sample, ..., column].double().numpy()
            # Triangle multiplication's gate starts at sigmoid(1).
            gate = 1 / (1 + np.exp(-1)) if layer.startswith("triangle_") else 1.0
            np.testing.assert_allclose(shown, gate * mask, rtol=0, atol=1e-5, err_msg=f"{layer} of block {block}")


@pytest.fixture(scope="module")
def step() -> Step:
    """One training step with two samples and two cycles."""
    base = config(recompute=False)
    stack = EvoformerConfig(
        blocks=BLOCKS, msa_heads=2, msa_head_width=2, pair_heads=2, pair_head_width=2, triangle_channels=3,
        outer_product_channels=2, transition_factor=1, msa_dropout=RATES["msa"], pair_dropout=RATES["pair"], checkpoint=False,
    )  # fmt: skip
    sizes = dataclasses.replace(
        base,
        channels=ChannelsConfig(msa=CHANNELS, pair=CHANNELS, extra_msa=CHANNELS, single=7),
        evoformer=stack,
        extra_msa=stack,
        structure_module=dataclasses.replace(base.structure_module, iterations=1, dropout=RATES["structure"]),
        templates=dataclasses.replace(base.templates, channels=CHANNELS, pair_dropout=RATES["pair"], torsions=False),
    )
    module = TrainingModule(TrainingConfig(), seed=SEED)
    module.model = AlphaFold(sizes)
    model = module.model
    assert model.template_embedder is not None
    singles: list[Tensor] = []
    found: dict[str, list[Update]] = {"evoformer": [], "extra": [], "templates": []}
    stacks = {"evoformer": model.evoformer, "extra": model.extra_msa_stack, "templates": model.template_embedder.stack}
    for name, module_of_blocks in stacks.items():
        show_updates(module_of_blocks)
        watch(module_of_blocks, found[name], has_msa=name != "templates")
    structure = model.structure_module
    structure.initial.register_forward_hook(lambda _, inputs, output: singles.append(output.detach()))
    structure.attention_norm.register_forward_hook(lambda _, inputs, output: singles.append(inputs[0].detach()))
    batch = {name: x.float() if x.is_floating_point() else x for name, x in features(len(SAMPLES)).items()}
    batch["sample_index"] = torch.tensor(SAMPLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evodsp.training.module.RecordedLoss.__call__", _stop_after_forward)
        with pytest.raises(ForwardDone):
            module.training_step(batch, 0)
    return Step(found, singles)


def _stop_after_forward(*arguments: Any) -> None:
    raise ForwardDone


@pytest.mark.parametrize("name", ["evoformer", "extra"])
def test_every_element_that_dropout_removes(step: Step, name: str) -> None:
    """Catches one mask for all blocks, cycles, samples or stacks, a wrong shared axis, and a missing 1 / (1 - rate)."""
    assert len(step.updates[name]) == CYCLES
    for cycle, update in enumerate(step.updates[name]):
        for place, index in enumerate(SAMPLES):
            stream = Draws.root(SEED).at("dropout").at(index).at("cycle", cycle).at(name)
            assert update.msa is not None
            assert update.msa.shape[1:3] == ((EXTRA if name == "extra" else CLUSTERS), RESIDUES)
            check(update.msa, place, stream, "msa")
            check(update.pair, place, stream, "pair")


def test_every_element_that_dropout_removes_from_templates(step: Step) -> None:
    """Catches one mask for all templates of a sample, which lie on the batch axis of their stack."""
    assert len(step.updates["templates"]) == CYCLES
    for cycle, update in enumerate(step.updates["templates"]):
        for place, index in enumerate(SAMPLES):
            stream = Draws.root(SEED).at("dropout").at(index).at("cycle", cycle).at("templates")
            for template in range(TEMPLATES):
                check(update.pair, place * TEMPLATES + template, stream.at("template", template), "pair")


def test_the_structure_module_has_a_stream_of_its_own(step: Step) -> None:
    """Catches one mask for all cycles or samples.

    At the start of training, attention adds nothing before the first dropout, so the mask multiplies the input.
    """
    assert len(step.singles) == 2 * CYCLES
    for cycle in range(CYCLES):
        before, after = step.singles[2 * cycle : 2 * cycle + 2]
        for place, index in enumerate(SAMPLES):
            stream = Draws.root(SEED).at("dropout").at(index).at("cycle", cycle).at("structure").at("attention", 0)
            mask = (stream.uniform(*before.shape[1:]) >= RATES["structure"]) / (1 - RATES["structure"])
            torch.testing.assert_close(
                after[place], before[place] * torch.from_numpy(mask).float(), rtol=1e-5, atol=1e-6
            )


def test_structure_module_drops_out_twice_in_each_iteration() -> None:
    """Catches one mask for both places (after attention, after the transition) or for all iterations."""
    sizes = dataclasses.replace(ModelConfig.preset("test").structure_module, iterations=2, dropout=0.3)
    assert isinstance(sizes, StructureModuleConfig)
    torch.manual_seed(0)
    module = StructureModule(
        9, 4, sizes
    )  # attention and transition add zero at the start, so dropout acts on their input
    norms: list[tuple[Tensor, Tensor]] = []
    for norm in (module.attention_norm, module.transition_norm):
        norm.register_forward_hook(lambda _, inputs, output: norms.append((inputs[0].detach(), output.detach())))
    initial: list[Tensor] = []
    module.initial.register_forward_hook(lambda _, inputs, output: initial.append(output.detach()))
    shape = (len(SAMPLES), RESIDUES, 9)
    draws = [Draws.root(SEED).at(sample) for sample in SAMPLES]
    keys = DropoutKeys.of(module.dropout_streams(draws))
    zeros = torch.zeros(len(SAMPLES), RESIDUES, dtype=torch.int64)
    module(torch.randn(shape), torch.randn(*shape[:2], RESIDUES, 4), zeros, torch.ones(shape[:2]), keys)
    assert len(norms) == 2 * sizes.iterations
    before = initial[0]
    masks = []
    for number, (dropped, after) in enumerate(norms):
        iteration, part = divmod(number, 2)
        streams = [d.at(("attention", "transition")[part], iteration) for d in draws]
        mask = np.stack([(d.uniform(*shape[1:]) >= 0.3) / 0.7 for d in streams])
        torch.testing.assert_close(dropped, before * torch.from_numpy(mask).float(), rtol=1e-5, atol=1e-6)
        masks.append(mask)
        before = after
    assert len({mask.tobytes() for mask in masks}) == len(masks)

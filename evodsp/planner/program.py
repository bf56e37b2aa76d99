"""A training step or a prediction as a list of events, from the model itself, run on shapes alone.

A stack of 48 blocks has 46 equal ones. So a *reduced* model is run, with a few of them, and `Program.repeats` says how often a
segment stands in the whole one. `evodsp.planner.simulate` repeats them.

Shape legend: B batch, R residues, S clusters, E extra sequences, T templates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from evodsp.config import EvoformerConfig, LossConfig, ModelConfig
from evodsp.data.samples.dataset import listed_sizes
from evodsp.data.samples.raw_features import CHAIN_AXES, FEATURE_AXES, SAMPLED, TEMPLATE_AXES
from evodsp.geometry.frames import structure_labels
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import ARRANGEMENTS, AlphaFold
from evodsp.model.heads import (
    ModelOutput,
    compute_complex_confidence,
    compute_contact_weights,
    compute_contacts,
    compute_pae,
    compute_plddt,
    compute_ptm,
)
from evodsp.model.kernels import triton
from evodsp.model.kernels.operators import Kernels
from evodsp.model.primitives import use_exchange, use_kernels, use_memory
from evodsp.model.recomputation import Recomputed
from evodsp.model.schedule import CommunicationPlan
from evodsp.model.structure_module import StructureModule
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Entry, Ledger
from evodsp.planner.trace import Event, ImaginedGroup, ProgramRecorder, Segment
from evodsp.rng import Draws

STACKS = ("extra_msa_stack", "evoformer")
"""Parts of the model that are made of equal blocks. Segment k of such a part is the latter half of block k - 1 and the former
half of block k."""


MADE_ONCE: Segment = ("template_torsions", 0)
"""The place of the templates' torsion angles, which are made once a sample, not in each pass."""

SINGLE, HALF = 4, 2
"""Bytes of a number in fp32 and in bf16."""
LEAST_FIRST, LEAST_LAST = 4, 3
"""Blocks of a reduced stack that recomputes more of its first blocks than of its last ones."""


@dataclass(frozen=True)
class SampleSizes:
    """The sizes of a sample."""

    residues: int
    clusters: int
    """Rows of the clustered MSA, without those of templates."""
    extra: int
    templates: int = 0
    chains: int = 1
    """Number of chains of a complex, whose chains and pairs of chains a prediction scores."""

    @property
    def length(self) -> str:
        """For messages, for example '914 residues' or '914 residues in 3 chains'."""
        return f"{self.residues:,} residues" + (f" in {self.chains} chains" if self.chains > 1 else "")


@dataclass(frozen=True)
class PlannedStep:
    """Program to run, on rank `rank` of `ranks`, which share one sample."""

    model: ModelConfig
    sizes: SampleSizes
    loss: LossConfig | None = None
    """Weights of the loss of a training step; None for a prediction."""
    ranks: int = 1
    rank: int = 0
    half: bool = True
    """bf16-mixed."""
    wire: Literal["same", "bf16"] = "same"
    plan: CommunicationPlan = field(default_factory=CommunicationPlan)
    on_gpu: bool = True
    memory: int | None = None
    """Bytes that a layer of a prediction may take beside the representations; None: no limit."""
    samples: int | None = None
    """Number of pieces of a layer of a prediction that are run; the others need the same memory. None runs all."""
    sets: int = 1
    """Feature sets of a pass of a prediction."""


@dataclass(frozen=True)
class Repeat:
    """Equal segments, of which a reduced model has few."""

    part: str
    segment: int
    """Number of the segment that stands for all of them. It is none of the first two, during which the stack's input is still
    held, and not the last, so memory grows in it as it does in all."""
    times: int
    """Number of its copies in the whole model."""


@dataclass(frozen=True)
class Program:
    """The events of one pass with gradients (of a prediction: of one pass without)."""

    events: list[Event]
    repeats: Sequence[Repeat]
    """Segments that stand in the whole model more than once."""
    batch_bytes: int
    """Features and labels of the sample, one recycling iteration."""
    parameters: int
    """Numbers, of the whole model."""
    sent: list[Entry]
    """The collectives of the reduced model, as the ledger of a real rank holds them."""


def program(step: PlannedStep) -> Program:
    """Run `step` on tensors without numbers."""
    model_config, repeats = reduced(step.model if step.loss is not None else without_recomputation(step.model))
    # Tensors of the meta device take the paths of a GPU in the model, which asks whether a tensor is on a CPU. For a CPU they
    # must say that they are.
    recorder, on_cpu = ProgramRecorder(), nullcontext() if step.on_gpu else FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = AlphaFold(model_config).to("meta")  # its buffers are made from arrays
        if step.half:
            _cast(model)
    with on_cpu, torch.device("meta" if step.on_gpu else "cpu"):
        if step.on_gpu:
            use_kernels(model, Kernels.of(triton))
        else:
            model.to_empty(device="cpu")
        batch = sample_batch(step)
    ledger = Ledger()
    if step.ranks > 1:
        group = ImaginedGroup(step.rank, step.ranks, recorder, ledger)
        wire = torch.bfloat16 if step.wire == "bf16" else None
        use_exchange(model, ShardedExchange(group, dtype=wire), step.plan)
    n, memory = step.sizes, step.memory
    if step.ranks == 1:
        memory = model.memory_limit(memory, HALF if step.half else SINGLE, n.residues, n.clusters, n.extra, n.templates)
    use_memory(model, memory, step.samples)
    _name_places(model, recorder)
    draws = [Draws.root(0)] if step.loss is not None else []
    with on_cpu, recorder, torch.set_grad_enabled(step.loss is not None):
        output = model(batch, draws, ensembles=step.sets)
        if step.loss is None:
            with recorder.at(("confidence", 0)):
                _confidence(model, batch, output, step.sizes.chains)
        else:
            with recorder.at(("losses", 0)):
                loss, _ = total_loss(output, batch, step.loss, model_config.heads, model.exchange)
            del output
            loss.backward()
    with torch.device("meta"):  # a prediction's features stay in single precision
        whole = batch if step.loss is not None else sample_batch(dataclasses.replace(step, half=False))
    held = sum(x.numel() * x.element_size() for x in whole.values()) // step.sets
    return Program(recorder.events, repeats, held, parameters(step.model, model), ledger.entries)


def parameters(config: ModelConfig, few: AlphaFold | None = None) -> int:
    """Number of values in the model's parameters. `few`: the model with few blocks, if it is there."""
    if few is None:
        with torch.device("meta"):
            few = AlphaFold(reduced(config)[0])
    total = sum(p.numel() for p in few.parameters())
    for stack, whole in ((few.extra_msa_stack, config.extra_msa), (few.evoformer, config.evoformer)):
        if missing := whole.blocks - len(stack.blocks):
            total += missing * sum(p.numel() for p in stack.blocks[0].parameters())
    return total


def reduced(config: ModelConfig) -> tuple[ModelConfig, list[Repeat]]:
    """The model with few blocks, and how often each of its segments stands in the whole."""
    extra, of_extra = _reduced_stack("extra_msa_stack", config.extra_msa)
    evoformer, of_evoformer = _reduced_stack("evoformer", config.evoformer)
    return dataclasses.replace(config, extra_msa=extra, evoformer=evoformer), [*of_extra, *of_evoformer]


def _reduced_stack(name: str, config: EvoformerConfig) -> tuple[EvoformerConfig, list[Repeat]]:
    """A stack with few blocks, and how often its segments stand in the whole stack."""
    blocks, chosen = config.blocks, recomputed_of(config)
    kinds = [number for number in (*chosen, blocks - sum(chosen)) if number]
    if len(kinds) == 1 and blocks > 4:
        return dataclasses.replace(config, blocks=4), [Repeat(name, 2, blocks - 3)]
    if len(kinds) != 2 or kinds[0] < LEAST_FIRST or kinds[1] < LEAST_LAST:
        return config, []
    # Segments 0 to 3 are of the first kind, 4 to 7 are not.
    whole = min(chosen.blocks, LEAST_FIRST)
    again: dict[str, Any] = {
        "checkpoint": whole,
        "checkpoint_projections": min(chosen.projections, LEAST_LAST if whole else LEAST_FIRST),
    }
    return dataclasses.replace(config, blocks=LEAST_FIRST + LEAST_LAST, **again), [
        Repeat(name, 2, kinds[0] - 3),
        Repeat(name, 5, kinds[1] - 2),
    ]


def recomputed_of(config: EvoformerConfig) -> Recomputed:
    """Recomputation of a stack: everything where a run would measure."""
    setting = True if config.checkpoint == "auto" else config.checkpoint
    return Recomputed.of(config.blocks, setting, config.checkpoint_projections)


def without_recomputation(config: ModelConfig) -> ModelConfig:
    """The model as a prediction runs it: nothing is computed again, because nothing is differentiated."""
    kept = {"checkpoint": False, "checkpoint_projections": False}
    stacks = {name: dataclasses.replace(getattr(config, name), **kept) for name in ("extra_msa", "evoformer")}
    return dataclasses.replace(config, **stacks)


def _confidence(model: AlphaFold, batch: dict[str, Tensor], output: ModelOutput, chains: int) -> None:
    """Compute a prediction's confidence from the logits, which are still there (`evodsp.inference.seeds.structure_of`).
    `chains`: the number of chains of the complex."""
    heads = model.config.heads
    compute_plddt(output.logits["plddt"].float())
    edges = heads.distogram_min_distance, heads.distogram_max_distance
    residues = batch["seq_mask"].shape[-1]
    model.exchange.gather(compute_contacts(output.logits["distogram"], *edges), "i", whole=residues)
    if "predicted_aligned_error" in output.logits:
        logits, mask = output.logits["predicted_aligned_error"], batch["seq_mask"][:, -1].float()
        most = heads.pae_max_error
        model.exchange.gather(compute_pae(logits, most), "i", whole=mask.shape[1])
        compute_ptm(logits, mask, most, model.exchange)
        if chains > 1:
            touching = compute_contact_weights(output.logits["distogram"], *edges)
            of_chain = batch["asym_id"][:, -1]
            compute_complex_confidence(logits, touching, mask, of_chain, chains, most, model.exchange)


def _cast(model: AlphaFold) -> None:
    """Leave the parameters as layers see them with autocast and `evodsp.model.precision`. The meta device has no autocast."""
    for module in model.children():
        if not getattr(module, "computes_in_float32", False):
            module.to(torch.bfloat16)


_TRAILING: dict[str, tuple[int, ...]] = {
    "atom14_atom_exists": (14,), "atom37_atom_exists": (37,), "residx_atom14_to_atom37": (14,),
    "residx_atom37_to_atom14": (37,), "template_all_atom_positions": (37, 3), "template_all_atom_masks": (37,),
    "template_pseudo_beta": (3,), "template_sum_probs": (1,),
} | {name: shape for name, (_, shape) in SAMPLED.items()}  # fmt: skip
_INTEGERS = {
    "aatype", "residue_index", "seq_length", "residx_atom14_to_atom37", "residx_atom37_to_atom14", "true_msa", "extra_msa",
    "template_aatype", *CHAIN_AXES,
}  # fmt: skip
_ACTIVATIONS = {"target_feat", "msa_feat", "extra_has_deletion", "extra_deletion_value"}
"""Features that go into linear layers, where autocast makes them half precision."""


def sample_batch(step: PlannedStep, make: Callable[..., Tensor] = torch.empty) -> dict[str, Tensor]:
    """Features of one recycling iteration, and labels where there is a loss. `make`: of a shape and a `dtype`."""
    n = step.sizes
    axes = {"residues": n.residues, "msa": n.clusters, "extra": n.extra, "templates": n.templates}
    half = torch.bfloat16 if step.half else torch.float32
    batch = {}
    arrangement = ARRANGEMENTS[step.model.arrangement]
    trailing = _TRAILING | {"target_feat": (arrangement.target_channels,)}
    chains = {name: of for name, of in CHAIN_AXES.items() if name in arrangement.features}
    for name, of in {**FEATURE_AXES, **chains, **(TEMPLATE_AXES if step.model.templates.enabled else {})}.items():
        shape = (1, step.sets, *(axes[axis] for axis in of if axis), *trailing.get(name, ()))
        dtype = torch.int32 if name in _INTEGERS else half if name in _ACTIVATIONS else torch.float32
        batch[name] = make(shape, dtype=dtype)
    if step.loss is None:
        return batch
    for name, label in _LABELS.items():
        if name not in batch:
            batch[name] = make((1, n.residues, *label.shape[1:]), dtype=label.dtype)
    batch |= {name: make((1,)) for name in ("resolution", "use_clamped_fape")}
    return batch | {name: make((1, size), dtype=torch.int64) for name, size in listed_sizes(n.residues).items()}


_LABELS = structure_labels(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 37, 3), torch.zeros(2, 37))
"""The labels of a structure, of two residues: their trailing axes and types are those of any."""


def _name_places(model: AlphaFold, recorder: ProgramRecorder) -> None:
    """Have the events of each part carry its name, and those of stacks and iterations their segment."""

    def name(module: nn.Module, place: Callable[[], Segment]) -> None:
        module.register_forward_pre_hook(lambda *_: recorder.enter(place()))
        # Also where recomputation ends early, with an exception.
        module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)

    for part, module in model.named_children():
        if part in STACKS:
            for number, block in enumerate(module.blocks):  # type: ignore[arg-type]
                for segment, own in enumerate(block.parts, start=number):
                    name(own, lambda part=part, segment=segment: (part, segment))  # type: ignore[misc]
        elif part == "heads":
            for head in module.values():  # type: ignore[operator]
                name(head, lambda: ("heads", 0))
        elif part != "structure_module":
            name(module, lambda part=part: (part, 0))  # type: ignore[misc]
    _name_iterations(model.structure_module, recorder)
    if (embedder := model.template_torsion_embedder) is not None:
        angles = embedder.features

        def features(templates: Any) -> Tensor:
            with recorder.at(MADE_ONCE):
                return angles(templates)

        embedder.features = features  # type: ignore[method-assign]


def _name_iterations(structure: StructureModule, recorder: ProgramRecorder) -> None:
    """Segment k of the structure module begins with the attention of iteration k, from 1; segment 0 precedes them."""
    part, calls = "structure_module", 0

    def begin(*_: Any) -> None:
        nonlocal calls
        calls = 0
        recorder.enter((part, 0))

    def next_iteration(*_: Any) -> None:
        nonlocal calls
        calls += 1
        recorder.leave()
        recorder.enter((part, calls))

    structure.register_forward_pre_hook(begin)
    structure.attention.register_forward_pre_hook(next_iteration)
    structure.register_forward_hook(lambda *_: recorder.leave(), always_call=True)

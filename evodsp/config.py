"""Typed configuration of the model, the losses and the feature pipeline, with presets.

Each size is a field with a description below it; `evodsp fit --help` prints these descriptions. The defaults are those of
AlphaFold2's model_1 (supplement, sections 1.5 to 1.9 and 1.11).
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_type_hints

from evodsp.errors import (
    BELOW_ONE,
    COUNT,
    FRACTION,
    POSITIVE,
    SIZE,
    Range,
    SettingError,
    UserError,
    check_numbers,
    nearest,
)

MatmulPrecision = Literal["highest", "high"]
"""Precision in which a GPU multiplies float32 matrices. `highest`: in float32. `high`: in TF32 where the GPU has it, which
keeps 10 bits of each factor instead of 23 and is several times faster."""


def check_matmul(setting: str, value: str) -> None:
    """Raise SettingError unless `value` is a MatmulPrecision. `setting`: its name for the message."""
    if value not in get_args(MatmulPrecision):
        raise SettingError(setting, f"'{value}'", "highest or high")


LayerPrecision = Literal["fp32", "bf16", "32-true", "bf16-mixed"]
"""Precision of the model's layers: of `evodsp predict` fp32 or bf16, of the trainer, for the same, 32-true or bf16-mixed."""


def computes_in_half(precision: LayerPrecision) -> bool:
    """Whether layers compute in bf16, by either name."""
    return precision in ("bf16", "bf16-mixed")


ArrangementName = Literal["monomer", "multimer"]
"""AlphaFold2's model of one chain, or AlphaFold-Multimer's of several."""

RANGES: dict[str, Range] = {
    "max_relative_position": COUNT,
    "max_relative_chain": COUNT,
    "position_scale": POSITIVE,
    "blocks": COUNT,
    "angle_blocks": COUNT,
    "transition_layers": COUNT,
    "recycle_bins": Range(2),
    "distogram_bins": Range(2),
    "plddt_bins": Range(2),
    "pae_bins": Range(2),
    "pae_max_error": POSITIVE,
    "msa_dropout": BELOW_ONE,
    "pair_dropout": BELOW_ONE,
    "dropout": BELOW_ONE,
}
"""Allowed values of the model's numbers by field name. Other integers are sizes of at least 1."""


def check_model_numbers(settings: Any, where: str) -> None:
    """Raise SettingError for the first number of `settings` that is out of range, nested groups included.

    `where`: the dotted name of `settings`, such as 'model'. A group of options replaced by a single value (`evoformer: 3`) is a
    SettingError too, and so is a distance range that ends before it starts.
    """
    kind = ModelConfig if isinstance(settings, ModelConfig) else type(settings)  # without TrainingConfig's own fields
    hints = get_type_hints(kind)
    for item in dataclasses.fields(kind):
        value, hint, key = getattr(settings, item.name), hints[item.name], f"{where}.{item.name}"
        if dataclasses.is_dataclass(hint):
            if not dataclasses.is_dataclass(value):
                raise SettingError(key, repr(value), f"a group of options: {', '.join(field_names(hint))}")
            check_model_numbers(value, key)
            continue
        if item.name == "checkpoint" and value != "auto" and not (isinstance(value, int) and value in COUNT):
            raise SettingError(key, repr(value), "true, false, auto, or a number of blocks")
        if item.name == "checkpoint_projections" and not (isinstance(value, int) and value in COUNT):
            raise SettingError(key, repr(value), "true, false, or a number of blocks")
        if item.name == "layers" and value is not None:
            check_layers(key, value)
        allowed = RANGES.get(item.name, SIZE if hint is int else None)
        if allowed is not None and value not in allowed:
            raise SettingError(key, value, str(allowed))
        if item.name.endswith("min_distance"):
            last = item.name.replace("min_", "max_")
            if not value < getattr(settings, last):
                raise SettingError(key, value, f"below {where}.{last}, which is {getattr(settings, last)}")


def check_preset(name: str | None) -> None:
    """Raise UserError if the option --preset names no preset. None: the option is not given."""
    if name is not None and name not in PRESETS:
        raise UserError(f"--preset is '{name}', but must be one of {LISTED_PRESETS}.{nearest(name, PRESETS)}")


def field_names(settings: Any) -> list[str]:
    """The names of the fields of a dataclass."""
    return [item.name for item in dataclasses.fields(settings)]


def leaves(settings: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of all single settings of nested dataclasses. `where`: the dotted name of `settings`."""
    for item in dataclasses.fields(settings):
        value, key = getattr(settings, item.name), f"{where}.{item.name}".lstrip(".")
        if dataclasses.is_dataclass(value):
            yield from leaves(value, key)
        else:
            yield key, value


@dataclass(frozen=True)
class ChannelsConfig:
    """Widths of the representations."""

    RESUME: ClassVar[str] = "refused"

    msa: int = 256
    """c_m: channels of the MSA representation."""
    pair: int = 128
    """c_z: channels of the pair representation."""
    extra_msa: int = 64
    """c_e: channels of the extra-MSA representation."""
    single: int = 384
    """c_s: channels of the single representation and of the structure module."""


@dataclass(frozen=True)
class EmbedderConfig:
    """Input and recycling embedders (algorithms 3, 4, 5 and 32)."""

    RESUME: ClassVar[str] = "refused"

    max_relative_position: int = 32
    """Relative positions are clipped at plus and minus this many residues."""
    max_relative_chain: int = 2
    """Relative numbers of copies of a chain are clipped at plus and minus this many (multimer)."""
    recycle_bins: int = 15
    """Number of distance bins of the recycled CB-CB distogram."""
    recycle_min_distance: float = 3.25
    """Lower edge of the first bin of the recycled distogram, in Å."""
    recycle_max_distance: float = 20.75
    """Lower edge of the last bin of the recycled distogram, in Å."""


MSA_STACK = ("row_attention", "column_attention", "msa_transition")
PAIR_STACK = ("triangle_outgoing", "triangle_incoming", "attention_starting", "attention_ending", "pair_transition")
ALPHAFOLD2 = (*MSA_STACK, "outer_product_mean", *PAIR_STACK)
"""The sub-layers of a block in AlphaFold2's order (algorithm 6)."""
MULTIMER = ("outer_product_mean", *MSA_STACK, *PAIR_STACK)
"""The same in AlphaFold-Multimer's order."""
ORDERS: dict[ArrangementName, tuple[str, ...]] = {"monomer": ALPHAFOLD2, "multimer": MULTIMER}
_MOST_LAYERS = 64


def child_name(layer: str) -> str:
    """The name of a sub-layer within the stack that holds it: transition for msa_transition and for pair_transition."""
    return re.sub("^(msa|pair)_(?=transition)", "", layer)


class LayerName(NamedTuple):
    """A sub-layer in `EvoformerConfig.layers`."""

    name: str
    """Its own name in the block, which its parameters and its dropout have: the second row_attention is row_attention_2."""
    kind: str
    """Name of the sub-layer in the list."""
    path: str
    """The import path of its class; '' if it is one of AlphaFold2's."""
    made: type | None
    """This class, if it has been imported."""


def layer_names(layers: Sequence[str]) -> list[LayerName]:
    """The sub-layers that a list names."""
    found: list[LayerName] = []
    for entry in layers:
        kind, _, path = entry.partition("=")
        number = 1 + sum(kind == other.kind for other in found)
        name = kind if number == 1 else f"{kind}_{number}"
        found.append(LayerName(name, kind, path, getattr(entry, "made", None)))
    return found


class ImportedLayer(str):
    """An entry of `EvoformerConfig.layers` with an import path, and the class that was imported. Files hold the text alone."""

    made: type


def import_layers(config: ModelConfig, named: Collection[str] | None = None, source: str = "the config") -> ModelConfig:
    """The same configuration, whose sub-layers' classes are imported. Nothing else of evodsp imports them.

    `named`: the entries that the user named; None: all, because the configuration is the user's own. `source`: the file of a
    configuration that is not, for messages. Raises UserError for an entry that is not among them, or cannot be imported.
    """

    def imported(entry: str) -> str:
        path = entry.partition("=")[2]
        if not path:
            return entry
        if named is not None and entry not in named:
            raise UserError(
                f"{source}: its model has the sub-layer '{entry}', a class that evodsp imports only if you name it, too: "
                f"--layers '[{entry}]'"
            )
        module, _, name = path.partition(":")
        try:
            found = ImportedLayer(entry)
            found.made = getattr(importlib.import_module(module), name)
        except Exception as error:  # whatever the module raises
            raise UserError(f"cannot import the sub-layer '{entry}': {type(error).__name__}: {error}") from error
        return found

    for stack in ("extra_msa", "evoformer"):
        own = getattr(config, stack)
        if own.layers is not None:
            layers = tuple(imported(entry) for entry in own.layers)
            config = dataclasses.replace(config, **{stack: dataclasses.replace(own, layers=layers)})
    return config


def check_layers(key: str, layers: Any) -> None:
    """Raise SettingError unless `layers` is a list for `EvoformerConfig.layers`. `key`: its dotted name."""
    forms = f"one of {', '.join(ALPHAFOLD2)}, or a class of yours as NAME=PACKAGE.MODULE:CLASS"
    if not isinstance(layers, tuple) or not all(isinstance(entry, str) for entry in layers):
        raise SettingError(key, repr(layers), "null or a list of sub-layers")
    if not 1 <= len(layers) <= _MOST_LAYERS:
        raise SettingError(key, f"a list of {len(layers)}", f"a list of 1 to {_MOST_LAYERS} sub-layers, each {forms}")
    for entry in layers:
        if entry not in ALPHAFOLD2 and not re.fullmatch(r"[a-z][a-z0-9_]*=[\w.]+:\w+", entry, re.ASCII):
            near = nearest(entry.partition("=")[0], ALPHAFOLD2)
            raise SettingError(key, f"a list with '{entry}'", f"a list of sub-layers, each {forms}.{near}")
    names = [own.name for own in layer_names(layers)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingError(
            key, f"a list with two sub-layers called {twice}", "a list that calls each by a name of its own"
        )


@dataclass(frozen=True)
class EvoformerConfig:
    """A stack of Evoformer blocks (algorithm 6). The extra-MSA stack (algorithm 18) has the same fields."""

    RESUME: ClassVar[str] = "refused"

    blocks: int = 48
    """Number of blocks."""
    layers: tuple[str, ...] | None = None
    """Sub-layers of a block, in their order; null: those of the model's arrangement. AlphaFold2's order is row_attention,
    column_attention, msa_transition, outer_product_mean, triangle_outgoing, triangle_incoming, attention_starting,
    attention_ending, pair_transition; AlphaFold-Multimer's begins with outer_product_mean. Each may be left out, stand twice
    or more, or be a class of yours: NAME=PACKAGE.MODULE:CLASS (docs/layers.md)."""
    msa_heads: int = 8
    """Heads of MSA row and column attention."""
    msa_head_width: int = 32
    """Width of one head of MSA attention."""
    pair_heads: int = 4
    """Heads of triangle attention."""
    pair_head_width: int = 32
    """Width of one head of triangle attention."""
    triangle_channels: int = 128
    """Channels of the triangle multiplicative update."""
    outer_product_channels: int = 32
    """Channels of each operand of the outer product mean."""
    transition_factor: int = 4
    """Widening factor of the transitions."""
    msa_dropout: float = field(default=0.15, metadata={"resume": "applied"})
    """Dropout probability of MSA row attention. All sequences share one mask."""
    pair_dropout: float = field(default=0.25, metadata={"resume": "applied"})
    """Dropout probability of the pair updates. Masks are shared along rows, or columns in ending-node attention."""
    checkpoint: bool | int | Literal["auto"] = field(default=True, metadata={"resume": "same"})
    """Blocks whose activations are computed again in the backward pass instead of kept: true (all), false (none), a number of
    blocks, or auto: on a GPU, as many as its memory requires, measured in the first steps; on a CPU, all."""
    checkpoint_projections: bool | int = field(default=False, metadata={"resume": "same"})
    """Number of other blocks that keep all but queries, keys, values and gates, half of their bytes, which are computed
    again: true (all), false (none) or a number of blocks. With checkpoint: auto it is measured, before whole blocks."""


@dataclass(frozen=True)
class TemplateConfig:
    """Template embedding, pair stack and pointwise attention (algorithm 2, lines 7 to 13; algorithms 16 and 17)."""

    RESUME: ClassVar[str] = "refused"

    enabled: bool = False
    """Use templates. The samples must then hold template features (max_templates)."""
    torsions: bool = True
    """Append one MSA row per template, made of its torsion angles."""
    channels: int = 64
    """c_t: channels of a template's pair representation."""
    blocks: int = 2
    """Number of blocks of the template pair stack."""
    pair_heads: int = 4
    """Heads of triangle attention."""
    pair_head_width: int = 16
    """Width of one head of triangle attention."""
    triangle_channels: int = 64
    """Channels of the triangle multiplicative update."""
    transition_factor: int = 2
    """Widening factor of the pair transition."""
    pair_dropout: float = field(default=0.25, metadata={"resume": "applied"})
    """Dropout probability of the pair updates. Masks are shared along rows, or columns in ending-node attention."""
    attention_heads: int = 4
    """Heads of the pointwise attention over templates."""
    attention_head_width: int = 16
    """Width of one head of the pointwise attention."""
    distogram_bins: int = 39
    """Number of distance bins of a template's CB-CB distogram."""
    distogram_min_distance: float = 3.25
    """Lower edge of the first bin of the distogram, in Å."""
    distogram_max_distance: float = 50.75
    """Lower edge of the last bin of the distogram, in Å."""
    unit_vector: bool = False
    """Fill in the three unit-vector features between residues; the published monomer models leave them at zero."""
    checkpoint: bool | int | Literal["auto"] = field(default=True, metadata={"resume": "same"})
    """Blocks whose activations are computed again in the backward pass instead of kept: true (all), false (none), a number of
    blocks, or auto: on a GPU, as many as its memory requires, measured in the first steps; on a CPU, all."""


@dataclass(frozen=True)
class StructureModuleConfig:
    """Structure module (algorithms 20 to 24)."""

    RESUME: ClassVar[str] = "refused"

    iterations: int = 8
    """Number of iterations of the layer; all share the same weights."""
    heads: int = 12
    """Heads of invariant point attention."""
    scalar_query_width: int = 16
    """Width of the scalar queries and keys of one head."""
    scalar_value_width: int = 16
    """Width of the scalar values of one head."""
    query_points: int = 4
    """Query and key points per head."""
    value_points: int = 8
    """Value points per head."""
    transition_layers: int = 3
    """Linear layers of the transition after attention."""
    dropout: float = field(default=0.1, metadata={"resume": "applied"})
    """Dropout probability after attention and after the transition."""
    angle_channels: int = 128
    """Channels of the side-chain angle network."""
    angle_blocks: int = 2
    """Residual blocks of the side-chain angle network."""
    position_scale: float = 10.0
    """Unit of length of the frames inside the module, in Å (published multimer models: 20)."""
    scalar_bias: bool = True
    """Biases of the scalar queries, keys and values (published multimer models have none)."""


@dataclass(frozen=True)
class HeadsConfig:
    """Output heads (supplement 1.9)."""

    RESUME: ClassVar[str] = "refused"

    distogram_bins: int = 64
    """Bins of the distogram head."""
    distogram_min_distance: float = 2.3125
    """First boundary between bins, in Å."""
    distogram_max_distance: float = 21.6875
    """Last boundary between bins, in Å."""
    plddt_bins: int = 50
    """Bins of the predicted lDDT-CA."""
    plddt_channels: int = 128
    """Hidden channels of the pLDDT head."""
    experimentally_resolved: bool = False
    """Add the head that predicts which atoms an experiment resolves (published models have it)."""
    predicted_aligned_error: bool = False
    """Add the head that predicts the aligned error of residue pairs, and from it pTM (the published *_ptm models have it)."""
    pae_bins: int = 64
    """Bins of the predicted aligned error."""
    pae_max_error: float = 31.0
    """Last boundary between bins of the predicted aligned error, in Å."""


@dataclass(frozen=True)
class ModelConfig:
    """All sizes of a model, and how its parts are arranged."""

    arrangement: ArrangementName = field(default="monomer", metadata={"resume": "refused"})
    """The parts of the model: those of AlphaFold2 (monomer) or those of AlphaFold-Multimer (multimer)."""
    channels: ChannelsConfig = field(default_factory=ChannelsConfig)
    """Widths of the representations."""
    embedder: EmbedderConfig = field(default_factory=EmbedderConfig)
    """Input and recycling embedders."""
    extra_msa: EvoformerConfig = field(default_factory=lambda: EvoformerConfig(blocks=4, msa_head_width=8))
    """Extra-MSA stack."""
    evoformer: EvoformerConfig = field(default_factory=EvoformerConfig)
    """Evoformer stack."""
    templates: TemplateConfig = field(default_factory=TemplateConfig)
    """Template embedding."""
    structure_module: StructureModuleConfig = field(default_factory=StructureModuleConfig)
    """Structure module."""
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    """Output heads."""

    def __post_init__(self) -> None:
        if self.arrangement not in get_args(ArrangementName):
            raise SettingError("model.arrangement", f"'{self.arrangement}'", " or ".join(get_args(ArrangementName)))
        check_model_numbers(self, "model")
        for name in ("extra_msa", "evoformer"):
            if getattr(self, name).layers == ORDERS[self.arrangement]:  # a model has one way to say this
                object.__setattr__(self, name, dataclasses.replace(getattr(self, name), layers=None))

    def in_order(self, stack: EvoformerConfig) -> EvoformerConfig:
        """A stack's config with the names of its sub-layers filled in."""
        return dataclasses.replace(stack, layers=stack.layers or ORDERS[self.arrangement])

    def pair_share(self, residues: int, ranks: int, half: bool) -> int:
        """Bytes of a rank's shard of the pair representation. `half`: in half precision."""
        return residues * -(-residues // ranks) * self.channels.pair * (2 if half else 4)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """A named configuration. Raises UserError with the nearest valid name if `name` is unknown."""
        if name not in PRESETS:
            raise UserError(f"no model preset '{name}'; use one of {LISTED_PRESETS}.{nearest(name, PRESETS)}")
        return PRESETS[name]

    def to_dict(self) -> dict[str, Any]:
        """A nested dictionary, as stored in checkpoints."""
        values = dataclasses.asdict(self)
        for stack in ("extra_msa", "evoformer"):
            layers = values[stack]["layers"]
            values[stack]["layers"] = layers and [str(entry) for entry in layers]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`. Raises UserError on an unknown key, with the nearest valid one."""
        return from_dict(cls, values)


def from_dict(cls: type[Any], values: dict[str, Any], where: str = "") -> Any:
    """Build the dataclass `cls` from nested dictionaries. Raises UserError on an unknown key."""
    hints = get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    arguments = {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else key
        if key not in names:
            raise UserError(f"unknown config key '{path}'.{nearest(key, names)} Valid keys: {', '.join(sorted(names))}")
        if key == "layers" and isinstance(value, list):  # as YAML and JSON have it
            value = tuple(value)
        nested = dataclasses.is_dataclass(hints[key]) and isinstance(value, dict)
        arguments[key] = from_dict(hints[key], value, path) if nested else value
    return cls(**arguments)


_SMALL_STACK = EvoformerConfig(
    blocks=2,
    msa_heads=4,
    msa_head_width=8,
    pair_heads=2,
    pair_head_width=16,
    triangle_channels=32,
    outer_product_channels=8,
    transition_factor=2,
    checkpoint=False,
)


def _published(number: int, ptm: bool) -> ModelConfig:
    """Sizes of DeepMind's `model_<number>` or `model_<number>_ptm`. Models 1 and 2 use templates, 3 to 5 do not."""
    return ModelConfig(
        templates=TemplateConfig(enabled=number <= 2),
        heads=HeadsConfig(experimentally_resolved=True, predicted_aligned_error=ptm),
    )


def as_multimer(config: ModelConfig) -> ModelConfig:
    """The same sizes arranged as in AlphaFold-Multimer, with its unit of length and its heads."""
    return dataclasses.replace(
        config,
        arrangement="multimer",
        structure_module=dataclasses.replace(config.structure_module, position_scale=20.0, scalar_bias=False),
        heads=dataclasses.replace(config.heads, experimentally_resolved=True, predicted_aligned_error=True),
    )


_MULTIMER = as_multimer(_published(1, ptm=True))
"""Sizes of all published multimer models: they differ in the numbers of MSA rows that they were trained with."""

PRESETS: dict[str, ModelConfig] = {
    **{f"model_{n}{'_ptm' * ptm}": _published(n, ptm) for n in range(1, 6) for ptm in (False, True)},
    **{f"model_{n}_multimer{version}": _MULTIMER for n in range(1, 6) for version in ("", "_v2", "_v3")},
    # `small` is the model of configs/quickstart.yaml, for a few small proteins on a laptop's CPU.
    "small": ModelConfig(
        channels=ChannelsConfig(msa=64, pair=32, extra_msa=16, single=64),
        extra_msa=dataclasses.replace(_SMALL_STACK, blocks=1),
        evoformer=_SMALL_STACK,
        structure_module=StructureModuleConfig(iterations=4, heads=4, angle_channels=64),
        heads=HeadsConfig(plddt_channels=32),
    ),
    # `test` is for tests. All sizes differ, so that a transposed axis fails.
    "test": ModelConfig(
        channels=ChannelsConfig(msa=12, pair=10, extra_msa=6, single=14),
        extra_msa=EvoformerConfig(
            blocks=1, msa_heads=2, msa_head_width=3, pair_heads=2, pair_head_width=5, triangle_channels=7,
            outer_product_channels=4, transition_factor=2, checkpoint=False,
        ),
        evoformer=EvoformerConfig(
            blocks=2, msa_heads=3, msa_head_width=4, pair_heads=2, pair_head_width=6, triangle_channels=9,
            outer_product_channels=5, transition_factor=3, checkpoint=False,
        ),
        structure_module=StructureModuleConfig(
            iterations=2, heads=3, scalar_query_width=5, scalar_value_width=4, query_points=2, value_points=3, angle_channels=11
        ),
        heads=HeadsConfig(plddt_channels=8),
    ),
}  # fmt: skip


_OTHERS = ", ".join(sorted(name for name in PRESETS if not name.startswith("model_")))
LISTED_PRESETS = (
    "model_1, model_2, model_3, model_4, model_5 (each also as model_1_ptm, model_1_multimer, model_1_multimer_v2 and "
    f"model_1_multimer_v3), {_OTHERS}"
)
"""The names of all presets, for messages."""
PUBLISHED_MODELS = tuple(f"model_{number}{kind}" for kind in ("", "_ptm", "_multimer_v3") for number in range(1, 6))
"""The models whose parameters DeepMind publishes: those of AlphaFold2, and AlphaFold-Multimer's of version 3."""


def started_with(init_from: object) -> dict[str, Any]:
    """The settings, by their dotted names, that a run without `model.preset` takes from `init_from`, if that names published
    parameters or DeepMind's file of them: the preset, and the number of templates (supplement 1.2.3)."""
    name = str(init_from)
    if (file := name.rpartition("/")[2]).startswith("params_") and file.endswith(".npz"):
        name = file.removeprefix("params_").removesuffix(".npz")
    if name not in PUBLISHED_MODELS:
        return {}
    templates = 4 if PRESETS[name].templates.enabled else 0
    of_samples = {f"data.{part}.max_templates": templates for part in ("train", "validation")}
    return {"model.preset": name, **of_samples}


@dataclass(frozen=True)
class LossConfig:
    """Weights of the loss terms (supplement 1.9, equation 7), and their bounds. A term of weight zero is not computed."""

    RESUME: ClassVar[str] = "applied"

    backbone_fape: float = 0.5
    """Backbone frame-aligned point error, mean over the structure module's iterations."""
    sidechain_fape: float = 0.5
    """Frame-aligned point error of all atoms and rigid groups, last iteration."""
    torsion: float = 0.5
    """Side-chain torsion angles chi1 to chi4, mean over the iterations (as in AF2's code, without backbone torsions)."""
    angle_norm: float = 0.01
    """Deviation of the unnormalised angle vectors from unit length (part of the torsion loss)."""
    distogram: float = 0.3
    """Cross-entropy of the binned CB-CB distances."""
    masked_msa: float = 2.0
    """Cross-entropy of the masked MSA letters."""
    plddt: float = 0.01
    """Cross-entropy of the binned lDDT-CA of the prediction."""
    experimentally_resolved: float = 0.0
    """Cross-entropy of which atoms are resolved (AF2: 0.01 in fine-tuning; needs heads.experimentally_resolved)."""
    violation: float = 0.0
    """Bond lengths, bond angles and clashes of the prediction (AF2: 1 in fine-tuning)."""
    pae: float = 0.0
    """Cross-entropy of the binned aligned error (AF2: 0.1 for ptm models; needs heads.predicted_aligned_error)."""
    interface_fape: float = 0.0
    """Backbone frame-aligned point error across the chains of complexes (AlphaFold-Multimer: 0.5), where backbone_fape is
    that within chains."""
    interface_clamp: float = 30.0
    """Errors in interface_fape count at most as this many Å (OpenFold and Uni-Fold: 30; AlphaFold-Multimer's config: 1000)."""
    chain_centre: float = 0.0
    """Chains of complexes whose centres are more than 4 Å nearer to each other than they should be (Uni-Fold: 1)."""
    confidence_min_resolution: float = 0.1
    """The pLDDT, PAE and resolved losses count only structures whose resolution is at least this, in Å. Structures without one
    (NMR, predictions) are not counted, unless data.assumed_resolution gives them one."""
    confidence_max_resolution: float = 3.0
    """The pLDDT, PAE and resolved losses count only structures whose resolution is at most this, in Å."""
    scale_by_length: bool = True
    """Multiply each sample's loss by the square root of its number of residues."""

    @property
    def by_resolution(self) -> list[str]:
        """The terms with a weight that count only structures within the bounds of the resolution."""
        return [name for name in ("plddt", "experimentally_resolved", "pae") if getattr(self, name) != 0]

    def __post_init__(self) -> None:
        weights = [name for name in field_names(self) if name != "scale_by_length"]
        check_numbers(self, {**dict.fromkeys(weights, COUNT), "interface_clamp": POSITIVE}, "model.loss.")
        if self.confidence_min_resolution > self.confidence_max_resolution:
            raise SettingError(
                "model.loss.confidence_min_resolution",
                self.confidence_min_resolution,
                f"at most model.loss.confidence_max_resolution, which is {self.confidence_max_resolution}",
            )


@dataclass(frozen=True)
class KernelsConfig:
    """The implementation of each operator: auto, or a backend such as triton, chunked or reference (docs/training.md).

    auto takes the first that works on the device. At the start of a run each implementation is compared with the formula on
    the device, and passed over with a warning if it differs or fails. The log names the chosen ones.
    """

    RESUME: ClassVar[str] = "same"

    backend: str = "auto"
    """Backend for all operators that it implements."""
    attention: str | None = None
    """Implementation of attention without a pair bias (MSA columns); null: kernels.backend."""
    biased_attention: str | None = None
    """Implementation of attention with a pair bias (MSA rows, triangles); null: kernels.backend."""
    dropout_add: str | None = None
    """Implementation of residual sums with dropout; null: kernels.backend."""
    gated_linear: str | None = None
    """Implementation of the gated output of global column attention; null: kernels.backend."""
    gated_output: str | None = None
    """Implementation of the output of triangle multiplication; null: kernels.backend."""
    gated_projection: str | None = None
    """Implementation of the operands of triangle multiplication, where other ranks need them; null: kernels.backend."""
    global_attention: str | None = None
    """Implementation of attention with one query per column (extra MSA); null: kernels.backend."""
    layer_norm: str | None = None
    """Implementation of layer norms; null: kernels.backend."""
    linear: str | None = None
    """Implementation of the last linear layer of attention; null: kernels.backend."""
    outer_product: str | None = None
    """Implementation of the outer product mean; null: kernels.backend."""
    pooled_projections: str | None = None
    """Implementation of the projections and the mean of global column attention; null: kernels.backend."""
    projections: str | None = None
    """Implementation of the projections of attention and of the outer product mean; null: kernels.backend."""
    transition: str | None = None
    """Implementation of the two-layer perceptrons; null: kernels.backend."""
    triangle_multiplication: str | None = None
    """Implementation of triangle multiplication on one device; null: kernels.backend."""


@dataclass(frozen=True)
class FeatureConfig:
    """Sizes and noise of the feature pipeline (supplement 1.2)."""

    RESUME: ClassVar[str] = "applied"

    crop_size: int | None = 256
    """Residues of a crop; null keeps the whole chain."""
    msa_clusters: int = 128
    """Rows of the clustered MSA, including one row per template."""
    extra_msa: int = 1024
    """Rows of the extra MSA."""
    max_templates: int = 0
    """Templates per sample (AF2: 4), missing ones masked. Their rows count among `msa_clusters`. 0 for no templates."""
    recycles: int = 3
    """Largest number of recycling iterations; the model runs 1 to recycles + 1 times per sample."""
    uniform_recycling: bool = True
    """Draw the number of recycling iterations uniformly (as in training); false always takes the largest."""
    masked_msa_fraction: float = 0.15
    """Fraction of MSA letters that the masked-MSA loss hides."""
    masked_uniform: float = 0.1
    """Probability that a hidden letter becomes one of the 20 amino acids, drawn uniformly."""
    masked_profile: float = 0.1
    """Probability that a hidden letter becomes one drawn from the MSA profile."""
    masked_same: float = 0.1
    """Probability that a hidden letter stays as it is; the other hidden letters become the mask token."""
    block_delete: bool = False
    """Delete random blocks of MSA rows (supplement 1.2.6); meant for training on deep alignments."""
    block_delete_fraction: float = 0.3
    """Length of a deleted block, as a fraction of the rows."""
    block_delete_blocks: int = 5
    """Number of deleted blocks."""
    clamp_fape_fraction: float = 0.9
    """Fraction of training samples whose backbone FAPE is clamped at 10 Å (AlphaFold-Multimer: 1)."""
    spatial_crop_fraction: float = 0.5
    """Fraction of training samples of complexes that are cropped around an interface; the others are pieces of all chains
    (AlphaFold-Multimer: 0.5)."""


@dataclass(frozen=True)
class FilterConfig:
    """Filters of the training chains (supplement 1.2.5), by the values in a table of chains; null turns a filter off."""

    RESUME: ClassVar[str] = "applied"

    max_resolution: float | None = 9.0
    """Largest resolution in Å. Structures whose method has none (NMR) are kept; those of unknown resolution are not."""
    max_residue_share: float | None = 0.8
    """Largest share of one residue type in a chain's sequence; X counts as a type. Chains of unknown sequence are left out."""
    max_release_date: str | None = None
    """Latest release date, such as 2018-04-30; chains of unknown date are then left out."""


FILTERS_OF_PREDICTIONS = FilterConfig(max_resolution=None)
"""Filters of a self-distillation set, whose predicted structures have no resolution."""

Sampling = Literal["uniform", "alphafold2"]
"""Rule for drawing chains: equally often, or by length and cluster size."""


def check_selection(filters: FilterConfig, sampling: str, where: str) -> None:
    """Raise SettingError for a filter out of range, or an unknown sampling. `where`: prefix of their names in messages."""
    check_numbers(filters, {"max_resolution": POSITIVE, "max_residue_share": FRACTION}, f"{where}.filters.")
    if sampling not in get_args(Sampling):
        raise SettingError(f"{where}.sampling", f"'{sampling}'", " or ".join(get_args(Sampling)))


def check_exclusion(is_given: bool, has_identity: bool, where: str) -> None:
    """Raise UserError if an identity is given, but nothing that is excluded by it."""
    if has_identity and not is_given:
        raise UserError(
            f"{where}exclude_identity is given, but {where}exclude_like is null; give it, or leave exclude_identity out"
        )


def parse_latest_date(option: str, text: str | None) -> date | None:
    """The date that `text` gives, None for None. Raises UserError, naming the option, for anything but year-month-day."""
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"{option} is '{text}', but must be a date such as 2020-05-14") from error

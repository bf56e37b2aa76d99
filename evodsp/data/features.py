"""From one chain's MSA to the model's input features (supplement 1.2.6 to 1.2.9, table 1).

Every random step takes its random numbers as arguments; only `CycleDraws` draws them. The order of steps is AF2's: block
deletion, sampling of the clusters, masking, assignment to the nearest cluster, summary of the clusters, crop, padding. From
the summary on, each column is independent of the others, so only the cropped columns are computed.

Shapes: N sequences, S clusters, E extra sequences, L columns of the chain, R residues of the crop, C recycling iterations.
Residue codes: `evodsp.geometry.alphabet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, Int8, Int32, Int64

from evodsp.config import FeatureConfig
from evodsp.data.clusters import cluster_profiles, mean_deletions, nearest_clusters
from evodsp.data.crop import Crop
from evodsp.data.msa import MsaFeatures
from evodsp.data.templates.features import TemplateFeatures
from evodsp.errors import SettingError
from evodsp.geometry import residues
from evodsp.geometry.alphabet import LETTERS_WITH_GAP, LETTERS_WITH_MASK, LETTERS_WITH_X, MASK
from evodsp.ranges import COUNT, FRACTION, SIZE, check_numbers
from evodsp.rng import Draws

_ONE_HOT = np.eye(LETTERS_WITH_MASK, dtype=np.float32)

FEATURE_AXES: dict[str, tuple[str | None, ...]] = {
    "aatype": ("residues",),
    "residue_index": ("residues",),
    "seq_length": (),
    "seq_mask": ("residues",),
    "target_feat": ("residues", None),
    "atom14_atom_exists": ("residues", None),
    "atom37_atom_exists": ("residues", None),
    "residx_atom14_to_atom37": ("residues", None),
    "residx_atom37_to_atom14": ("residues", None),
    "msa_feat": ("msa", "residues", None),
    "msa_mask": ("msa", "residues"),
    "msa_row_mask": ("msa",),
    "true_msa": ("msa", "residues"),
    "bert_mask": ("msa", "residues"),
    "extra_msa": ("extra", "residues"),
    "extra_msa_mask": ("extra", "residues"),
    "extra_msa_row_mask": ("extra",),
    "extra_has_deletion": ("extra", "residues"),
    "extra_deletion_value": ("extra", "residues"),
}
"""All features except the templates', with their axes after the recycling axis. Named axes can be padded (with zeros); None
marks an axis of fixed size."""

TEMPLATE_AXES: dict[str, tuple[str | None, ...]] = {
    "template_aatype": ("templates", "residues"),
    "template_all_atom_positions": ("templates", "residues", None, None),
    "template_all_atom_masks": ("templates", "residues", None),
    "template_pseudo_beta": ("templates", "residues", None),
    "template_pseudo_beta_mask": ("templates", "residues"),
    "template_mask": ("templates",),
    "template_sum_probs": ("templates", None),
}
"""The template features, present if `max_templates` is above 0; likewise."""


@dataclass(frozen=True)
class Sizes:
    """Padded sizes of the named feature axes. `make_features` sets `templates` from the config."""

    residues: int
    msa: int
    extra: int
    templates: int = 0


@dataclass(frozen=True)
class CycleDraws:
    """All random numbers that the features of one recycling iteration need."""

    deleted_block_starts: Int64[np.ndarray, " blocks"]
    """First row of each deleted block; empty if no block is deleted."""
    order: Int64[np.ndarray, " N"]
    """All rows of the MSA in random order, the query first."""
    replace: Float[np.ndarray, "S L"]
    """Uniform numbers that choose the letters to replace."""
    letter: Float[np.ndarray, "S L"]
    """Uniform numbers that choose the new letters."""

    @classmethod
    def draw(cls, draws: Draws, rows: int, columns: int, config: FeatureConfig) -> CycleDraws:
        """Draw the numbers for an MSA of `rows` x `columns` from the stream `draws`."""
        clusters = min(max_clusters(config), rows)
        return cls(
            deleted_block_starts=deleted_block_starts(draws, rows, config),
            order=np.concatenate([np.zeros(1, np.int64), 1 + draws.at("msa_order").permutation(rows - 1)]),
            replace=draws.at("msa_replace").uniform(clusters, columns),
            letter=draws.at("msa_letter").uniform(clusters, columns),
        )


def deleted_block_starts(draws: Draws, rows: int, config: FeatureConfig) -> Int64[np.ndarray, " blocks"]:
    """The first row of each block that one recycling iteration deletes; none unless `config` deletes blocks."""
    blocks = config.block_delete_blocks if config.block_delete else 0
    return (draws.at("block_deletion").uniform(blocks) * rows).astype(np.int64)


def max_clusters(config: FeatureConfig) -> int:
    """Rows of the clustered MSA, the template rows not counted. `check_config` makes sure that there is one."""
    return config.msa_clusters - config.max_templates


_RANGES = {
    "crop_size": SIZE,
    "msa_clusters": SIZE,
    "extra_msa": SIZE,
    "max_templates": COUNT,
    "recycles": COUNT,
    "masked_msa_fraction": FRACTION,
    "masked_uniform": FRACTION,
    "masked_profile": FRACTION,
    "masked_same": FRACTION,
    "block_delete_fraction": FRACTION,
    "block_delete_blocks": COUNT,
    "clamp_fape_fraction": FRACTION,
}


def check_config(config: FeatureConfig, where: str = "") -> None:
    """Raise SettingError if a size or a probability of `config` is out of range. `where`: its name and a dot, for messages."""
    check_numbers(config, _RANGES, where)
    if max_clusters(config) < 1:
        expected = f"above {where}max_templates, which is {config.max_templates}: each template takes one of these rows"
        raise SettingError(f"{where}msa_clusters", config.msa_clusters, expected)
    if (total := config.masked_uniform + config.masked_profile + config.masked_same) > 1 + 1e-6:
        expected = f"lower: with masked_uniform and masked_profile the sum is {total:g}, and it can be at most 1"
        raise SettingError(f"{where}masked_same", config.masked_same, expected)


def kept_rows(rows: int, starts: Int64[np.ndarray, " blocks"], fraction: float) -> Bool[np.ndarray, " {rows}"]:
    """Which rows remain after deleting, from each start, a block of `fraction` of all rows (algorithm 1). The query remains."""
    keep = np.ones(rows, bool)
    index = np.arange(rows)
    length = int(rows * fraction)
    for start in starts:
        keep &= (index < start) | (index >= start + length)
    keep[0] = True
    return keep


def letter_probabilities(
    letters: Int8[np.ndarray, "*s"], profile: Float32[np.ndarray, "*#s 22"], config: FeatureConfig
) -> Float32[np.ndarray, "*s 23"]:
    """Probabilities of the new letter at each replaced position (supplement 1.2.7).

    It is a mixture: a uniformly drawn amino acid (never X or gap), a letter from the column's profile, the letter itself,
    and the mask token. `profile`: the profile of each letter's column (broadcast).
    """
    uniform = np.zeros(LETTERS_WITH_GAP, np.float32)
    uniform[:20] = 1 / 20
    probabilities = np.zeros((*letters.shape, LETTERS_WITH_MASK), np.float32)
    probabilities[..., :MASK] = (
        config.masked_uniform * uniform
        + np.float32(config.masked_profile) * profile
        + np.float32(config.masked_same) * _ONE_HOT[letters, :MASK]
    )
    probabilities[..., MASK] = 1 - config.masked_uniform - config.masked_profile - config.masked_same
    return probabilities


def mask_letters(
    msa: Int8[np.ndarray, "S L"],
    profile: Float32[np.ndarray, "L 22"],
    replace: Float[np.ndarray, "S L"],
    letter: Float[np.ndarray, "S L"],
    config: FeatureConfig,
) -> tuple[Int8[np.ndarray, "S L"], Float32[np.ndarray, "S L"]]:
    """Replace a fraction of the letters for the masked-MSA loss. Returns the masked MSA, and 1 where a letter was redrawn.

    `replace` and `letter` are uniform in [0, 1). A letter is redrawn where `replace` is below the fraction; the new one is
    found by inverting the cumulative distribution at `letter`.
    """
    replaced = replace < config.masked_msa_fraction
    columns = np.nonzero(replaced)[1]
    cumulative = np.cumsum(letter_probabilities(msa[replaced], profile[columns], config), axis=-1, dtype=np.float64)
    masked = msa.copy()
    # The last boundary is 1 up to rounding. It is left out, so that no number lies beyond it.
    masked[replaced] = (letter[replaced][:, None] >= cumulative[:, :-1]).sum(-1)
    return masked, replaced.astype(np.float32)


def deletion_value(
    deletions: Int32[np.ndarray, "*s"] | Float32[np.ndarray, "*s"], out: Float32[np.ndarray, "*s"] | None = None
) -> Float32[np.ndarray, "*s"]:
    """Numbers of deletions d mapped to [0, 1): arctan(d / 3) * 2 / pi. `out`: zeros to write them to."""
    values = np.zeros(deletions.shape, np.float32) if out is None else out
    some = np.nonzero(deletions)  # most cells have none
    values[some] = np.arctan(deletions[some].astype(np.float32) / np.float32(3)) * np.float32(2 / np.pi)
    return values


def target_features(aatype: Int32[np.ndarray, " R"]) -> Float32[np.ndarray, "R 22"]:
    """`target_feat`: one column that marks chain breaks (zero in a monomer), then the one-hot residue type (21)."""
    features = np.zeros((len(aatype), 22), np.float32)
    features[:, 1:] = _ONE_HOT[aatype, :LETTERS_WITH_X]
    return features


def sequence_features(aatype: Int32[np.ndarray, " L"], crop: Crop) -> dict[str, np.ndarray]:
    """The features that do not change between recycling iterations, cropped to R residues."""
    cropped = aatype[crop.residues]
    return {
        "aatype": cropped,
        "residue_index": np.arange(len(aatype), dtype=np.int32)[crop.residues],
        "seq_length": np.array(len(cropped), np.int32),
        "seq_mask": np.ones(len(cropped), np.float32),
        "target_feat": target_features(cropped),
        "atom14_atom_exists": residues.RESTYPE_ATOM14_MASK[cropped].astype(np.float32),
        "atom37_atom_exists": residues.RESTYPE_ATOM37_MASK[cropped].astype(np.float32),
        "residx_atom14_to_atom37": residues.RESTYPE_ATOM14_TO_ATOM37[cropped].astype(np.int32),
        "residx_atom37_to_atom14": residues.RESTYPE_ATOM37_TO_ATOM14[cropped].astype(np.int32),
    }


SAMPLED: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "msa_feat": (np.float32, (49,)),
    "msa_mask": (np.float32, ()),
    "msa_row_mask": (np.float32, ()),
    "true_msa": (np.int32, ()),
    "bert_mask": (np.float32, ()),
    "extra_msa": (np.int32, ()),
    "extra_msa_mask": (np.float32, ()),
    "extra_msa_row_mask": (np.float32, ()),
    "extra_has_deletion": (np.float32, ()),
    "extra_deletion_value": (np.float32, ()),
}
"""The features that each recycling iteration draws anew: their type, and the sizes of their axes without a name."""

Rows = tuple[Int64[np.ndarray, " S"], Int64[np.ndarray, " E"]]
"""The rows of the MSA that one recycling iteration takes: the centres of its clusters, and all others in random order."""


def sampled_rows(rows: int, config: FeatureConfig, draws: CycleDraws) -> Rows:
    """Which rows remain after block deletion, in the drawn order, divided into clusters and extra sequences."""
    keep = kept_rows(rows, draws.deleted_block_starts, config.block_delete_fraction)
    centres, others = np.split(draws.order[keep[draws.order]], [max_clusters(config)])
    return centres, others


def sampled_features(
    msa: MsaFeatures, config: FeatureConfig, drawn: Sequence[CycleDraws], crop: Crop, sizes: Sizes | None = None
) -> dict[str, np.ndarray]:
    """The MSA features of each recycling iteration, cropped to R residues, with the iterations as leading axis.

    `sizes`: pad with zeros to these sizes; None: the largest of the data, with at least one row of extra MSA. Features are
    written where they stay: at the sizes of fine-tuning they are 70 MB an iteration.
    """
    rows = [sampled_rows(msa.num_alignments, config, draws) for draws in drawn]
    if sizes is None:
        most = max(min(len(others), config.extra_msa) for _, others in rows)
        sizes = Sizes(crop.length, max(len(centres) for centres, _ in rows), max(1, most))
    stacked = {
        name: np.zeros((len(drawn), *_axis_sizes(FEATURE_AXES[name], sizes), *unnamed), dtype)
        for name, (dtype, unnamed) in SAMPLED.items()
    }
    cells = np.nonzero(msa.deletions[:, crop.residues])
    for cycle, (numbers, taken) in enumerate(zip(drawn, rows, strict=True)):
        _write_features(
            {name: values[cycle] for name, values in stacked.items()}, msa, config, numbers, taken, crop, cells
        )
    return stacked


def _axis_sizes(axes: Sequence[str | None], sizes: Sizes) -> tuple[int, ...]:
    return tuple(getattr(sizes, axis) for axis in axes if axis)


def _write_features(
    into: dict[str, np.ndarray],
    msa: MsaFeatures,
    config: FeatureConfig,
    draws: CycleDraws,
    rows: Rows,
    crop: Crop,
    cells: tuple[Int64[np.ndarray, " K"], ...],
) -> None:
    """Write the features of one recycling iteration into a corner of zeros. `cells`: (row, residue) of all deletions."""
    (centres, others), residues = rows, crop.residues
    size, length = len(centres), crop.length
    true, extra = msa.msa[centres], msa.msa[others]
    masked, bert_mask = mask_letters(true, msa.profile, draws.replace[:size], draws.letter[:size], config)
    nearest = nearest_clusters(masked, extra)

    masked, extra = masked[:, residues], extra[:, residues]
    deletions = msa.deletions[centres, residues]
    place = np.full(msa.num_alignments, -1)  # of each row of the MSA among the extra sequences
    place[others] = np.arange(len(others))
    row, column = (where[place[cells[0]] >= 0] for where in cells)
    means = mean_deletions(deletions, place[row], column, msa.deletions[row, crop.start + column], nearest)
    features = into["msa_feat"][:size, :length]
    cluster_profiles(masked, extra, nearest, out=features[..., 25:48])
    write_msa_features(features, masked, deletions, means)
    into["msa_mask"][:size, :length] = into["msa_row_mask"][:size] = 1
    into["true_msa"][:size, :length] = true[:, residues]
    into["bert_mask"][:size, :length] = bert_mask[:, residues]

    # The rows are in random order, so the first ones are a random sample.
    extra, others = extra[: config.extra_msa], others[: config.extra_msa]
    kept = slice(len(extra)), slice(length)
    into["extra_msa"][kept] = extra
    into["extra_msa_mask"][kept] = into["extra_msa_row_mask"][: len(extra)] = 1
    deletions = msa.deletions[others, residues]
    into["extra_has_deletion"][kept] = deletions > 0
    deletion_value(deletions, out=into["extra_deletion_value"][kept])


def write_msa_features(
    into: Float32[np.ndarray, "S R 49"],
    msa: Int8[np.ndarray, "S R"],
    deletions: Int32[np.ndarray, "S R"],
    cluster_deletion_mean: Float32[np.ndarray, "S R"],
) -> None:
    """Write `msa_feat` but for its cluster profiles, columns 25 to 47, into zeros.

    Its columns: one-hot letter (23), has deletion, deletion value, cluster profile (23), mean deletion value.
    """
    np.put_along_axis(into, msa[..., None].astype(np.int64), 1, axis=-1)
    into[..., 23] = deletions > 0
    deletion_value(deletions, out=into[..., 24])
    deletion_value(cluster_deletion_mean, out=into[..., 48])


def make_features(
    aatype: Int32[np.ndarray, " L"],
    msa: MsaFeatures,
    config: FeatureConfig,
    draws: Draws,
    cycles: int,
    crop: Crop | None = None,
    sizes: Sizes | None = None,
    templates: TemplateFeatures | None = None,
) -> dict[str, np.ndarray]:
    """All input features of one sample, named and typed as AF2's, with a leading axis of `cycles` recycling iterations.

    Each iteration samples, masks and clusters the MSA again, with the stream `draws.at(cycle)`. `crop`: the residues to keep
    (None: all). `sizes`: pad with zeros to these sizes (None: the sizes of the data, with at least one row of extra MSA, so
    that no axis is empty).

    If `max_templates` is above 0 there are always that many templates, the same in every iteration: the first ones of
    `templates` (whose R is L), then masked zeros. If it is 0, `templates` is ignored.
    """
    check_config(config)
    crop = crop or Crop(0, len(aatype))
    rows, columns = msa.msa.shape
    drawn = [CycleDraws.draw(draws.at(cycle), rows, columns, config) for cycle in range(cycles)]
    sampled = sampled_features(msa, config, drawn, crop, sizes)
    fixed = fixed_features(aatype, config, cycles, crop, sampled["msa_mask"].shape[2], templates)
    return {**fixed, **sampled}


def fixed_features(
    aatype: Int32[np.ndarray, " L"],
    config: FeatureConfig,
    cycles: int,
    crop: Crop,
    length: int,
    templates: TemplateFeatures | None = None,
) -> dict[str, np.ndarray]:
    """The features of `make_features` that are the same in each iteration, padded with zeros to `length` residues."""
    fixed = sequence_features(aatype, crop)
    if config.max_templates:
        found = TemplateFeatures.none(len(aatype)) if templates is None else templates
        fixed |= found.select(slice(config.max_templates), crop.residues).processed()
    padded = Sizes(length, 0, 0, config.max_templates)
    return {name: _repeated(name, values, padded, cycles) for name, values in fixed.items()}


def _repeated(name: str, values: np.ndarray, sizes: Sizes, cycles: int) -> np.ndarray:
    """A feature that is the same in each recycling iteration, with these as first axis, padded with zeros to `sizes`."""
    axes = FEATURE_AXES[name] if name in FEATURE_AXES else TEMPLATE_AXES[name]
    shape = tuple(getattr(sizes, axis) if axis else size for axis, size in zip(axes, values.shape, strict=True))
    out = np.zeros((cycles, *shape), values.dtype)
    out[(slice(None), *(slice(size) for size in values.shape))] = values
    return out

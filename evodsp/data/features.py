"""From one chain's MSA to the model's input features (supplement 1.2.6 to 1.2.9, table 1).

Every random step takes its random numbers as arguments; only `CycleDraws` draws them. The order of steps is AF2's: block
deletion, sampling of the clusters, masking, assignment to the nearest cluster, summary of the clusters, crop, padding. From
the summary on, each column is independent of the others, so only the cropped columns are computed.

Shapes: N sequences, S clusters, E extra sequences, L columns of the chain, R residues of the crop, C recycling iterations.
Residue codes: `evodsp.geometry.alphabet`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Float32, Int8, Int32, Int64

from evodsp.config import COUNT, FRACTION, SIZE, FeatureConfig, check_numbers
from evodsp.data.crop import Crop
from evodsp.data.msa import MsaFeatures
from evodsp.data.templates.features import TemplateFeatures
from evodsp.errors import SettingError
from evodsp.geometry import residues
from evodsp.geometry.alphabet import GAP, LETTERS_WITH_GAP, LETTERS_WITH_MASK, LETTERS_WITH_X, MASK
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
        blocks = config.block_delete_blocks if config.block_delete else 0
        return cls(
            deleted_block_starts=(draws.at("block_deletion").uniform(blocks) * rows).astype(np.int64),
            order=np.concatenate([np.zeros(1, np.int64), 1 + draws.at("msa_order").permutation(rows - 1)]),
            replace=draws.at("msa_replace").uniform(clusters, columns),
            letter=draws.at("msa_letter").uniform(clusters, columns),
        )


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


# One tile of the comparison, _COLUMN_TILE x _PAIR_TILE bytes, fits into a core's second-level cache.
_COLUMN_TILE, _PAIR_TILE = 16, 1 << 16


def nearest_clusters(clusters: Int8[np.ndarray, "S L"], extra: Int8[np.ndarray, "E L"]) -> Int32[np.ndarray, " E"]:
    """For each extra sequence, the cluster it agrees with in most columns; the first of equals (supplement 1.2.7, step 3).

    Gaps and masked letters agree with nothing. The supplement uses a matrix product of one-hot letters; comparing bytes in
    tiles gives the same counts, exactly, in a quarter of the time.
    """
    rows = max(1, _PAIR_TILE // len(clusters))
    # -1 occurs in no extra sequence, so it never agrees.
    clusters_by_column = np.ascontiguousarray(np.where(clusters < GAP, clusters, -1).astype(np.int8).T)[:, :, None]
    extra_by_column = np.ascontiguousarray(extra.T)[:, None, :]
    nearest = np.empty(len(extra), np.int32)
    for row in range(0, len(extra), rows):
        tile = extra_by_column[:, :, row : row + rows]
        agreement = np.zeros((len(clusters), tile.shape[2]), np.uint32)
        for column in range(0, len(tile), _COLUMN_TILE):
            equal = clusters_by_column[column : column + _COLUMN_TILE] == tile[column : column + _COLUMN_TILE]
            agreement += np.add.reduce(equal.view(np.uint8), axis=0, dtype=np.uint8)
        nearest[row : row + rows] = agreement.argmax(axis=0)
    return nearest


# Cells of an alignment that are counted at once. Bounds the memory of the index arrays to tens of megabytes.
_COUNTED_CELLS = 1 << 20


def summarise_clusters(
    clusters: Int8[np.ndarray, "S R"],
    cluster_deletions: Int32[np.ndarray, "S R"],
    extra: Int8[np.ndarray, "E R"],
    extra_deletions: Int32[np.ndarray, "E R"],
    nearest: Int32[np.ndarray, " E"],
) -> tuple[Float32[np.ndarray, "S R 23"], Float32[np.ndarray, "S R"]]:
    """Letter frequencies and mean number of deletions of each cluster, its centre included (supplement 1.2.7, step 4)."""
    size, columns = clusters.shape
    members = (1e-6 + 1 + np.bincount(nearest, minlength=size)).astype(np.float32)
    base = nearest.astype(np.int64)[:, None]
    counts = _ONE_HOT[clusters]
    step = max(1, _COUNTED_CELLS // max(1, len(extra)))
    for start in range(0, columns, step):
        block = slice(start, start + step)
        width = counts[:, block].shape[1]
        cells = (base * width + np.arange(width)) * LETTERS_WITH_MASK + extra[:, block]
        counts[:, block] += np.bincount(cells.ravel(), minlength=size * width * LETTERS_WITH_MASK).reshape(
            size, width, LETTERS_WITH_MASK
        )
    # Few cells have deletions: count only those.
    row, column = np.nonzero(extra_deletions)
    cells = nearest[row].astype(np.int64) * columns + column
    deletions = np.bincount(cells, weights=extra_deletions[row, column], minlength=size * columns)
    deletion_sum = deletions.reshape(size, columns) + cluster_deletions
    return counts / members[:, None, None], (deletion_sum / members[:, None]).astype(np.float32)


def deletion_value(deletions: Int32[np.ndarray, "*s"] | Float32[np.ndarray, "*s"]) -> Float32[np.ndarray, "*s"]:
    """Numbers of deletions d mapped to [0, 1): arctan(d / 3) * 2 / pi."""
    return np.arctan(deletions.astype(np.float32) / np.float32(3)) * np.float32(2 / np.pi)


def msa_features(
    msa: Int8[np.ndarray, "S R"],
    deletions: Int32[np.ndarray, "S R"],
    cluster_profile: Float32[np.ndarray, "S R 23"],
    cluster_deletion_mean: Float32[np.ndarray, "S R"],
) -> Float32[np.ndarray, "S R 49"]:
    """`msa_feat`: one-hot letter (23), has deletion, deletion value, cluster profile (23), mean deletion value."""
    features = np.empty((*msa.shape, 49), np.float32)
    features[..., :23] = _ONE_HOT[msa]
    features[..., 23] = deletions > 0
    features[..., 24] = deletion_value(deletions)
    features[..., 25:48] = cluster_profile
    features[..., 48] = deletion_value(cluster_deletion_mean)
    return features


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


def sampled_features(msa: MsaFeatures, config: FeatureConfig, draws: CycleDraws, crop: Crop) -> dict[str, np.ndarray]:
    """The MSA features of one recycling iteration, cropped to R residues, without padding of rows."""
    keep = kept_rows(msa.num_alignments, draws.deleted_block_starts, config.block_delete_fraction)
    order = draws.order[keep[draws.order]]
    centres, others = np.split(order, [max_clusters(config)])
    true, extra = msa.msa[centres], msa.msa[others]
    drawn = len(centres)
    masked, bert_mask = mask_letters(true, msa.profile, draws.replace[:drawn], draws.letter[:drawn], config)
    nearest = nearest_clusters(masked, extra)

    masked, true, extra = masked[:, crop.residues], true[:, crop.residues], extra[:, crop.residues]
    deletions, extra_deletions = msa.deletions[centres, crop.residues], msa.deletions[others, crop.residues]
    summary = summarise_clusters(masked, deletions, extra, extra_deletions, nearest)
    # The rows are in random order, so the first ones are a random sample.
    extra, extra_deletions = extra[: config.extra_msa], extra_deletions[: config.extra_msa]
    return {
        "msa_feat": msa_features(masked, deletions, *summary),
        "msa_mask": np.ones(masked.shape, np.float32),
        "msa_row_mask": np.ones(len(masked), np.float32),
        "true_msa": true.astype(np.int32),
        "bert_mask": bert_mask[:, crop.residues],
        "extra_msa": extra.astype(np.int32),
        "extra_msa_mask": np.ones(extra.shape, np.float32),
        "extra_msa_row_mask": np.ones(len(extra), np.float32),
        "extra_has_deletion": (extra_deletions > 0).astype(np.float32),
        "extra_deletion_value": deletion_value(extra_deletions),
    }


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
    fixed = sequence_features(aatype, crop)
    if config.max_templates:
        found = TemplateFeatures.none(len(aatype)) if templates is None else templates
        fixed |= found.select(slice(config.max_templates), crop.residues).processed()
    rows, columns = msa.msa.shape
    drawn = [CycleDraws.draw(draws.at(cycle), rows, columns, config) for cycle in range(cycles)]
    per_cycle = [{**fixed, **sampled_features(msa, config, numbers, crop)} for numbers in drawn]
    if sizes is None:
        sizes = Sizes(
            residues=crop.length,
            msa=max(len(features["msa_row_mask"]) for features in per_cycle),
            extra=max(1, *(len(features["extra_msa_row_mask"]) for features in per_cycle)),
        )
    return stack_cycles(per_cycle, replace(sizes, templates=config.max_templates))


def stack_cycles(per_cycle: list[dict[str, np.ndarray]], sizes: Sizes) -> dict[str, np.ndarray]:
    """Stack the features of each recycling iteration along a new first axis, padded with zeros to `sizes`."""
    stacked = {}
    for name, first in per_cycle[0].items():
        axes = FEATURE_AXES[name] if name in FEATURE_AXES else TEMPLATE_AXES[name]
        shape = tuple(getattr(sizes, axis) if axis else size for axis, size in zip(axes, first.shape, strict=True))
        out = np.zeros((len(per_cycle), *shape), first.dtype)
        for cycle, features in enumerate(per_cycle):
            values = features[name]
            corner: tuple[int | slice, ...] = (cycle, *(slice(size) for size in values.shape))
            out[corner] = values
        stacked[name] = out
    return stacked

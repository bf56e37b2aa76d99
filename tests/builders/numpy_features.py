"""MSA features made with NumPy, one recycling iteration after another: what `evodsp.features` is compared with, to the bit.

It knows of AF2's formulas (supplement 1.2.6 to 1.2.9) and of the addressed random numbers, and of nothing in `evodsp.features`
but `deletion_value`, because arc tangents of two libraries differ in their last bit.

Shapes: N sequences, S clusters, E extra sequences, L columns of the chain, R residues of the crop, C recycling iterations,
K deletions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float32, Int8, Int32, Int64

from evodsp.config import FeatureConfig
from evodsp.data.samples.raw_features import (
    FEATURE_AXES,
    SAMPLED,
    Crop,
    FeatureSizes,
    check_config,
    deleted_block_starts,
    fixed_features,
    kept_rows,
    max_clusters,
    piece,
)
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.templates.features import TemplateFeatures
from evodsp.features.batch import deletion_value as of_deletions
from evodsp.geometry.residues import GAP, LETTERS_WITH_GAP, LETTERS_WITH_MASK, LETTERS_WITH_X, MASK
from evodsp.rng import Draws

_ONE_HOT = np.eye(LETTERS_WITH_MASK, dtype=np.float32)
_AGREEING = _ONE_HOT * (np.arange(LETTERS_WITH_MASK) < LETTERS_WITH_X)
"""One-hot letters; gaps and masked letters agree with nothing."""

Rows = tuple[Int64[np.ndarray, " S"], Int64[np.ndarray, " E"]]
"""The rows of the MSA that one recycling iteration takes: the centres of its clusters, and all others in random order."""


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
    """`evodsp.features.batch.deletion_value`. `out`: where to write the values."""
    values = of_deletions(torch.from_numpy(np.ascontiguousarray(deletions))).numpy()
    if out is not None:
        out[...] = values
    return values


def nearest_clusters(clusters: Int8[np.ndarray, "S L"], extra: Int8[np.ndarray, "E L"]) -> Int64[np.ndarray, " E"]:
    """For each extra sequence, the cluster it agrees with in most columns; the first of equals (supplement 1.2.7, step 3)."""
    columns = clusters.shape[1] * LETTERS_WITH_MASK
    return (_AGREEING[extra].reshape(-1, columns) @ _ONE_HOT[clusters].reshape(-1, columns).T).argmax(1)


def cluster_profiles(
    clusters: Int8[np.ndarray, "S R"],
    extra: Int8[np.ndarray, "E R"],
    nearest: Int64[np.ndarray, " E"],
    out: Float32[np.ndarray, "S R 23"] | None = None,
) -> Float32[np.ndarray, "S R 23"]:
    """Letter frequencies of each cluster, its centre included (supplement 1.2.7, step 4). `out`: where to write them."""
    size, columns = clusters.shape
    out = np.empty((size, columns, LETTERS_WITH_MASK), np.float32) if out is None else out
    members = _members(nearest, size)[:, None, None]
    letters = np.concatenate([clusters, extra])
    base = np.concatenate([np.arange(size), nearest])[:, None]
    step = max(1, (1 << 20) // len(letters))
    for start in range(0, columns, step):
        block = letters[:, start : start + step]
        width = block.shape[1]
        cells = (base * width + np.arange(width)) * LETTERS_WITH_MASK + block
        counts = np.bincount(cells.ravel(), minlength=size * width * LETTERS_WITH_MASK)
        counts = counts.reshape(size, width, LETTERS_WITH_MASK).astype(np.float32)
        np.divide(counts, members, out=out[:, start : start + step])
    return out


def mean_deletions(
    own: Int32[np.ndarray, "S R"],
    row: Int64[np.ndarray, " K"],
    column: Int64[np.ndarray, " K"],
    number: Int32[np.ndarray, " K"],
    nearest: Int64[np.ndarray, " E"],
) -> Float32[np.ndarray, "S R"]:
    """Mean number of deletions of each cluster (supplement 1.2.7, step 4). `own`: those of the centres.

    `row`, `column`, `number`: the cells of extra sequences that have deletions, which are few.
    """
    size, columns = own.shape
    sums = np.bincount(nearest[row].astype(np.int64) * columns + column, weights=number, minlength=own.size)
    return ((sums.reshape(own.shape) + own) / _members(nearest, size)[:, None]).astype(np.float32)


def _members(nearest: Int64[np.ndarray, " E"], size: int) -> Float32[np.ndarray, " {size}"]:
    """Sequences of each cluster, with AlphaFold2's small number beside them."""
    return (1e-6 + 1 + np.bincount(nearest, minlength=size)).astype(np.float32)


def sampled_rows(rows: int, config: FeatureConfig, draws: CycleDraws) -> Rows:
    """Which rows remain after block deletion, in the drawn order, divided into clusters and extra sequences."""
    keep = kept_rows(rows, draws.deleted_block_starts, config.block_delete_fraction)
    centres, others = np.split(draws.order[keep[draws.order]], [max_clusters(config)])
    return centres, others


def sampled_features(
    msa: MsaFeatures, config: FeatureConfig, drawn: Sequence[CycleDraws], crop: Crop, sizes: FeatureSizes | None = None
) -> dict[str, np.ndarray]:
    """The MSA features of each recycling iteration, cropped to R residues, with the iterations as leading axis.

    `sizes`: pad with zeros to these sizes; None: the largest of the data, with at least one row of extra MSA. Features are
    written where they stay: at the sizes of fine-tuning they are 70 MB an iteration.
    """
    rows = [sampled_rows(msa.num_alignments, config, draws) for draws in drawn]
    if sizes is None:
        most = max(min(len(others), config.extra_msa) for _, others in rows)
        sizes = FeatureSizes(len(crop), max(len(centres) for centres, _ in rows), max(1, most))
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


def _axis_sizes(axes: Sequence[str | None], sizes: FeatureSizes) -> tuple[int, ...]:
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
    size, length = len(centres), len(crop)
    true, extra = msa.msa[centres], msa.msa[others]
    masked, bert_mask = mask_letters(true, msa.profile, draws.replace[:size], draws.letter[:size], config)
    nearest = nearest_clusters(masked, extra)

    masked, extra = masked[:, residues], extra[:, residues]
    deletions = msa.deletions[np.ix_(centres, residues)]
    place = np.full(msa.num_alignments, -1)  # of each row of the MSA among the extra sequences
    place[others] = np.arange(len(others))
    row, column = (where[place[cells[0]] >= 0] for where in cells)
    means = mean_deletions(deletions, place[row], column, msa.deletions[row, residues[column]], nearest)
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
    deletions = msa.deletions[np.ix_(others, residues)]
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
    sizes: FeatureSizes | None = None,
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
    msa = replace(msa, deletions=msa.deletions.astype(np.int32))
    crop = crop or piece(0, len(aatype))
    rows, columns = msa.msa.shape
    drawn = [CycleDraws.draw(draws.at(cycle), rows, columns, config) for cycle in range(cycles)]
    sampled = sampled_features(msa, config, drawn, crop, sizes)
    fixed = fixed_features(aatype, config, cycles, crop, sampled["msa_mask"].shape[2], templates)
    return {**fixed, **sampled}


LETTERS = 23


def by_formula(
    centres: np.ndarray, extra: np.ndarray, of_centres: np.ndarray, deletions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Profiles and mean deletions: a softmax of 1,000 times the agreement, times the number of residues."""
    residues = centres.shape[1]
    centre_letters, extra_letters = (np.eye(LETTERS)[x] for x in (centres, extra))
    counted = np.arange(LETTERS) < GAP
    agreement = np.einsum("mrc,nrc->nm", extra_letters, centre_letters * counted)
    exponential = np.exp(1e3 * (agreement - agreement.max(0)))
    share = exponential / exponential.sum(0) * residues  # [S, E]
    weight = share.sum(1) + 1
    profile = (np.einsum("nm,mrc->nrc", share, extra_letters) + centre_letters) / weight[:, None, None]
    return profile, (share @ deletions + of_centres) / weight[:, None]

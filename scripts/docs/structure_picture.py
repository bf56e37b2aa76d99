"""Draw predicted structures over their true ones: a ribbon coloured by pLDDT over a grey ribbon. Made for the README.

    python -m scripts.docs.structure_picture --predictions runs/demo/predictions --structures data/mmcif_files \\
        --chains s005_A,s010_A,s015_A --output docs/assets/predictions.png

The prediction is superposed on the true structure by its CA atoms. Helices are wide ribbons, strands are arrows, and the rest
is a tube. The view is orthographic, along the structure's shortest principal axis. Surfaces are sampled more densely than the
pixels, and each pixel keeps the sample nearest to the viewer; lines are drawn where the depth jumps.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from evodsp import metrics
from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import Chain
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_ORDER
from evodsp.inference.report import ChainScores, compare
from evodsp.inference.results import read_result

# Lowest pLDDT, colour and name, as in the AlphaFold database.
PLDDT_BANDS = (
    (90.0, "#0053d6", "very high (90 to 100)"),
    (70.0, "#65cbf3", "confident (70 to 90)"),
    (50.0, "#ffdb13", "low (50 to 70)"),
    (0.0, "#ff7d45", "very low (below 50)"),
)
GREY = (0.72, 0.73, 0.76)
OUTLINE = (0.16, 0.18, 0.22)
DPI = 130
PIXELS_PER_ANGSTROM, MARGIN = 34, 1.0
PER_RESIDUE = 150  # cross-sections between two CA atoms
AROUND = 240  # points of a cross-section
LIGHT = np.array([-0.35, 0.55, 0.76]) / np.linalg.norm([-0.35, 0.55, 0.76])
# Half width and half thickness of the ribbon, in Å.
SECTIONS = {"helix": (1.35, 0.28), "strand": (1.05, 0.28), "coil": (0.33, 0.33)}
SQUARENESS = 0.55  # 1: elliptic ribbons; less: flat ones with round edges
ARROW_HEAD = 1.9  # half width where a strand's arrow head begins


@dataclass(frozen=True)
class Ribbon:
    """Cross-sections along a chain: n of them, k points each."""

    rings: Float[np.ndarray, "n k 3"]
    normals: Float[np.ndarray, "n k 3"]
    residue: Int[np.ndarray, " n"]
    """The residue that a cross-section belongs to."""


def secondary_structure(ca: Float[np.ndarray, "R 3"]) -> list[str]:
    """`helix`, `strand` or `coil` of each residue, from distances between CA atoms along the chain and to other strands."""
    length = len(ca)
    distance = np.linalg.norm(ca[:, None] - ca[None], axis=-1)
    kinds = ["coil"] * length
    for i in range(length - 4):
        if distance[i, i + 2] < 6.1 and distance[i, i + 3] < 6.4 and distance[i, i + 4] < 7.4:
            kinds[i : i + 5] = ["helix"] * 5
    stretched = np.array([2 <= i < length - 2 and distance[i - 1, i + 1] > 6.0 for i in range(length)])
    candidates = np.flatnonzero(stretched).tolist()
    for i in candidates:
        partners = [j for j in candidates if abs(i - j) > 3 and distance[i, j] < 6.0]
        if partners and kinds[i] == "coil":
            kinds[i] = "strand"
    return _without_short_runs(kinds)


def _without_short_runs(kinds: list[str], shortest: int = 3) -> list[str]:
    """Close gaps of one residue inside a strand, then turn runs shorter than `shortest` into coil."""
    closed = list(kinds)
    for i in range(1, len(kinds) - 1):
        if kinds[i] == "coil" and kinds[i - 1] == kinds[i + 1] == "strand":
            closed[i] = "strand"
    start = 0
    for end in range(1, len(closed) + 1):
        if end == len(closed) or closed[end] != closed[start]:
            if end - start < shortest:
                closed[start:end] = ["coil"] * (end - start)
            start = end
    return closed


def ribbon(atoms: Float[np.ndarray, "R 3 3"]) -> Ribbon:
    """The ribbon of a chain from its CA, C and O atoms."""
    ca, c, o = atoms[:, 0], atoms[:, 1], atoms[:, 2]
    kinds = secondary_structure(ca)
    path, across = _smoothed(ca, kinds), _unit(o - c)
    for i in range(1, len(across)):  # neighbouring carbonyls of a strand point to opposite sides
        if across[i] @ across[i - 1] < 0:
            across[i] = -across[i]
    across = _unit(np.stack([across[max(0, i - 1) : i + 2].mean(0) for i in range(len(across))]))

    position = np.linspace(0, len(ca) - 1, (len(ca) - 1) * PER_RESIDUE + 1)
    centre, side = _spline(path, position), _spline(across, position)
    along = _unit(np.gradient(centre, axis=0))
    side = _unit(side - (side * along).sum(-1, keepdims=True) * along)
    up = np.cross(along, side)
    size = _sizes(kinds, position)

    angle = _angles()
    power = np.where(size[:, :1] > 1.5 * size[:, 1:], SQUARENESS, 1.0)
    x, y = _outline(angle, power)
    offsets = x[..., None] * (size[:, :1] * side)[:, None] + y[..., None] * (size[:, 1:] * up)[:, None]
    normals = _unit(
        np.cos(angle)[None, :, None] * (side / size[:, :1])[:, None]
        + np.sin(angle)[None, :, None] * (up / size[:, 1:])[:, None]
    )
    return Ribbon(centre[:, None] + offsets, normals, np.rint(position).astype(int))


def _outline(
    angle: Float[np.ndarray, " k"], power: Float[np.ndarray, "*n 1"] | float
) -> tuple[Float[np.ndarray, "*n k"], Float[np.ndarray, "*n k"]]:
    """An ellipse of half axes 1; a `power` below 1 fills its corners."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.sign(cos) * np.abs(cos) ** power, np.sign(sin) * np.abs(sin) ** power


def _angles() -> Float[np.ndarray, " k"]:
    """Angles that lie evenly along the outline of a helix's cross-section."""
    fine = np.linspace(0, 2 * np.pi, 20_001)
    x, y = _outline(fine, SQUARENESS)
    width, thickness = SECTIONS["helix"]
    length = np.concatenate([[0], np.hypot(np.diff(width * x), np.diff(thickness * y)).cumsum()])
    return np.interp(np.linspace(0, length[-1], AROUND, endpoint=False), length, fine)


def _smoothed(ca: Float[np.ndarray, "R 3"], kinds: list[str]) -> Float[np.ndarray, "R 3"]:
    """CA atoms, those of strands moved to the mean of their neighbours, because strands are pleated."""
    path = ca.copy()
    for i in range(1, len(ca) - 1):
        if kinds[i] == "strand":
            path[i] = (ca[i - 1] + 2 * ca[i] + ca[i + 1]) / 4
    return path


def _sizes(kinds: list[str], position: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n 2"]:
    """Half width and half thickness at each cross-section. A strand ends in an arrow head of 1.5 residues."""
    size = np.stack([np.interp(position, range(len(kinds)), [SECTIONS[k][part] for k in kinds]) for part in (0, 1)], -1)
    ends = [i for i, kind in enumerate(kinds) if kind == "strand" and (i + 1 == len(kinds) or kinds[i + 1] != kind)]
    for end in ends:
        before = (position > end - 3.5) & (position <= end - 1.5)
        size[before, 0] = SECTIONS["strand"][0]
        head = (position > end - 1.5) & (position <= end)
        size[head, 0] = np.interp(position[head], [end - 1.5, end], [ARROW_HEAD, SECTIONS["coil"][0]])
        after = (position > end) & (position < end + 1)
        size[after, 0] = SECTIONS["coil"][0]
    return size


def _spline(points: Float[np.ndarray, "R d"], position: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n d"]:
    """A Catmull-Rom curve through `points`, which lie at positions 0, 1, …"""
    padded = np.concatenate([2 * points[:1] - points[1:2], points, 2 * points[-1:] - points[-2:-1]])
    start = np.minimum(position.astype(int), len(points) - 2)
    t = (position - start)[:, None]
    p0, p1, p2, p3 = (padded[start + k] for k in range(4))
    return 0.5 * (2 * p1 + (p2 - p0) * t + (2 * p0 - 5 * p1 + 4 * p2 - p3) * t**2 + (3 * p1 - p0 - 3 * p2 + p3) * t**3)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-9)


def render(shapes: list[tuple[Ribbon, Float[np.ndarray, "n 3"]]]) -> Float[np.ndarray, "h w 3"]:
    """The picture of ribbons and the colours of their cross-sections, seen along z; white where there is nothing."""
    points = np.concatenate([shape.rings.reshape(-1, 3) for shape, _ in shapes])
    low, high = points.min(0) - MARGIN, points.max(0) + MARGIN
    width, height = (np.ceil((high - low)[:2] * PIXELS_PER_ANGSTROM)).astype(int)
    depth, image = np.full(height * width, -np.inf), np.ones((height * width, 3))
    for shape, colours in shapes:
        ring = shape.rings.reshape(-1, 3)
        column, row = ((ring[:, :2] - low[:2]) * PIXELS_PER_ANGSTROM).astype(int).T
        shaded = _shaded(shape, colours)
        order = np.argsort(ring[:, 2], kind="stable")  # the last one written into a pixel is the nearest
        for across, down in ((0, 0), (1, 0), (0, 1), (1, 1)):  # a sample covers two pixels each way: no holes
            pixel = ((height - 1 - row - down) * width + column + across)[order]
            layer, nearest = np.full(len(depth), -np.inf), np.full(len(depth), -1)
            layer[pixel], nearest[pixel] = ring[order, 2], order
            front = layer > depth
            depth[front], image[front] = layer[front], shaded[nearest[front]]
    image, depth = image.reshape(height, width, 3), depth.reshape(height, width)
    seen = np.isfinite(depth)
    haze = 0.3 * (high[2] - np.where(seen, depth, high[2])) / (high[2] - low[2])  # what is farther away is paler
    image = image * (1 - haze[..., None]) + haze[..., None]
    image[_jumps(depth)] = OUTLINE
    return image


def _shaded(shape: Ribbon, colours: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "p 3"]:
    normal = shape.normals.reshape(-1, 3)
    diffuse = np.clip(normal @ LIGHT, 0, None)[:, None]
    shine = np.clip(normal @ _unit(LIGHT + np.array([0, 0, 1.0])), 0, None)[:, None] ** 40
    base = np.repeat(colours, AROUND, axis=0)
    return np.clip(base * (0.5 + 0.55 * diffuse) + 0.22 * shine, 0, 1)


def _jumps(depth: Float[np.ndarray, "h w"]) -> np.ndarray:
    """Pixels in front of a neighbour that is more than 1 Å deeper, or empty: where one shape ends before another."""
    far = np.where(np.isfinite(depth), depth, -1e3)
    edge = np.zeros(depth.shape, dtype=bool)
    for shift in (1, 2):
        for axis in (0, 1):
            for direction in (shift, -shift):
                edge |= far - np.roll(far, direction, axis) > 1.0
    return edge


def confidence_colours(plddt: Float[np.ndarray, " R"]) -> Float[np.ndarray, "R 3"]:
    """The AlphaFold database's colours, each residue by its band."""
    colours = np.empty((len(plddt), 3))
    for lower, colour, _ in reversed(PLDDT_BANDS):
        colours[plddt >= lower] = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    return colours


def draw(axes: Axes, truth: Chain, predicted: Chain, plddt: Float[np.ndarray, " R"]) -> None:
    """Draw one prediction over its true structure."""
    atoms = [ATOM_ORDER[name] for name in ("CA", "C", "O")]
    seen = truth.mask[:, atoms].all(-1)
    true, guess = truth.positions[seen][:, atoms].astype(float), predicted.positions[seen][:, atoms].astype(float)
    motion = metrics.superpose(
        torch.from_numpy(guess[:, 0]), torch.from_numpy(true[:, 0]), torch.ones(len(true), dtype=torch.float64)
    )
    guess = motion.unsqueeze(-1).unsqueeze(-1).apply(torch.from_numpy(guess)).numpy()
    view = _view(true[:, 0])
    centre = true[:, 0].mean(0)
    true, guess = (true - centre) @ view.T, (guess - centre) @ view.T

    below, above = ribbon(true), ribbon(guess)
    grey = np.broadcast_to(GREY, (len(below.residue), 3))
    axes.imshow(render([(below, grey), (above, confidence_colours(plddt[seen])[above.residue])]), interpolation="none")
    axes.set_axis_off()


def _view(ca: Float[np.ndarray, "R 3"]) -> Float[np.ndarray, "3 3"]:
    """Rows: the viewer's right, up and backwards; the longest principal axis goes up, the shortest towards the viewer."""
    _, _, axes = np.linalg.svd(ca - ca.mean(0), full_matrices=False)
    right, up = axes[1], axes[0]
    tilt = np.radians(20)  # a little from the side, so that sheets are not seen edge-on
    towards = np.cross(right, up)
    right, towards = np.cos(tilt) * right + np.sin(tilt) * towards, np.cos(tilt) * towards - np.sin(tilt) * right
    return np.stack([right, up, towards])


def picture(predictions: Path, structures: Path, chains: list[str], output: Path) -> list[ChainScores]:
    """Write the picture, a column for each chain; returns their scores. Raises UserError for a file that is not there."""
    figure = Figure(figsize=(4.0 * len(chains), 5.0))
    FigureCanvasAgg(figure)
    columns = figure.subplots(1, len(chains), squeeze=False)[0]
    folder, scores = StructureFolder(structures), []
    lowest, highest = 100.0, 0.0
    for axes, key in zip(columns, chains, strict=True):
        result = read_result(predictions / key)
        best = result.structure()
        truth, guess = folder.chain(key), read_chain(best, "A")
        score = compare(best, structures / f"{key.rpartition('_')[0]}.cif", key.rpartition("_")[2])
        plddt = _plddt(best)
        draw(axes, truth, guess, plddt)
        lowest, highest = min(lowest, plddt.min()), max(highest, plddt.max())
        axes.set_title(f"lDDT-CA {score.lddt_ca:.2f}   RMSD {score.rmsd:.1f} Å", fontsize=12, color="#303030", y=-0.04)
        scores.append(score)
    keys = [Patch(color=colour, label=f"predicted, pLDDT {name}") for _, colour, name in _bands(lowest, highest)]
    keys.append(Patch(color=GREY, label="true structure"))
    figure.legend(handles=keys, loc="lower center", ncols=4, frameon=False, fontsize=11)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.15, wspace=0.02)
    output.parent.mkdir(parents=True, exist_ok=True)
    with io.BytesIO() as large:  # twice the size, then halved: smooth edges
        figure.savefig(large, dpi=2 * DPI, facecolor="white")
        image = Image.open(large).convert("RGB")
    image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX).save(output, optimize=True)
    return scores


def _bands(lowest: float, highest: float) -> list[tuple[float, str, str]]:
    """The bands of pLDDT that occur between `lowest` and `highest`."""
    tops = [100.1, *(lower for lower, _, _ in PLDDT_BANDS)]
    return [band for band, top in zip(PLDDT_BANDS, tops, strict=False) if lowest < top and highest >= band[0]]


def _plddt(structure: Path) -> Float[np.ndarray, " R"]:
    """pLDDT of each residue, 0 to 100, from the scores beside the structure."""
    scores = structure.with_name(f"{structure.stem}_scores.json")
    return np.array(json.loads(scores.read_text(encoding="utf-8"))["plddt"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw predicted structures over their true ones.")
    parser.add_argument("--predictions", type=Path, required=True, help="output folder of `evodsp predict`")
    parser.add_argument("--structures", type=Path, required=True, help="folder of the true structures, <pdbid>.cif")
    parser.add_argument("--chains", required=True, help="chains to draw, <pdbid>_<chain>,…")
    parser.add_argument("--output", type=Path, required=True, help="picture to write, .png")
    options = parser.parse_args(arguments)
    try:
        scores = picture(options.predictions, options.structures, options.chains.split(","), options.output)
    except UserError as error:
        print(f"structure_picture: error: {error}", file=sys.stderr)
        return 2
    for score in scores:
        print(f"{score.chain}: lDDT-CA {score.lddt_ca:.2f}, RMSD {score.rmsd:.2f} Å, pLDDT {score.plddt:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

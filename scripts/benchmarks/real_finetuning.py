"""AlphaFold2's fine-tuning recipe, scaled down, on two real chains with a third one held out, one sample over two ranks.

    python -m scripts.benchmarks.real_finetuning --data ../shared/data --output runs/real_finetuning

`--data`: folder with alignments/ and mmcif_files/ of 102m, 1k1a and 2q2k. 1k1a_A has a template: a hit file is written that
aligns 102m_A, an older entry, with its first residues. It is no homologue; it shows that templates are found, read and trained
on. Writes curve.csv and curve.png into the run's folder; `results/real_finetuning.csv` and `docs/assets/real_finetuning.png`
are those of 2026-11-22 (x86_64, two cores shared with others, torch 2.13.0+cpu).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from evodsp.data.mmcif import read_chain
from evodsp.report.curve import read_curve

ROOT = Path(__file__).parents[2]
CHAINS, SEARCHED, TEMPLATE = ("102m_A", "1k1a_A", "2q2k_A"), "1k1a_A", "102m_A"
PANELS = {
    "loss of a training sample": ["train/loss"],
    "terms": ["train/masked_msa", "train/distogram", "train/torsion", "train/violation"],
    "FAPE": ["train/backbone_fape", "train/sidechain_fape"],
    "lDDT-CA": ["train/lddt_ca", "val/lddt_ca"],
}


def prepare(data: Path, folder: Path) -> None:
    """Write links to the chains' alignments, and the hit file, below `folder`."""
    for chain in CHAINS:
        (folder / chain).mkdir(parents=True, exist_ok=True)
        for file in (data / "alignments" / chain).iterdir():
            link = folder / chain / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
    query, hit = (sequence(data, chain) for chain in (SEARCHED, TEMPLATE))
    aligned = hit.ljust(len(query), "-")
    text = f"# STOCKHOLM 1.0\n{TEMPLATE}/1-{len(hit)} {aligned}\n//\n"
    (folder / SEARCHED / "hmm_output.sto").write_text(text)


def sequence(data: Path, chain: str) -> str:
    """The letters of a chain."""
    entry, name = chain.split("_")
    return read_chain(data / "mmcif_files" / f"{entry}.cif", name).sequence


def draw(curve: Path, picture: Path) -> None:
    """Draw the columns of PANELS over the samples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_curve(curve)
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 6), layout="constrained")
    for panel, (title, columns) in zip(panels.flat, PANELS.items(), strict=True):
        for column in columns:
            points = [(2 * (step + 1), float(row[column])) for step, row in rows.items() if row.get(column)]
            panel.plot(*zip(*points, strict=True), label=column, marker="o" if column.startswith("val") else None)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("samples")
        panel.legend(fontsize=8, frameon=False)
    figure.savefig(picture, dpi=90)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments, options = parser.parse_known_args()
    alignments = arguments.output.with_name(f"{arguments.output.name}_alignments")
    prepare(arguments.data, alignments)
    structures = str(arguments.data / "mmcif_files")
    words = [sys.executable, "-m", "evodsp", "fit", "--config", "configs/af2_finetune.yaml"]
    words += ["--config", "scripts/benchmarks/real_finetuning.yaml", "--output", str(arguments.output.resolve())]
    words += ["--data.alignment_dir", str(alignments.resolve()), "--data.structure_dir", structures]
    words += ["--data.template_structure_dir", structures, *options]
    subprocess.run(words, cwd=ROOT, check=True)
    draw(arguments.output / "curve.csv", arguments.output / "curve.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Two small chains in OpenFold's layout, and options for a model that trains a step in milliseconds."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import numpy as np

from evodsp.data.records import Chain
from evodsp.geometry.residues import RESTYPE_ATOM37_MASK, RESTYPE_ORDER
from scripts.examples.synthetic.mmcif_writer import write_mmcif

TINY = """
model:
  channels: {msa: 6, pair: 5, extra_msa: 4, single: 7}
  extra_msa: &stack {blocks: 1, msa_heads: 2, msa_head_width: 2, pair_heads: 1, pair_head_width: 3, triangle_channels: 3,
    outer_product_channels: 2, transition_factor: 1, checkpoint: false}
  evoformer: *stack
  structure_module: {iterations: 1, heads: 2, query_points: 1, value_points: 1, angle_channels: 4, transition_layers: 1}
  heads: {plddt_channels: 4}
  optimizer: {warmup_samples: 2, lr: 1.0e-2}
  ema_decay: 0.9
data:
  validation_chains: [1abc_A]
  batch_size: 1
  samples_per_epoch: 4
  train: {crop_size: 10, msa_clusters: 4, extra_msa: 3, recycles: 1}
  validation: {crop_size: null, msa_clusters: 4, extra_msa: 3, recycles: 0, uniform_recycling: false}
trainer: {max_steps: 6, accelerator: cpu, log_every_n_steps: 1}
"""

BOTH = "  train_chains: [1abc_A, 2abc_B]\n"
"""A setting of `data`: the chain that is scored is trained on, too."""
SEQUENCES = {"1abc_A": "MKTAYIAKQRWLE", "2abc_B": "GSHMDERVTCNPF"}


def write_chains(folder: Path) -> Path:
    """Write both chains and the options of a run on them, tiny.yaml, into a folder. Returns the folder."""
    for key, letters in SEQUENCES.items():
        write_chain(folder, key, letters)
    directories = f"  alignment_dir: {folder}/alignments\n  structure_dir: {folder}/mmcif_files\n{BOTH}"
    (folder / "tiny.yaml").write_text(TINY.replace("data:\n", "data:\n" + directories))
    return folder


def write_chain(folder: Path, key: str, letters: str, released: date | None = None) -> None:
    """Write a chain, whose atoms lie near a straight line, and its alignment of three sequences."""
    pdb_id, chain_id = key.split("_")
    generator = np.random.default_rng(0)
    positions = generator.normal(size=(len(letters), 37, 3)) + np.arange(len(letters))[:, None, None] * [3.8, 0, 0]
    chain = Chain(
        pdb_id=pdb_id,
        chain_id=chain_id,
        sequence=letters,
        residue_number=np.arange(1, len(letters) + 1, dtype=np.int32),
        insertion_code=("",) * len(letters),
        is_missing=np.zeros(len(letters), bool),
        positions=positions.astype(np.float32),
        mask=RESTYPE_ATOM37_MASK[[RESTYPE_ORDER[letter] for letter in letters]].astype(np.float32),
        resolution=2.0,
        release_date=released,
    )
    (folder / "mmcif_files").mkdir(exist_ok=True)
    (folder / "alignments" / key).mkdir(parents=True)
    write_mmcif(folder / "mmcif_files" / f"{pdb_id}.cif", [chain])
    relatives = f">{key}\n{letters}\n>r1\n{letters[:4]}-{letters[5:]}\n>r2\n{letters[:6]}ac{letters[6:-1]}W\n"
    (folder / "alignments" / key / "uniref90_hits.a3m").write_text(relatives)

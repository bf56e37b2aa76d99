"""Sound files for the readers: pieces of the repository's data, and what evodsp writes itself."""

from __future__ import annotations

import io
import json
from datetime import date
from pathlib import Path

import gemmi
import numpy as np
import torch

from evodsp.config import FeatureConfig, ModelConfig
from evodsp.data.build import build
from evodsp.data.config import BuildConfig, IndexConfig
from evodsp.data.index.scan import make_index
from evodsp.inference.results import TIMINGS, write_json, write_results
from evodsp.inference.structure_files import AlignedError, PredictedStructure
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import load_model, save_model
from evodsp.weights.pretrained import save_pretrained

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data"
Files = dict[str, bytes]
"""Contents by name. What lies in a folder called x.npz, x.ckpt, x.pt, x.tar.gz or x.zst is packed into such a file."""

HHR = """Query         q
Match_columns 4

 No Hit                             Prob E-value P-value  Score    SS Cols Query HMM  Template HMM
  1 {0} x   99.9 1 1 1 1 4 1-4 1-5 (9)

No 1
>{0} desc
Probab=99.9 E-value=1 Score=1 Aligned_cols=4  Identities=9%  Similarity=1 Sum_probs=4.0 Template_Neff=1

Q q                 1 MK-TA    4 (4)
Q Consensus         1 mk-ta    4 (4)
                      ||  .
T Consensus         1 mkata    5 (9)
T {0}            1 MKATA    5 (9)
T ss_dssp             CCCCC

Done!
"""
HMM = b"""# STOCKHOLM 1.0
#=GS 1abc_A/1-5 DE [subseq from] mol:protein length:9
1abc_A/1-5         MK.T-aA
2xyz_B/3-6         MKtT--A
#=GC RF            xxx.x
//
"""
_SMALL = {
    "blocks": 1,
    "msa_heads": 1,
    "msa_head_width": 2,
    "pair_heads": 1,
    "pair_head_width": 2,
    "triangle_channels": 2,
}
_SMALL |= {"outer_product_channels": 2, "transition_factor": 1}
SMALLEST = ModelConfig.from_dict(
    {
        "channels": {"msa": 4, "pair": 4, "extra_msa": 4, "single": 4},
        "extra_msa": _SMALL,
        "evoformer": _SMALL,
        "structure_module": {"iterations": 1, "heads": 1, "query_points": 1, "value_points": 1, "angle_channels": 2},
        "heads": {"plddt_channels": 2},
    }
)


def beginning(path: Path, size: int = 3000) -> bytes:
    """The first records of an A3M file, or the first lines of another one."""
    data = path.read_bytes()[:size]
    return data[: data.rindex(b"\n>" if data.startswith(b">") else b"\n") + 1]


def first_entries(name: str) -> Files:
    """The first entries of a cache in the form of OpenFold's."""
    entries = json.loads((DATA / name).read_text())
    return {name: json.dumps(dict(list(entries.items())[:3])).encode()}


def structures() -> list[Files]:
    """A short protein as mmCIF and PDB, with and without its sequence."""
    structure = gemmi.read_structure(str(DATA / "mmcif_files/s001.cif"))
    chain = structure[0][0]
    while len(chain) > 8:
        del chain[-1]
    structure.entities[0].full_sequence = structure.entities[0].full_sequence[:10]
    document = structure.make_mmcif_document()
    pdb = structure.make_pdb_string()
    atoms = "".join(line for line in pdb.splitlines(keepends=True) if not line.startswith("SEQRES"))
    whole = document.as_string()
    block = document.sole_block()
    for category in ("_entity_poly_seq.", "_entity_poly.", "_entity.", "_struct_asym."):
        block.find_mmcif_category(category).erase()
    texts = {"1abc.cif": [whole, document.as_string()], "1abc.pdb": [pdb, atoms]}
    return [{name: text.encode()} for name, forms in texts.items() for text in forms]


def foreign_structures() -> list[Files]:
    """Formats that are not read."""
    document = gemmi.cif.read_string(structures()[0]["1abc.cif"])
    binary = b"\x83\xa7encoder\xa1x\xa7version\xa50.3.0\xaadataBlocks\x90"
    return [{"1abc.cif": document.as_json(mmjson=True).encode()}, {"1abc.cif": binary}]


def preparsed() -> Files:
    """An alignment in the form of OpenFold3's archives."""
    msa, deletions = np.array([list("MKTA"), list("M-TA")]), np.zeros((2, 4), int)
    content = {"msa": msa, "deletion_matrix": deletions, "metadata": ["a", "b"]}
    return {"a.npz/uniref90_hits.npy": _saved(np.array(content, dtype=object))}


def weights() -> Files:
    """Two arrays of DeepMind's parameters."""
    arrays = {"a//weights": np.zeros((2, 3), "f4"), "b//bias": np.zeros(2, "f4")}
    return {f"p.npz/{name}.npy": _saved(array) for name, array in arrays.items()}


def _saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def checkpoint(work: Path) -> Path:
    """A checkpoint of the smallest model."""
    torch.manual_seed(0)
    model = AlphaFold(SMALLEST)
    save_model(work / "c.ckpt", model, dict(model.named_parameters()), FeatureConfig())
    return work / "c.ckpt"


def pretrained(checkpoint: Path) -> Path:
    """The folder of a checkpoint's model, without a sum, which would tell most changes at once."""
    folder = checkpoint.with_name("pretrained")
    save_pretrained(load_model(checkpoint), folder)
    config = folder / "config.json"
    config.write_text(
        json.dumps({name: value for name, value in json.loads(config.read_text()).items() if name != "sha256"})
    )
    return folder


def openfold(work: Path) -> Path:
    """Two arrays of OpenFold's."""
    arrays = {"structure_module.ipa.head_weights": torch.ones(2), "evoformer.linear.weight": torch.ones(2)}
    torch.save(arrays, work / "o.pt")
    return work / "o.pt"


def data_set(work: Path) -> tuple[Path, Path]:
    """An index and a feature store of two chains."""
    chains = work / "chains.txt"
    chains.write_text("s001_A\ns007_A\n")
    alignments, structures = work / "alignments", DATA / "mmcif_files"
    for name in ("s001_A", "s007_A"):
        (alignments / name).mkdir(parents=True)
        (alignments / name / "a.a3m").write_bytes(beginning(DATA / "alignments" / name / "bfd_uniclust_hits.a3m"))
    make_index(IndexConfig(alignments, structures, work / "index", workers=0))
    build(BuildConfig(alignments, structures, work / "store", chains, workers=1))
    return work / "index", work / "store"


def prediction(work: Path) -> Path:
    """The results of two seeds, as `evodsp predict` writes them."""
    folder = work / "predictions"
    (folder / "x").mkdir(parents=True)
    number = np.arange(6, dtype=np.float32)
    positions = np.zeros((6, 37, 3), np.float32)
    positions[:, 1, 0] = 3.8 * number
    mask = np.zeros((6, 37), np.float32)
    mask[:, 1] = 1
    error = AlignedError(np.ones((6, 6), np.float32), 31.75, 0.8)
    contacts = np.full((6, 6), 0.5, np.float32)
    one = PredictedStructure("x", np.zeros(6, int), positions, mask, 90 - number, (), error, contacts)
    write_results(folder / "x", {0: one, 1: one}, "cif", {"date": str(date(2026, 1, 1))}, "x")
    write_json(folder / "x" / TIMINGS, {"name": "x", "model_seconds": 3.25})
    return folder


def run() -> Files:
    """The folder of a run of training."""
    curve = b"step,epoch,seconds,train/loss,validation/lddt_ca\n1,0,1.5,3.25,\n2,0,2.5,3.0,0.5\n"
    config = b"seed: 3\nmodel:\n  channels: {msa: 12, pair: 10}\ntrainer: {max_steps: 5, accelerator: cpu}\n"
    copy = b'{"chain": "s005_A", "nearest": "s002_A", "identity": 0.6, "coverage": 1.0, "lddt_ca": 0.9}'
    bar = b'{"lddt_ca": 0.9, "identity": 0.6, "validation_chains": 1, "training_chains": 2, "copies": [' + copy
    return {"run/curve.csv": curve, "run/config.yaml": config, "run/baseline.json": bar + b'], "without": {}}\n'}


def answers() -> Files:
    """What an MSA server answers."""
    ticket = b'{"id": "abc-1", "status": "COMPLETE"}'
    a3m = b">101\nMKT\n>h\nMKT\n\0>102\nMK\n"
    hits = b"101\t1abc_A\t0.9\t3\t0\t0\t1\t3\t1\t3\t1e-5\t99\n"
    result = {"uniref.a3m": a3m, "bfd.a3m": a3m, "pdb70.m8": hits, "pair.a3m": a3m}
    templates = {f"template.tar.gz/{name}": b"data_1ABC\n" for name in ("1abc.cif", "2xyz.cif")}
    return {"ticket.json": ticket, **{f"result.tar.gz/{name}": file for name, file in result.items()}, **templates}

"""DeepMind's side of the comparison of MSAs and templates of complexes, on the arrays of one .npz file, its outputs to another.

    .venv-parity/bin/python scripts/parity/alphafold_pairing_side.py SUBJECT.npz RESULT.npz

The package is that of `alphafold_side.py`; only its data pipeline is imported, without JAX. It is used as it is but for this:

- rows with the same similarity to the query, and pairs with the same product of row numbers, stay in order: both sorts are
  made stable. As released, their order is up to NumPy's sort, which changes with the processor. All cases are run as released
  too, and those that differ then are named among the results (`released`).
- the number of rows of a chain is that of the case (2048 as released);
- of equal rows of a chain's files the first is taken, as in DeepMind's release. The package's code for this is a comment;
- the pipeline of files runs no program, since all of them are there, and finds no templates.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from peer_calls import SKIPPED, serve  # type: ignore[import-not-found]

if importlib.util.find_spec("alphafold") is None:
    sys.exit(SKIPPED)

import pandas as pd  # type: ignore[import-untyped]
from alphafold.common import residue_constants  # type: ignore[import-not-found]
from alphafold.data import (  # type: ignore[import-not-found]
    feature_processing,
    msa_identifiers,
    msa_pairing,
    parsers,
    pipeline,
    pipeline_multimer,
)

TO_HHBLITS = np.argsort(residue_constants.MAP_HHBLITS_AATYPE_TO_OUR_AATYPE)
MERGED = (
    "msa",
    "deletion_matrix",
    "bert_mask",
    "msa_mask",
    "cluster_bias_mask",
    "asym_id",
    "entity_id",
    "sym_id",
    "residue_index",
    "template_aatype",
    "template_all_atom_positions",
    "template_all_atom_mask",
)


class StableNumPy:
    """NumPy, whose `argsort` is stable."""

    argsort = staticmethod(partial(np.argsort, kind="stable"))

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def make_sorts_stable() -> None:
    """Let ties stay in order."""
    msa_pairing.np = StableNumPy()
    pd.DataFrame.sort_values = partialmethod(pd.DataFrame.sort_values, kind="stable")


def features_of(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """The features of each chain before pairing, under its name. Only a complex of different chains has `_all_seq`."""
    sequences = [chain["sequence"] for chain in case["chains"]]
    features = {}
    for place, chain in enumerate(case["chains"]):
        first = sequences.index(chain["sequence"])
        part = {
            name: arrays[f"{case['name']}|{first}|{name}"] for name in ("msa", "deletions", "all_msa", "all_deletions")
        }
        length = len(chain["sequence"])
        features[chain["name"]] = {
            "place": np.asarray(place),
            "sequence": np.asarray(chain["sequence"], dtype=object),
            "aatype": part["msa"][0].astype(np.int32),
            "residue_index": np.arange(length, dtype=np.int32),
            "seq_length": np.asarray(length, np.int32),
            "num_alignments": np.asarray(len(part["msa"]), np.int32),
            "msa": TO_HHBLITS[part["msa"]].astype(np.int32),
            "deletion_matrix_int": part["deletions"],
            **templates_of(arrays, f"{case['name']}|{first}|template_", chain["name"]),
        }
        if len(set(sequences)) > 1:
            features[chain["name"]] |= {
                "msa_all_seq": TO_HHBLITS[part["all_msa"]].astype(np.int32),
                "deletion_matrix_int_all_seq": part["all_deletions"],
                "msa_species_identifiers_all_seq": species_of(case["chains"][first]["descriptions"]),
            }
    return features


def templates_of(arrays: dict[str, np.ndarray], prefix: str, chain: str) -> dict[str, np.ndarray]:
    """The templates of a chain, as DeepMind's search for templates makes them and its pipeline of complexes converts them.

    A search that finds none makes one template of zeros.
    """
    letters, atoms = TO_HHBLITS[arrays[f"{prefix}aatype"]], arrays[f"{prefix}mask"]
    raw = {
        "template_aatype": np.eye(22, dtype=np.float32)[letters],
        "template_all_atom_positions": arrays[f"{prefix}positions"],
        "template_all_atom_masks": atoms,
    }
    if not len(letters):
        raw = {name: np.zeros((1, *values.shape[1:]), np.float32) for name, values in raw.items()}
    found = pipeline_multimer.convert_monomer_features(raw, chain)
    del found["auth_chain_id"]
    return found


def species_of(descriptions: list[str]) -> np.ndarray:
    return np.array([msa_identifiers.get_identifiers(name).species_id.encode() for name in descriptions], dtype=object)


def results_of(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """What is compared of one case."""
    feature_processing.MSA_CROP_SIZE = case["most_rows"]
    chains = pipeline_multimer.add_assembly_features(features_of(case, arrays))
    results: dict[str, Any] = {"order": np.array([int(chain["place"]) for chain in chains.values()])}
    results["species"] = "\n".join(
        ",".join(species.decode() for species in species_of(chain["descriptions"])) for chain in case["chains"]
    )
    if "msa_all_seq" in next(iter(chains.values())):
        pairs = msa_pairing.pair_sequences(list(copy.deepcopy(chains).values()))
        results["pairs"] = msa_pairing.reorder_paired_rows(pairs)
    merged = feature_processing.pair_and_merge(chains)
    return results | {name: merged[name] for name in MERGED}


def first_of_equal_rows(msas: Any) -> dict[str, Any]:
    """The features of alignments of one chain, without rows that equal an earlier one."""
    seen: set[str] = set()
    kept = []
    for msa in msas:
        rows = [k for k, row in enumerate(msa.sequences) if not (row in seen or seen.add(row))]  # type: ignore[func-returns-value]
        kept.append(
            parsers.Msa(*([of[k] for k in rows] for of in (msa.sequences, msa.deletion_matrix, msa.descriptions)))
        )
    return dict(MAKE_MSA_FEATURES(kept))


MAKE_MSA_FEATURES = pipeline.make_msa_features


def results_of_files(folder: Path) -> dict[str, Any]:
    """What DeepMind's pipelines make of the files of a complex, and of those of its chain A."""
    length = len((folder / "x.fasta").read_text().split()[1])
    none = {
        "template_aatype": np.zeros((1, length, 22), np.float32),
        "template_all_atom_positions": np.zeros((1, length, 37, 3), np.float32),
        "template_all_atom_masks": np.zeros((1, length, 37), np.float32),
        "template_domain_names": np.array([b""], object),
        "template_sequence": np.array([b""], object),
        "template_sum_probs": np.zeros((1, 1), np.float32),
    }
    searcher = SimpleNamespace(
        input_format="sto", output_format="sto", query=lambda _: "", get_template_hits=lambda **_: []
    )
    featurizer = SimpleNamespace(get_templates=lambda **_: SimpleNamespace(features=dict(none)))
    feature_processing.MSA_CROP_SIZE = 2048
    with (
        mock.patch.object(pipeline.jackhmmer, "Jackhmmer"),
        mock.patch.object(pipeline.hhblits, "HHBlits"),
        mock.patch.object(pipeline, "make_msa_features", first_of_equal_rows),
    ):
        of_chain = pipeline.DataPipeline(
            "", "", "", "", "", "", "", searcher, featurizer, use_small_bfd=False, use_precomputed_msas=True
        )
        of_complex = pipeline_multimer.DataPipeline(of_chain, "", "", use_precomputed_msas=True)
        (folder / "A.fasta").write_text("\n".join((folder / "x.fasta").read_text().split()[:2]))
        merged = of_complex.process(str(folder / "x.fasta"), str(folder / "x"))
        alone = of_chain.process(str(folder / "A.fasta"), str(folder / "x" / "A"))
    results = {name: merged[name] for name in MERGED if not name.startswith("template")}
    results["chain msa"] = np.array(residue_constants.MAP_HHBLITS_AATYPE_TO_OUR_AATYPE)[alone["msa"]]
    return results | {"chain deletions": alone["deletion_matrix_int"]}


def run(arrays: dict[str, Any]) -> dict[str, Any]:
    """What the package makes of all cases and of the files, and `released`: cases that differ as released."""
    folder, cases = Path(str(arrays.pop("folder"))), json.loads(str(arrays.pop("cases")))
    released = [results_of(case, arrays) for case in cases]
    make_sorts_stable()
    stable = [results_of(case, arrays) for case in cases]
    both = list(zip(cases, released, stable, strict=True))
    differ = [case["name"] for case, a, b in both if not all(np.array_equal(a[name], b[name]) for name in a)]
    found = {f"{name}|{case['name']}": value for case, _, of in both for name, value in of.items()}
    found |= {f"{name}|files": value for name, value in results_of_files(folder).items()}
    return found | {"released": json.dumps(differ)}


if __name__ == "__main__":
    serve(__file__, "alphafold", run)

"""DeepMind's side of the comparison of MSAs and templates of complexes, on the arrays of one .npz file, its outputs to another.

    .venv-parity/bin/python scripts/parity/alphafold_pairing_side.py SUBJECT.npz RESULT.npz

The package is that of `alphafold_side.py`; only its data pipeline is imported, without JAX. It is used as it is but for this:

- rows with the same similarity to the query, and pairs with the same product of row numbers, stay in order: both sorts are
  made stable. As released, their order is up to NumPy's sort, which changes with the processor. All cases are run as released
  too, and those that differ then are named among the results (`released`).
- the number of rows of a chain is that of the case (2048 as released).
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np

SKIPPED = 3
"""Exit code where the package is not installed."""
if importlib.util.find_spec("alphafold") is None:
    sys.exit(SKIPPED)

import pandas as pd  # type: ignore[import-untyped]  # noqa: E402
from alphafold.common import residue_constants  # type: ignore[import-not-found]  # noqa: E402
from alphafold.data import (  # type: ignore[import-not-found]  # noqa: E402
    feature_processing,
    msa_identifiers,
    msa_pairing,
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


def main(arguments: list[str]) -> int:
    subject, result = map(Path, arguments)
    with np.load(subject) as file:
        arrays = {key: file[key] for key in file.files}
    cases = json.loads(str(arrays.pop("cases")))
    released = [results_of(case, arrays) for case in cases]
    make_sorts_stable()
    stable = [results_of(case, arrays) for case in cases]
    found = {
        f"{name}|{case['name']}": value for case, of in zip(cases, stable, strict=True) for name, value in of.items()
    }
    both = zip(cases, released, stable, strict=True)
    differ = [case["name"] for case, a, b in both if not all(np.array_equal(a[name], b[name]) for name in a)]
    outputs = {name: np.asarray(value) for name, value in found.items()}
    np.savez(result, released=np.array(json.dumps(differ)), **outputs)  # type: ignore[arg-type]  # no array is named 'allow_pickle'
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

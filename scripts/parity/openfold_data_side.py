"""OpenFold's side of the comparison of data: its parsers and its feature pipeline on the files that one .npz file names.

    OPENFOLD_SOURCE=<clone> <python with its requirements> scripts/parity/openfold_data_side.py SUBJECT.npz RESULT.npz

Verified with OpenFold's repository (git ce0029e, 2025), which is used as it is, except that

- Biopython no longer has `SCOPData`, the table of one-letter codes of modified residues. evodsp's copy of it,
  `evodsp/geometry/tables/monomer_letters.csv`, takes its place, which has the names of later dictionaries too. Likewise
  NumPy no longer has `np.object`, another name of `object`;
- NH1 and NH2 of an arginine exchange names where NH2 is nearer to CD (supplement 1.2.1), which OpenFold leaves out;
- a resolution is that of the refined model. OpenFold takes the last one that the file has, which may be that of the data;
- the random numbers of sampling and masking are those of the subject: the order of the rows, the uniform numbers that choose
  letters to replace, and those that choose new letters from the probabilities that OpenFold computed;
- rows are compared by residue codes when duplicates are removed. OpenFold compares letters, and keeps two rows that differ in
  B and D alone, which have the same code;
- gaps of Stockholm files may be dots, which the format allows. OpenFold knows dashes only;
- of UniRef90's and MGnify's rows those are taken that DeepMind's pipeline takes. OpenFold has other limits, in its search;
- a template hit whose entry has no structure file is left out before, where OpenFold ends with an error;
- samples have no templates: template features are compared by themselves.

Results are named `quantity|file`. Strings are arrays of one string.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

SKIPPED = 3
"""Exit code if OpenFold is not installed."""
RESOLUTION_OF_DATA = "_reflns.d_resolution_high"
SOURCE = "OPENFOLD_SOURCE"
"""Environment variable: folder of a clone of OpenFold."""
SAME_CODE = str.maketrans("BZJOU", "DEXXC")
"""Letters without a code of their own, and one that has the same code."""
PRESET = "model_1"
MOST_TEMPLATES = 20

Results = dict[str, np.ndarray]


def supply_removed_names() -> None:
    """Let `from Bio.Data import SCOPData` and `np.object` succeed."""
    import Bio.Data

    path = Path(__file__).parents[2] / "evodsp" / "geometry" / "tables" / "monomer_letters.csv"
    rows = csv.DictReader(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    table = types.ModuleType("Bio.Data.SCOPData")
    letters = {name: row["letter"] for row in rows for name in row["names"].split()}
    table.protein_letters_3to1 = letters  # type: ignore[attr-defined]
    sys.modules["Bio.Data.SCOPData"] = table
    for module, name, value in ((Bio.Data, "SCOPData", table), (np, "object", object)):
        setattr(module, name, value)


def structures(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(author chain, what is read of it) of each protein chain of an mmCIF file."""
    from openfold.data import data_pipeline, mmcif_parsing  # type: ignore[import-not-found]

    with mock.patch.object(mmcif_parsing, "_get_header", header_of_model(mmcif_parsing._get_header)):
        parsed = mmcif_parsing.parse(file_id=path.stem, mmcif_string=path.read_text(), catch_all_errors=False)
    entry = parsed.mmcif_object
    for chain, sequence in sorted(entry.chain_to_seqres.items()):
        features = data_pipeline.make_mmcif_features(entry, chain)
        name_arginine_nitrogens(features["all_atom_positions"], features["all_atom_mask"], sequence)
        yield chain, {"features": features, "sequence": sequence, "header": entry.header}


def header_of_model(header: Any) -> Any:
    """`header`, OpenFold's function, without the resolution of the data where there is one of the model."""

    def changed(entry: dict[str, Any]) -> Any:
        hides = any(tag in entry for tag in ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution"))
        return header({tag: value for tag, value in entry.items() if not (hides and tag == RESOLUTION_OF_DATA)})

    return changed


def name_arginine_nitrogens(positions: np.ndarray, mask: np.ndarray, sequence: str) -> None:
    """Exchange NH1 and NH2 where NH2 is nearer to CD, in place. positions [L, 37, 3], mask [L, 37]."""
    from openfold.np import residue_constants as constants  # type: ignore[import-not-found]

    cd, nh1, nh2 = (constants.atom_order[name] for name in ("CD", "NH1", "NH2"))
    for atoms, there, letter in zip(positions, mask, sequence, strict=True):
        if letter == "R" and there[[cd, nh1, nh2]].all():
            away = np.linalg.norm(atoms[[nh1, nh2]] - atoms[cd], axis=-1)
            if away[1] < away[0]:
                atoms[[nh1, nh2]] = atoms[[nh2, nh1]]


def structure_results(path: Path) -> Iterator[tuple[str, Any]]:
    for chain, found in structures(path):
        file, features = f"{path.name} {chain}", found["features"]
        yield f"structure sequence|{file}", found["sequence"]
        yield f"structure positions|{file}", features["all_atom_positions"]
        yield f"structure mask|{file}", features["all_atom_mask"]
        yield f"structure resolution|{file}", features["resolution"][0]
        yield f"structure release date|{file}", found["header"]["release_date"]


def parsed_alignment(path: Path) -> Any:
    """An alignment as OpenFold's `Msa`."""
    from openfold.data import parsers

    if path.suffix == ".a3m":
        found = parsers.parse_a3m(path.read_text())
    else:
        found = parsers.parse_stockholm(with_dashes(path.read_text()))
    return dataclasses.replace(found, sequences=[row.translate(SAME_CODE) for row in found.sequences])


def with_dashes(stockholm: str) -> str:
    """The alignment with `-` for every gap; names keep their dots."""
    lines = stockholm.splitlines()
    rows = {number: line.rpartition(" ") for number, line in enumerate(lines) if line and line[0] not in "#/"}
    for number, (name, space, letters) in rows.items():
        lines[number] = f"{name}{space}{letters.replace('.', '-')}"
    return "\n".join(lines)


def codes(rows: list[str]) -> np.ndarray:
    """Rows as AlphaFold2's residue codes, by way of HHblits' numbering, as OpenFold makes them."""
    from openfold.np import residue_constants as constants

    order = np.array(constants.MAP_HHBLITS_AATYPE_TO_OUR_AATYPE)
    return order[np.array([[constants.HHBLITS_AA_TO_ID[letter] for letter in row] for row in rows])]


def alignment_results(key: str, path: Path) -> Iterator[tuple[str, Any]]:
    msa = parsed_alignment(path)
    yield f"alignment rows|{key}/{path.name}", codes(msa.sequences)
    yield f"alignment deletions|{key}/{path.name}", np.array(msa.deletion_matrix)


def hit_results(key: str, path: Path) -> Iterator[tuple[str, Any]]:
    from openfold.data import parsers

    for hit in parsers.parse_hhr(path.read_text()):
        file = f"{key}/{path.name} {hit.index}"
        yield f"hit name|{file}", hit.name
        yield f"hit rows|{file}", f"{hit.query}\n{hit.hit_sequence}"
        yield f"hit columns|{file}", np.array(hit.aligned_cols)
        yield f"hit sum of probabilities|{file}", np.array(hit.sum_probs)
        yield f"hit query indices|{file}", np.array(hit.indices_query)
        yield f"hit indices|{file}", np.array(hit.indices_hit)


def template_results(key: str, query: str, searches: list[Path], folder: Path) -> Iterator[tuple[str, Any]]:
    """The templates of a query, best first: names, and the features that OpenFold's model takes."""
    from openfold.data import data_transforms, parsers, templates

    hits = [hit for path in searches for hit in parsers.parse_hhr(path.read_text())]
    hits = [hit for hit in hits if (folder / f"{templates._get_pdb_id_and_chain(hit)[0]}.cif").is_file()]
    # The date allows every template; kalign is for hits whose sequence is not in their structure.
    featurizer = templates.HhsearchHitFeaturizer(
        str(folder), "9999-12-31", MOST_TEMPLATES, "kalign", _zero_center_positions=False
    )
    found = featurizer.get_templates(query, hits).features
    # Where there is none, it has a name without a template.
    for number, name in enumerate(found["template_domain_names"][: len(found["template_all_atom_positions"])]):
        positions, mask = (found[f"template_all_atom_{what}"][number] for what in ("positions", "mask"))
        letters = found["template_sequence"][number].decode()
        name_arginine_nitrogens(positions, mask, letters)
        aatype = torch.from_numpy(codes([letters])[0])
        beta, beta_mask = data_transforms.pseudo_beta_fn(aatype, torch.from_numpy(positions), torch.from_numpy(mask))
        yield f"template name|{key} {number}", name.decode()
        yield f"template aatype|{key} {number}", found["template_aatype"][number] @ codes_by_column()
        yield f"template all_atom_positions|{key} {number}", positions
        yield f"template all_atom_masks|{key} {number}", mask
        yield f"template pseudo_beta|{key} {number}", beta.numpy()
        yield f"template pseudo_beta_mask|{key} {number}", beta_mask.numpy()
        yield f"template mask|{key} {number}", 1.0
        yield f"template sum_probs|{key} {number}", found["template_sum_probs"][number]


def codes_by_column() -> np.ndarray:
    """AlphaFold2's residue code of each column of HHblits' one-hot letters."""
    from openfold.np import residue_constants as constants

    return np.array(constants.MAP_HHBLITS_AATYPE_TO_OUR_AATYPE)


def configuration(clusters: int, extra: int) -> Any:
    """OpenFold's configuration of data, one recycling iteration, of whole chains with labels."""
    from openfold.config import model_config  # type: ignore[import-not-found]

    config = model_config(PRESET).data
    config.common.use_templates = False
    config.common.max_recycling_iters = 0
    config.eval.max_msa_clusters, config.eval.max_extra_msa = clusters, extra
    return config


@contextlib.contextmanager
def fixed_draws(transforms: Any, order: np.ndarray, replace: np.ndarray, letter: np.ndarray) -> Iterator[None]:
    """A context in which OpenFold's `transforms` draw these numbers (see `evodsp.features.batch.Drawn`)."""

    def randperm(number: int, **_: Any) -> torch.Tensor:
        # The first call orders all rows but the query, the second one the rows that no cluster took: they have an order.
        return torch.from_numpy(order[1:] - 1) if number == len(order) - 1 else torch.arange(number)

    def rand(shape: Any, **_: Any) -> torch.Tensor:
        # The other calls replace letters with probability 0.
        return torch.from_numpy(replace) if tuple(shape) == replace.shape else torch.ones(shape)

    def categorical(probabilities: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
        boundaries = probabilities.double().cumsum(-1)[..., :-1]
        return (torch.from_numpy(letter)[..., None] >= boundaries).sum(-1)

    numbers = mock.patch.multiple(torch, randperm=randperm, rand=rand)
    with numbers, mock.patch.object(transforms, "shaped_categorical", categorical):
        yield


def sample_results(
    key: str, structure: Path, alignments: list[Path], request: dict[str, Any], draws: Results
) -> Iterator[tuple[str, Any]]:
    """Features and labels of a whole chain, those that the request names."""
    from openfold.data import data_pipeline, data_transforms, feature_pipeline

    chain = dict(structures(structure))[key.rsplit("_", 1)[1]]["features"]
    msas = [parsed_alignment(path).truncate(request["rows"][str(path)]) for path in alignments]
    raw = {**chain, **data_pipeline.make_msa_features(msas)}
    config = configuration(**request["sizes"])
    with fixed_draws(data_transforms, **draws):
        features = feature_pipeline.np_example_to_features(raw, config, "eval")
    for name in request["compared"]:
        yield f"sample {name}|{key}", features[name][..., 0].numpy()


def run(subject: Results) -> Results:
    """All results of the files that the subject names."""
    request = json.loads(str(subject["request"]))
    results: dict[str, Any] = {}
    for path in request["structures"]:
        results.update(structure_results(Path(path)))
    for key, paths in request["alignments"].items():
        for path in paths:
            results.update(alignment_results(key, Path(path)))
    for key, paths in request["searches"].items():
        for path in paths:
            results.update(hit_results(key, Path(path)))
    for key, query in request["templates"]["queries"].items():
        searches = [Path(path) for path in request["searches"][key]]
        results.update(template_results(key, query, searches, Path(request["templates"]["folder"])))
    for key, structure in request["samples"].items():
        draws = {name: subject[f"{name}|{key}"] for name in ("order", "replace", "letter")}
        alignments = [Path(path) for path in request["alignments"][key]]
        results.update(sample_results(key, Path(structure), alignments, request, draws))
    return {name: np.asarray(value) for name, value in results.items()}


def main() -> int:
    if source := os.environ.get(SOURCE):
        sys.path.insert(0, source)
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # it expects a version of 2022
    try:
        import openfold  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if source or error.name != "openfold":
            print(f"OpenFold cannot be imported from {source or 'this environment'}: {error}", file=sys.stderr)
            return 1
        return SKIPPED
    supply_removed_names()
    from peer_calls import serve  # type: ignore[import-not-found]

    serve(__file__, "openfold", run)
    return 0


if __name__ == "__main__":
    sys.exit(main())

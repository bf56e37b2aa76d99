"""Compare evodsp live with DeepMind's JAX code and with OpenFold: `make parity`.

    .venv/bin/python -m scripts.parity.compare --alphafold .venv-parity/bin/python [--model model_1_ptm] [--seed 0]
    OPENFOLD_SOURCE=<clone> .venv/bin/python -m scripts.parity.compare --openfold <python with OpenFold's requirements>

All sides get the same dense random parameters, features and structure (subject.py), through a temporary folder: DeepMind's code
and OpenFold each run in a Python environment of their own. After two recycling passes the outputs, every term of the loss, and
the gradient of the total loss by every parameter are compared. The exit code is 1 if a difference is larger than allowed, and 2
if a side could not run. OpenFold is skipped if it is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.geometry.frames import pseudo_beta
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.deepmind import export_deepmind, read_npz, set_parameters, with_blocks_of, write_npz
from evodsp.weights.names import is_fused
from evodsp.weights.openfold import export_openfold, write_openfold
from evodsp.weights.openfold import set_parameters as set_openfold_parameters

from . import evodsp_side, table
from .subject import Sizes, Subject, shallow

HERE = Path(__file__).resolve().parent
SKIPPED = 3
"""Exit code of a side if its package is not installed."""
RECYCLED_EDGES = np.linspace(3.25, 20.75, 15)
"""Å; edges of the bins that distances of the recycled structure are sorted into."""
TOO_NEAR = 1e-4
"""Å; rounding decides the bin of a recycled distance that is nearer than this to an edge."""
KINDS = "", "_ptm", "_multimer", "_multimer_v2", "_multimer_v3"
MODELS = [f"model_{number}{kind}" for kind in KINDS for number in range(1, 6)]
SETTINGS = ("model", "fused", "evoformer", "extra_msa", "template", "structure")
"""Options that the other sides need."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare evodsp live with AlphaFold2's JAX code and with OpenFold.")
    parser.add_argument(
        "--alphafold", type=Path, help="python with alphafold-colabfold; none: compare with OpenFold only"
    )
    parser.add_argument(
        "--openfold",
        type=Path,
        help="python with OpenFold, or with its requirements and OPENFOLD_SOURCE set to a clone; none: this python",
    )
    parser.add_argument("--model", default="model_1_ptm", choices=MODELS, help="preset; its stacks are shortened")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters, features and structure")
    parser.add_argument(
        "--fused", action="store_true", help="use the newer layout of triangle multiplication's parameters"
    )
    parser.add_argument(
        "--parameters",
        type=Path,
        help="an .npz of DeepMind's or of `weights export`: its parameters and depths",
    )
    parser.add_argument("--evoformer", type=int, default=2, help="Evoformer blocks (published: 48)")
    parser.add_argument("--extra-msa", type=int, default=1, help="extra-MSA blocks (published: 4)")
    parser.add_argument("--template", type=int, default=2, help="template pair blocks (published: 2)")
    parser.add_argument("--structure", type=int, default=4, help="structure module iterations (published: 8)")
    parser.add_argument("--residues", type=int, default=Sizes.residues, help="real residues; six more are padding")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return run(options)
    except UserError as error:
        print(f"parity: error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    if options.residues < 2 * Sizes.padded_residues:
        raise UserError(f"--residues {options.residues}: too few to compare; give {2 * Sizes.padded_residues} or more")
    config = shallow(
        ModelConfig.preset(options.model), options.evoformer, options.extra_msa, options.template, options.structure
    )
    sizes = Sizes(residues=options.residues)
    if options.parameters is not None:
        arrays = read_npz(options.parameters)
        config, options.fused = with_blocks_of(config, arrays), is_fused(arrays)
        depths = (getattr(config, stack).blocks for stack in ("evoformer", "extra_msa", "templates"))
        options.evoformer, options.extra_msa, options.template = depths
    subject = Subject.draw(config, sizes, options.seed, options.fused)
    if options.parameters is not None:
        subject = dataclasses.replace(subject, parameters=arrays)
    settings = {name: getattr(options, name) for name in SETTINGS}
    settings["weights_only"] = config.arrangement == "multimer"  # of OpenFold; it samples the MSA inside of this model
    print(heading(options, config, sizes, subject), flush=True)  # the rest takes a while
    with tempfile.TemporaryDirectory(prefix="evodsp-parity-") as folder:
        file = Path(folder) / "subject.npz"
        np.savez(file, allow_pickle=False, settings=np.array(json.dumps(settings)), **subject.flat())
        results: list[bool | None] = []
        if options.alphafold is not None:
            results.append(against_alphafold(options.alphafold, config, subject, file))
        results.append(against_openfold(options.openfold or Path(sys.executable), config, subject, file))
    compared = [passed for passed in results if passed is not None]
    if not compared:
        raise UserError("nothing was compared; give --alphafold, or --openfold a python that has OpenFold")
    return 0 if all(compared) else 1


def heading(options: argparse.Namespace, config: ModelConfig, sizes: Sizes, subject: Subject) -> str:
    enabled = config.templates.enabled
    parameters = sum(array.size for array in subject.parameters.values())
    return (
        f"{options.model}, seed {options.seed}: {options.evoformer} Evoformer, {options.extra_msa} extra-MSA, "
        f"{options.template if enabled else 0} template blocks, {options.structure} structure iterations, full widths\n"
        f"{parameters:,} {options.parameters or 'random'} parameters, "
        f"triangle multiplication's {'fused' if options.fused else 'separate'}\n"
        f"{sizes.residues} + {sizes.padded_residues} padded residues, {sizes.clusters} MSA and {sizes.extra} extra rows, "
        f"{sizes.templates if enabled else 0} templates, {sizes.cycles} passes"
    )


def against_alphafold(python: Path, config: ModelConfig, subject: Subject, file: Path) -> bool:
    start = time.perf_counter()
    chains = config.arrangement == "multimer"
    theirs = other_side(python, "alphafold_chains_side" if chains else "alphafold_side", file)
    if theirs is None:
        raise UserError(f"{python}: has no package alphafold; run `make parity`, which installs it in .venv-parity")
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    if chains:
        ours = evodsp_side.run_chains(config, subject.parameters, subject.features, theirs)
    else:
        ours = evodsp_side.run(config, subject.parameters, subject.features, subject.structure, theirs)
    print(
        f"\nDeepMind's JAX code ({seconds:.0f} s, compilation included) against evodsp ({time.perf_counter() - start:.0f} s)"
    )
    return report(ours, theirs, subject)


def against_openfold(python: Path, config: ModelConfig, subject: Subject, file: Path) -> bool | None:
    """Whether all differences are within what is allowed; None if OpenFold is not installed. Of multimers, only the checkpoint
    is compared."""
    model = AlphaFold(config)
    set_parameters(model, subject.parameters)
    if chains := config.arrangement == "multimer":
        fused = is_fused(subject.parameters)  # OpenFold's multimers have one layout each
        write_openfold(file.with_name("openfold.pt"), export_openfold(model, fused=fused))
        write_npz(file.with_name("deepmind.npz"), export_deepmind(model, fused))
    else:
        for name, legacy in (("openfold.pt", False), ("openfold_legacy.pt", True)):
            write_openfold(file.with_name(name), export_openfold(model, legacy))
        write_npz(file.with_name("deepmind.npz"), export_deepmind(model))
    start = time.perf_counter()
    theirs = other_side(python, "openfold_side", file)
    if theirs is None:
        print(
            "\nOpenFold: skipped, it is not installed or lacks this model (`make parity OPENFOLD=<clone>` compares with a "
            "clone of it)"
        )
        return None
    seconds = time.perf_counter() - start
    imported = table.Row(
        "checkpoint", float(theirs.pop("import_difference")), 0.0, "OpenFold's own import against ours"
    )
    if chains:
        print(f"\nOpenFold's import ({seconds:.0f} s) against evodsp's export\n{table.text([imported])}")
        return imported.passed
    start = time.perf_counter()
    ours = evodsp_side.run(config, subject.parameters, subject.features, subject.structure, theirs)
    print(f"\nOpenFold ({seconds:.0f} s) against evodsp ({time.perf_counter() - start:.0f} s)")
    return report(ours, in_deepmind_layout(config, subject, theirs), subject, [imported])


def in_deepmind_layout(config: ModelConfig, subject: Subject, theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """OpenFold's results, with each gradient converted to DeepMind's array as its parameter would be."""
    gradients = {
        key.removeprefix(table.GRADIENT): torch.from_numpy(value)
        for key, value in theirs.items()
        if key.startswith(table.GRADIENT)
    }
    holder = AlphaFold(config)
    set_openfold_parameters(holder, gradients, "OpenFold's gradients")
    converted = export_deepmind(holder, is_fused(subject.parameters))
    others = {key: value for key, value in theirs.items() if not key.startswith(table.GRADIENT)}
    return others | {f"{table.GRADIENT}{key}": value for key, value in converted.items()}


def other_side(python: Path, script: str, subject: Path) -> dict[str, np.ndarray] | None:
    """The results of another side, or None if its package is not installed. Raises UserError if it failed."""
    result = subject.with_name(f"{script}.npz")
    # Not resolved: a virtual environment's python is a link, and finds its packages by the link's place.
    command = [str(python.absolute()), str(HERE / f"{script}.py"), str(subject), str(result)]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise UserError(f"{python}: cannot be run ({error.strerror}); give the python of that environment") from error
    if done.returncode == SKIPPED:
        return None
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise UserError(f"{script} ended with code {done.returncode}; its messages are above")
    with np.load(result) as file:
        return {key: file[key] for key in file.files}


def deepminds_side(python: Path, script: str, subject: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of DeepMind's code for these arrays. Raises UserError if its package is not installed, or its side failed."""
    with tempfile.TemporaryDirectory(prefix="evodsp-parity-") as folder:
        file = Path(folder) / "subject.npz"
        np.savez(file, allow_pickle=False, **subject)
        found = other_side(python, script, file)
    if found is None:
        raise UserError(f"{python}: has no package alphafold; `make parity` installs it in .venv-parity")
    return found


def program(
    run: Callable[[argparse.Namespace], bool], description: str, seed: str, arguments: Sequence[str] | None
) -> int:
    """The exit code of a comparison with DeepMind's code: 0 if `run` says that all is well, 1 if not, 2 if a side failed.

    `seed`: what the option of this name is the seed of.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--alphafold", type=Path, required=True, help="python with alphafold-colabfold")
    parser.add_argument("--seed", type=int, default=0, help=f"seed of {seed}")
    try:
        return 0 if run(parser.parse_args(arguments)) else 1
    except UserError as error:
        print(f"parity: error: {error}", file=sys.stderr)
        return 2


def report(ours: table.Arrays, theirs: table.Arrays, subject: Subject, first: Sequence[table.Row] = ()) -> bool:
    """Print the table, beginning with the rows `first`. Returns whether all differences are within what is allowed."""
    features = subject.features
    rows = [*first, *table.compare(ours, theirs, features)]
    print(table.text(rows))
    if "recycled/positions" in theirs:
        nearest = nearest_to_an_edge(theirs["recycled/positions"], features["aatype"][-1], features["seq_mask"][-1])
        if nearest < TOO_NEAR:
            print(
                f"note: a recycled distance is {nearest:.0e} Å from a bin's edge, so rounding may decide its bin; "
                "try other seeds"
            )
    return all(row.passed for row in rows)


def nearest_to_an_edge(positions: np.ndarray, aatype: np.ndarray, seq_mask: np.ndarray) -> float:
    """The smallest difference in Å between a recycled CB-CB distance and an edge of the bins."""
    beta = pseudo_beta(torch.from_numpy(aatype), torch.from_numpy(positions)).double().numpy()[seq_mask > 0]
    distances = np.linalg.norm(beta[:, None] - beta, axis=-1)[np.triu_indices(len(beta), 1)]
    return float(np.abs(distances[:, None] - RECYCLED_EDGES).min())


if __name__ == "__main__":
    sys.exit(main())

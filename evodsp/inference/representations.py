"""Arrays that `evodsp predict --save` keeps of a prediction: representations and the distogram, as arrays.

    <stem>_representations.npz|.safetensors

    array             shape            what it is
    single            R c_s            single representation
    pair              R R c_z          pair representation
    msa               S R c_m          MSA representation of the S rows of the clustered MSA that exist
    structure_module  R c_s            single representation after the structure module's last iteration
    distogram         R R bins         logits of the binned CB-CB distances
    distogram_edges   bins - 1         borders of these bins, in Å (float32)

With all passes, each of the first five has an axis in front, of the P passes (recycling iterations) that were run. The names
are those of AlphaFold2's `representations`. The residues of a complex are in the order in which its chains were given.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from evodsp.config import ModelConfig
from evodsp.errors import FileFormatError
from evodsp.inference.config import SaveSettings
from evodsp.inference.result_checks import FIX
from evodsp.model.alphafold import AlphaFold
from evodsp.model.heads import ModelOutput
from evodsp.reading.array_files import read_archive
from evodsp.weights.untrusted import map_tensors

EDGES = "distogram_edges"


class Collector:
    """Collects the arrays of a seed's passes on the first rank. All ranks make it and call it together."""

    def __init__(
        self, settings: SaveSettings, model: AlphaFold, batch: Mapping[str, Tensor], columns: Int64[np.ndarray, " R"]
    ) -> None:
        """`batch`: the features of the seed, which may be padded. `columns`: the column of each residue in them."""
        self._settings, self._model = settings, model
        self._columns = torch.from_numpy(columns)
        self._rows = (batch["msa_mask"][0, 0].any(-1)).nonzero()[:, 0].cpu()
        self._whole = batch["seq_mask"].shape[-1]
        self._passes: list[dict[str, Tensor]] = []

    def add(self, output: ModelOutput, is_last: bool) -> None:
        """Collect the arrays of a pass, if it is one of those that are saved. The last one counts once: as the last."""
        if is_last != (self._settings.passes == "last"):
            return
        self._passes.append({name: x for name in self._settings.arrays if (x := self._array(name, output)) is not None})

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The arrays of the file; empty on the other ranks."""
        if not self._passes or not self._passes[0]:
            return {}
        joined = {name: torch.stack([one[name] for one in self._passes]) for name in self._passes[0]}
        found = joined if self._settings.passes == "all" else {name: x[0] for name, x in joined.items()}
        if "distogram" in found:
            heads = self._model.config.heads
            low, high = heads.distogram_min_distance, heads.distogram_max_distance
            found[EDGES] = torch.linspace(low, high, heads.distogram_bins - 1)
        return found

    def _array(self, name: str, output: ModelOutput) -> Tensor | None:
        """One array of the first sample on the host; None on the ranks that do not write."""
        collect, whole = self._model.exchange.collect, self._whole
        found: Tensor | None
        if name == "pair":
            found = collect(output.representations["pair"][:1], "j", whole)
        elif name == "msa":
            found = collect(output.representations["msa"][:1], "res", whole)
        elif name == "distogram":
            found = collect(output.logits["distogram"][:1], "i", whole)
        else:
            found = (output.structure.single if name == "structure_module" else output.representations["single"])[:1]
            found = found if self._model.exchange.owned(whole).start == 0 else None
        if found is None:
            return None
        return in_order(name, found[0].to(getattr(torch, self._settings.dtype)).cpu(), self._rows, self._columns)


def in_order(name: str, x: Tensor, rows: Int64[Tensor, " S"], columns: Int64[Tensor, " R"]) -> Tensor:
    """An array of a sample without padding, with its residues as they were given. `rows`: those of the MSA that exist."""
    if name == "msa":
        return x[rows][:, columns]
    return x[columns][:, columns] if name in ("pair", "distogram") else x[columns]


def saved_bytes(settings: SaveSettings, model: ModelConfig, rows: int, residues: int, passes: int) -> dict[str, int]:
    """The bytes of each array of a seed. `rows`: those of the clustered MSA."""
    channels, number = model.channels, getattr(torch, settings.dtype).itemsize
    numbers = {
        "single": residues * channels.single,
        "pair": residues**2 * channels.pair,
        "msa": rows * residues * channels.msa,
        "structure_module": residues * channels.single,
        "distogram": residues**2 * model.heads.distogram_bins,
    }
    times = passes if settings.passes == "all" else 1
    return {name: numbers[name] * number * times for name in settings.arrays}


def file_name(stem: str, settings: SaveSettings) -> str:
    return f"{stem}_representations.{settings.format}"


def write_arrays(folder: Path, stem: str, arrays: Mapping[str, Tensor], settings: SaveSettings) -> dict[str, Any]:
    """Write the file of a prediction; returns what its entry of ranking.json says about it."""
    path = folder / file_name(stem, settings)
    if settings.format == "npz":
        numbers: dict[str, Any] = {name: x.numpy() for name, x in arrays.items()}
        np.savez(path, **numbers)
    else:
        try:
            save_file({name: x.contiguous() for name, x in arrays.items()}, path)
        except SafetensorError as error:  # a full disk is one to the library, too
            raise OSError(errno.EIO, str(error), str(path)) from error
    return {"file": path.name, "arrays": [*settings.arrays], "dtype": settings.dtype, "passes": settings.passes}


def is_saved(folder: Path, entry: Mapping[str, Any], stem: str, settings: SaveSettings | None) -> bool:
    """Whether the file of a prediction, whose entry of ranking.json is given, has all that `settings` ask for."""
    if settings is None:
        return True
    saved = entry.get("saved", {})
    same = (saved.get("file"), saved.get("dtype"), saved.get("passes"))
    wanted = file_name(stem, settings), settings.dtype, settings.passes
    return same == wanted and set(settings.arrays) <= set(saved["arrays"]) and (folder / wanted[0]).is_file()


def read_arrays(folder: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a file: NumPy's of an .npz file, torch's (mapped) of a .safetensors file, which may hold bfloat16.

    `saved`: what ranking.json says about it. Raises FileFormatError for a file that predict has not written.
    """
    path = folder / saved["file"]
    if not path.is_file():
        raise FileFormatError(path, f"is missing; {FIX}")
    arrays: dict[str, Any] = dict(read_archive(path, FIX)) if path.suffix == ".npz" else dict(map_tensors(path, FIX))
    _check_names(path, arrays, saved["arrays"])
    return arrays


def _check_names(path: Path, arrays: Mapping[str, Any], names: Sequence[str]) -> None:
    if lost := [name for name in names if name not in arrays]:
        raise FileFormatError(path, f"not written by evodsp predict (it has no array {lost[0]}); {FIX}")

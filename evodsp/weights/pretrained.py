"""`evodsp.save_pretrained` and `evodsp.from_pretrained`: a model as a model folder, and back; also from the hub."""

from __future__ import annotations

from pathlib import Path

from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import checkpoint_entries, load_model, read_checkpoint
from evodsp.weights.hub import fetched, is_name, located
from evodsp.weights.model_card import model_card
from evodsp.weights.pretrained_folder import FILES, check_new_folder, is_pretrained, write_pretrained
from evodsp.weights.published import is_parameter_file


def from_pretrained(source: str | Path, revision: str | None = None) -> AlphaFold:
    """The model of a folder that `save_pretrained` wrote, or of the Hugging Face hub; on the CPU, in evaluation mode.

    source: the folder, or the name of a repository on the hub, such as organisation/name. A folder of this name counts first.
    revision: a branch, a tag or a commit of the repository; None: the newest. The hub needs huggingface_hub
        (pip install 'evodsp[hub]').

    Raises UserError if there is no such model, or its files are damaged or do not fit one another.

        model = evodsp.from_pretrained("organisation/name", revision="v1.0")
        evodsp.predict("MKTAYIAKQR", checkpoint=model)
    """
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"{source}: a folder of this machine has no revision '{revision}'; leave it out")
    elif is_name(str(source)):
        folder = fetched(str(source), revision)
    elif revision is not None:
        raise UserError(f"{source}: a revision is that of a model on the hub; write organisation/name as its name")
    else:
        folder = located(source)
    if not folder.is_dir() or not is_pretrained(folder):
        what = "a folder without them" if folder.is_dir() else "a file" if folder.exists() else "no such folder"
        raise UserError(
            f"{source}: {what}; give a folder of {' and '.join(FILES[:2])}, or organisation/name of the hub; other files "
            "are read by evodsp.load_model"
        )
    return load_model(folder)


def save_pretrained(
    model: AlphaFold, folder: str | Path, checkpoint: str | Path | None = None, overwrite: bool = False
) -> None:
    """Write a model folder: `model.safetensors`, `config.json` and a model card, `README.md`.

    checkpoint: the file that the model was loaded from. If it lies in the folder of its run, the card tells the run's data,
    recipe and scores. overwrite: replace these files where they exist.

    Raises UserError if the folder holds a model already, or a weight is not finite.

        evodsp.save_pretrained(evodsp.load_model(path), "my-model", checkpoint=path)
    """
    folder = Path(folder)
    check_new_folder(folder, overwrite)
    write_folder(model, folder, None if checkpoint is None else Path(checkpoint))


def write_folder(model: AlphaFold, folder: Path, path: Path | None, raw: bool = False) -> int:
    """Write a model's folder; returns the number of arrays. `path`: the file that it was loaded from. `raw`: as for that."""
    own = path is not None and not is_parameter_file(path)
    card = model_card(folder.absolute().name, model, path, read_checkpoint(path) if own and path else None, raw)
    weights = model.state_dict()
    write_pretrained(folder, checkpoint_entries(model.config, model.trained_features), weights, card)
    return len(weights)

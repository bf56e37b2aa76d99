"""Models by the name of their repository on the Hugging Face hub: `hf:organisation/name`, or `hf:organisation/name@revision`.

huggingface_hub keeps them in its cache of this machine. It is needed only here, so it is an extra. Its mixin
(PyTorchModelHubMixin) is not used: it would make it a requirement of every model, build the model before it looks at the file,
and accept missing and unknown weights. The files have the names that the mixin gives them.
"""

from __future__ import annotations

import re
from pathlib import Path

from evodsp.errors import UserError
from evodsp.reading.quoting import quoted
from evodsp.weights.pretrained_folder import FILES

_PREFIX = "hf:"
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)


def located(path: str | Path) -> Path:
    """`path`, or where it is the name of a model on the hub (`hf:organisation/name`), its folder on this machine.

    Raises UserError as `fetched` does, and for a name that cannot be one.
    """
    text = str(path)
    if not text.startswith(_PREFIX) or Path(path).exists():
        return Path(path)
    name = text.removeprefix(_PREFIX).lstrip("/")  # hf://organisation/name is common, too
    if (found := _NAME.fullmatch(name)) is None:
        raise UserError(
            f"{text}: not the name of a model on the hub; write {_PREFIX}organisation/name, or "
            f"{_PREFIX}organisation/name@revision"
        )
    return fetched(found["name"], found["revision"])


def is_name(text: str) -> bool:
    """Whether a text can be the name of a model on the hub, organisation/name, without a revision."""
    return bool((found := _NAME.fullmatch(text)) and found["revision"] is None)


def fetched(name: str, revision: str | None = None) -> Path:
    """The folder of a model of the hub; its files are fetched if they are not on this machine yet, and no others.

    `revision`: a branch, a tag or a commit; None: the newest. Raises UserError if huggingface_hub is not installed, or the
    model cannot be had.
    """
    source = f"{_PREFIX}{name}{'' if revision is None else f'@{revision}'}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(
            f"{source}: models of the hub are fetched with huggingface_hub, which is not installed; "
            "pip install 'evodsp[hub]', or give a folder"
        ) from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # of the network, the disk or the server's answer
        raise UserError(
            f"{source}: cannot be had from the hub ({quoted(error)}); check the name, the revision and the network (a private "
            "model needs `hf auth login`)"
        ) from error

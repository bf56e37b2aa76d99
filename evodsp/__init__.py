"""evodsp: train AlphaFold2-style models and predict structures with them, one sample spread over many GPUs (DSP).

The public API. Each name is imported when it is first used, so `import evodsp` is quick and does not import torch. Import it
before torch: waiting threads then sleep, as in the commands (OMP_WAIT_POLICY, unless you have set it).

    evodsp.predict(sequence, alignment, model, **options)               predict a structure: arrays, files, 3D view
    evodsp.predict(fasta, alignments, checkpoint, output, **options)    predict structures and write their files
    evodsp.fit(config, folder, max_steps=…, **options)                  train a model: checkpoints and scores
    evodsp.embed(fasta, checkpoint=model)   representations of many sequences, several at a time
    evodsp.Prediction.read(folder)          a finished prediction of the command
    evodsp.load_model(path)                 the model of a checkpoint: evodsp's, DeepMind's .npz, OpenFold's .pt or folder
    evodsp.from_pretrained(folder)          the model of a model folder, or of the Hugging Face hub
    evodsp.save_pretrained(model, folder)   writes such a folder: safetensors, sizes, a model card
    evodsp.AlphaFold(config)                a new model, a torch module
    evodsp.ModelConfig.preset("model_1")    its sizes
    evodsp.load_deepmind(path, model)       set a model's parameters from DeepMind's params_model_<n>.npz
    evodsp.load_openfold(path, model)       set a model's parameters from OpenFold's checkpoint
    evodsp.metrics                          lDDT, RMSD, GDT-TS, TM-score of predicted structures
    evodsp.parallel                         Dynamic Sequence Parallelism for any model: init_mesh, split, switch, gather
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from evodsp.version import __version__

# Read when torch is first imported: waiting threads sleep instead of spinning. On a busy machine, spinning threads take time
# from the threads that work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from evodsp import metrics, parallel
    from evodsp.config import ModelConfig
    from evodsp.inference.api import predict
    from evodsp.inference.embedding import embed
    from evodsp.inference.prediction import Prediction
    from evodsp.model.alphafold import AlphaFold
    from evodsp.training.api import fit
    from evodsp.weights.checkpoint import load_model
    from evodsp.weights.deepmind import load_deepmind
    from evodsp.weights.openfold import load_openfold
    from evodsp.weights.pretrained import from_pretrained, save_pretrained

__all__ = [
    "AlphaFold",
    "ModelConfig",
    "Prediction",
    "__version__",
    "embed",
    "fit",
    "from_pretrained",
    "load_deepmind",
    "load_model",
    "load_openfold",
    "metrics",
    "parallel",
    "predict",
    "save_pretrained",
]

_MODULE_OF = {
    "AlphaFold": "evodsp.model.alphafold",
    "ModelConfig": "evodsp.config",
    "Prediction": "evodsp.inference.prediction",
    "embed": "evodsp.inference.embedding",
    "fit": "evodsp.training.api",
    "from_pretrained": "evodsp.weights.pretrained",
    "load_deepmind": "evodsp.weights.deepmind",
    "load_model": "evodsp.weights.checkpoint",
    "load_openfold": "evodsp.weights.openfold",
    "predict": "evodsp.inference.api",
    "save_pretrained": "evodsp.weights.pretrained",
}
_MODULES = ("metrics", "parallel")


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if name in _MODULES:
        return import_module(f"evodsp.{name}")
    raise AttributeError(f"module 'evodsp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)

"""evodsp: train and run AlphaFold2-style Evoformer models, one sample spread over many GPUs (DSP).

`evodsp.AlphaFold` and `evodsp.ModelConfig` are here for convenience; they are imported when first used, so that `import
evodsp` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evodsp.config import ModelConfig
    from evodsp.model.alphafold import AlphaFold

__version__ = "0.2.0"
__all__ = ["AlphaFold", "ModelConfig", "__version__"]

_HOME = {"AlphaFold": "evodsp.model.alphafold", "ModelConfig": "evodsp.config"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'evodsp' has no attribute '{name}'")

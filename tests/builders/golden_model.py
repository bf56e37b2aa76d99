"""The model of the golden end-to-end pack: model_1_ptm in full width, with short stacks."""

from __future__ import annotations

import dataclasses

from evodsp.config import ModelConfig

CONFIG = dataclasses.replace(
    (PTM := ModelConfig.preset("model_1_ptm")),
    evoformer=dataclasses.replace(PTM.evoformer, blocks=2),
    extra_msa=dataclasses.replace(PTM.extra_msa, blocks=1),
    templates=dataclasses.replace(PTM.templates, blocks=1),
    structure_module=dataclasses.replace(PTM.structure_module, iterations=2),
)

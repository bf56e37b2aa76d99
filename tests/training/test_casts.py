"""Copies of parameters in half precision during a training step (`evodsp.model.precision`)."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from evodsp.model.alphafold import AlphaFold
from evodsp.training.config import TrainingConfig
from evodsp.training.gradients import PlainGradients
from evodsp.training.module import TrainingModule
from tests.builders.labelled_batch import batch_of
from tests.builders.small_model import CYCLES, SMALL, config, features


def labelled_sample() -> dict[str, Tensor]:
    clusters, _, residues = SMALL
    generator = torch.Generator().manual_seed(2)
    batch = {
        **features(1),
        **batch_of(1, residues),
        "true_msa": torch.randint(22, (1, CYCLES, clusters, residues), generator=generator),
        "bert_mask": torch.ones(1, CYCLES, clusters, residues),
        "sample_index": torch.zeros(1, dtype=torch.long),
    }
    return {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}


def test_copies_last_until_the_backward_pass_has_ended() -> None:
    """Catches a recomputation in the backward pass that casts parameters one by one again, and copies that hide the parameters
    when the optimizer has changed them or when the moving average takes their place."""
    module = TrainingModule(TrainingConfig(**vars(config())))
    module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module._gradients = PlainGradients(module.model.parameters(), None)
    attention = module.model.evoformer.blocks[0].pair_stack.attention_starting.attention
    layer = attention.output  # whose parameters an operator takes: it is never called
    used: list[torch.dtype] = []
    attention.register_forward_hook(lambda *_: used.append(layer.weight.dtype))
    batch = labelled_sample()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = module.training_step(batch, 0)
    passes = len(used)
    loss.backward()
    module.on_after_backward()
    assert len(used) == passes + 1  # recomputed
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        module._evaluate(batch, "val")
    assert isinstance(layer.weight, nn.Parameter)
    assert set(used) == {torch.bfloat16}


def test_a_model_that_is_scored_is_the_one_that_is_cast() -> None:
    """Catches copies of the parameters of a new model, where validate and test put another one in its place."""
    model = AlphaFold(config())
    module = TrainingModule(TrainingConfig(**vars(config())), model=model)
    assert module.model is model
    layer = model.evoformer.blocks[0].pair_stack.attention_starting.attention.output
    with torch.autocast("cpu", torch.bfloat16), module._casts:
        assert layer.weight.dtype == torch.bfloat16

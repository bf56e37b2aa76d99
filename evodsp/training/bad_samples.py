"""Samples whose loss or gradient is not finite: left out of their step, named, counted, and written to be computed again
alone.

`evodsp.training.gradients` keeps them from the parameters; the module finds out which they are. All ranks know the same
list. A run that meets more than its limit stops between two steps, with a checkpoint.

`evodsp replay` computes such a sample again alone. The file is a checkpoint (`evodsp.weights.checkpoint`) with one more
entry, `replay`: the batch, the seed, the settings of losses and operators, and the findings of the run. The replay draws the
same dropout masks, on one device, with autograd's anomaly detection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from evodsp.config import KernelsConfig, LossConfig, ModelConfig, from_dict, import_layers
from evodsp.errors import UserError
from evodsp.files import whole_file, write_json_lines
from evodsp.losses.permutation import ENTITIES, with_fitting_labels
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.heads import ModelOutput
from evodsp.model.kernels.operators import choose
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_kernels
from evodsp.parallel.dtensor import gather_tree, local
from evodsp.printing import counted, logger, show
from evodsp.rng import Draws
from evodsp.training.loader import TrainingLoader
from evodsp.training.run_folder import RunFolder
from evodsp.weights.checkpoint import checkpoint_entries, load_weights, own_weights, read_checkpoint
from evodsp.weights.untrusted import check_weights, on_meta

if TYPE_CHECKING:
    from evodsp.training.module import TrainingModule

_SHOWN = 20
"""The number of parameters to list."""


def write_replay(
    path: Path, module: TrainingModule, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], found: str
) -> None:
    """Write the file of one sample. `weights`: whole tensors, under the module's names. `batch`: this sample alone, on the CPU.
    `found`: the run's line about the sample."""
    entry = {
        "batch": dict(batch),
        "seed": module.seed,
        "loss": dataclasses.asdict(module.config.loss),
        "kernels": dataclasses.asdict(module.kernels),
        "half": "bf16" in str(module.trainer.precision),
        "step": module.trainer.global_step,
        "found": found,
    }
    checkpoint = checkpoint_entries(module.model.config, module.features)
    with whole_file(path) as partial:
        torch.save({**checkpoint, "state_dict": dict(weights), "replay": entry}, partial)


class FirstNotFinite:
    """Names the first module, in the order of computation and the innermost one, whose output is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.name: str | None = None
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _module, _inputs, output, name=name: self._look(name, output))

    def _look(self, name: str, output: Any) -> None:
        if self.name is None and any(not x.isfinite().all() for x in _floats(output)):
            self.name = name


def _floats(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()] if value.is_floating_point() else []
    if isinstance(value, tuple | list):
        return [x for item in value for x in _floats(item)]
    if isinstance(value, Mapping):
        return _floats(list(value.values()))
    if dataclasses.is_dataclass(value):
        return _floats([getattr(value, item.name) for item in dataclasses.fields(value)])
    return []


def replay(path: str | Path, device: torch.device, layers: Collection[str] = ()) -> tuple[list[str], bool]:
    """Compute the sample of a replay file again. Returns lines of findings, and whether all numbers are finite.
    `layers`: as in `load_model`.

    Raises UserError if the file is none that a run wrote for `evodsp replay`.
    """
    checkpoint = read_checkpoint(path)
    entry = checkpoint.get("replay")
    if not isinstance(entry, dict):
        raise UserError(f"{path}: a checkpoint, but not of a sample; give a file of <output>/replays")
    weights = own_weights(path, checkpoint, raw=True)
    config = import_layers(ModelConfig.from_dict(checkpoint["model_config"]), layers, str(path))
    check_weights(on_meta(config, str(path)), weights, str(path))
    model = AlphaFold(config).to(next(iter(weights.values())).dtype)
    load_weights(model, weights, str(path))
    model.to(device).train()
    half, loss_config = entry["half"], from_dict(LossConfig, entry["loss"], "loss")
    dtype = torch.bfloat16 if half else next(model.parameters()).dtype
    kernels, _ = choose(from_dict(KernelsConfig, entry["kernels"], "kernels"), device, dtype)
    use_kernels(model, kernels)
    of_host = ("sample_index", ENTITIES)
    batch = {name: value if name in of_host else value.to(device) for name, value in entry["batch"].items()}
    dropout = Draws.root(entry["seed"]).at("dropout")
    draws = [dropout.at(index) for index in batch["sample_index"].tolist()]
    first, casts = FirstNotFinite(model), CastParameters(model)
    lines = [f"step {entry['step']}, {entry['found']}"]
    wrong_inputs = [name for name, value in batch.items() if value.is_floating_point() and not value.isfinite().all()]
    if wrong_inputs:
        lines.append(f"not finite in the sample itself: {', '.join(wrong_inputs)}")
    with (
        torch.autograd.detect_anomaly(check_nan=True),
        torch.autocast(device.type, torch.bfloat16, enabled=half),
        casts,
    ):
        output: ModelOutput = model(batch, draws)
        if first.name is not None:
            lines.append(f"first module whose output is not finite: {first.name}")
        batch = with_fitting_labels(output.structure.positions, batch, draws, model.exchange)
        loss, terms = total_loss(output, batch, loss_config, model.config.heads, model.exchange)
        lines += [f"{name:<24} {float(value):.6g}" for name, value in terms.items()]
        finite = bool(loss.isfinite()) and first.name is None and not wrong_inputs
        try:
            loss.backward()
        except RuntimeError as error:
            if "nan values" not in str(error):
                raise
            return [*lines, f"backward: {error}"], False
    gradients = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if gradients:
        more = [f"and {len(gradients) - _SHOWN} more"] if len(gradients) > _SHOWN else []
        lines.append(f"gradients that are not finite: {', '.join([*gradients[:_SHOWN], *more])}")
    finite = finite and not gradients
    return [*lines, "all numbers are finite: this device does not repeat it"] if finite else lines, finite


def run(path: str, device: str, layers: Collection[str]) -> int:
    """`evodsp replay`: print the findings, and return the exit code: 1 if something is not finite."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    lines, finite = replay(path, torch.device(device), layers)
    show("\n".join(lines))
    return 0 if finite else 1


_log = logger(__name__)

_DERIVED = ("loss", "total", "lddt_ca")
"""Logged numbers that are no term of the loss; they are named only if all terms are finite."""
_NAMED = 5
"""The number of parameters that a message names."""


@dataclass(frozen=True)
class Suspect:
    """A sample that one rank suspects, and its reasons."""

    sample: int
    numbers: Sequence[str] = ()
    """The logged numbers that are not finite."""
    parameters: Sequence[str] = ()
    """The parameters whose gradient is not finite."""
    one_of: int = 1
    """The number of samples among which one is bad."""


@dataclass(frozen=True)
class BadSample:
    """A sample that was left out, as `bad_samples.jsonl` lists it."""

    sample: int
    """Global index."""
    chain: str
    step: int
    """Optimizer step, from 0."""
    terms: list[str] = field(default_factory=list)
    """Terms of the loss that are not finite; `total` if only their sum is not."""
    parameters: list[str] = field(default_factory=list)
    """Parameters whose gradient is not finite, where it is known of this sample."""
    one_of: int = 1
    """The number of samples among which one must be bad: more than 1 where gradients are averaged before anyone could tell them
    apart."""
    time: str = ""
    """ISO 8601 in UTC."""

    def __str__(self) -> str:
        more = f" and {len(self.parameters) - _NAMED} more" if len(self.parameters) > _NAMED else ""
        parts = [f"loss {', '.join(self.terms)}"] if self.terms else []
        parts += [f"gradient of {', '.join(self.parameters[:_NAMED])}{more}"] if self.parameters else []
        doubt = f", or another one of {self.one_of} samples" if self.one_of > 1 else ""
        return f"sample {self.sample} (chain {self.chain}): {'; '.join(parts) or 'gradient'}{doubt}"


class TooManyBadSamplesError(UserError):
    """More samples were not finite than `max_bad_samples` allows."""


class NotFiniteWeightsError(UserError):
    """The weights themselves are not finite, and are not saved."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the weights are not finite at step {step}, so they are not saved; go on from the last checkpoint with "
            "--ckpt_path last and a lower model.optimizer.lr"
        )


def all_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether all of this rank's numbers are finite. The host waits for the device."""
    with torch.no_grad():
        return bool(torch.stack(torch._foreach_norm([local(p) for p in parameters])).isfinite().all())


def merged(
    parts: Sequence[tuple[Sequence[Suspect], Sequence[int], Sequence[str]]], skip: Collection[int]
) -> list[Suspect]:
    """The suspects of all ranks in one step, one entry a sample. `parts`: for each rank its suspects, all samples of its step,
    and the parameters whose gradient is not finite after the mean over ranks.

    If no rank saw anything before that, every sample of the step is suspected, unless one of `skip` explains it.
    """
    found: dict[int, Suspect] = {}
    for suspect in (suspect for suspects, _, _ in parts for suspect in suspects):
        former = found.get(suspect.sample, suspect)
        numbers = dict.fromkeys([*former.numbers, *suspect.numbers])
        parameters = dict.fromkeys([*former.parameters, *suspect.parameters])
        found[suspect.sample] = Suspect(suspect.sample, list(numbers), list(parameters))
    samples = {sample for _, own, _ in parts for sample in own}
    if not found and not samples & set(skip):
        names = list(dict.fromkeys(name for _, _, parameters in parts for name in parameters))
        found = {sample: Suspect(sample, (), names, len(samples)) for sample in samples}
    return [found[sample] for sample in sorted(found.keys() - set(skip))]


class BadSamples(Callback):
    """The samples that this run left out, equal on all ranks.

    `limit`: the most samples that may be left out before the run stops. `replays`: the number of samples that are written to
    files, which `evodsp replay` computes again. `skip`: samples that are left out by the user's wish; they are neither named
    nor counted.
    """

    def __init__(self, limit: int = 10, replays: int = 0, skip: Collection[int] = ()) -> None:
        self.limit, self.replays, self.skip = limit, replays, frozenset(skip)
        self.folder: RunFolder | None = None
        """The folder of the run, on the rank that writes files."""
        self.samples: list[BadSample] = []
        self.kept = False
        """Whether some step of this run kept a sample."""

    def skips(self, samples: Iterable[int]) -> bool:
        """Whether one of these samples is to be left out."""
        return not self.skip.isdisjoint(samples)

    def add(self, suspects: Sequence[Suspect], module: TrainingModule) -> None:
        """Name the suspects of this step, before the optimizer changes the weights. All ranks call this with the same ones."""
        trainer, now = module.trainer, datetime.now(UTC).isoformat(timespec="seconds")
        loader = trainer.train_dataloader
        for suspect in suspects:
            terms = [name for name in suspect.numbers if name not in _DERIVED]
            if not terms and {"loss", "total"} & set(suspect.numbers):
                terms = ["total"]
            # Empty if the trainer's data are not evodsp's.
            chain = loader.chain_of(suspect.sample) if isinstance(loader, TrainingLoader) else ""
            parameters = list(suspect.parameters)
            bad = BadSample(suspect.sample, chain, trainer.global_step, terms, parameters, suspect.one_of, now)
            self.samples.append(bad)
            if trainer.is_global_zero:
                _log.warning("%s is not finite, and is left out of step %d", bad, bad.step)
            if len(self.samples) <= self.replays:
                self._write_replay(bad, module)
        self._write()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Stop between two steps, so that a checkpoint of this one can be written."""
        if self.number > self.limit:
            listed = f"; {self.path} lists them" if self.path is not None else ""
            raise TooManyBadSamplesError(
                f"{counted(self.number, 'sample')} {'was' if self.number == 1 else 'were'} not finite, the last "
                f"{self.samples[-1]}, but max_bad_samples is {self.limit}"
                f"{listed}; 'evodsp replay FILE' computes one again alone; go on with --ckpt_path last and a lower "
                "model.optimizer.lr, a larger --max_bad_samples, or these samples in data.skip_samples"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that has learned nothing is not a finished one, however short it is."""
        if self.samples and not self.kept:
            raise TooManyBadSamplesError(
                f"no sample of this run was finite, the last {self.samples[-1]}; {self.path or 'the log'} lists them; check "
                "model.loss, and lower model.optimizer.lr"
            )

    @property
    def number(self) -> int:
        """The number of samples that were not finite. Samples of a step that cannot be told apart count as one."""
        return sum(bad.one_of == 1 for bad in self.samples) + len({bad.step for bad in self.samples if bad.one_of > 1})

    @property
    def path(self) -> Path | None:
        """The list of these samples, one JSON object a line."""
        return None if self.folder is None else self.folder.bad_samples

    def state_dict(self) -> dict[str, Any]:
        return {"samples": [dataclasses.asdict(bad) for bad in self.samples]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Samples that the user skips from now on do not count any more."""
        found = [BadSample(**entry) for entry in state_dict["samples"]]
        self.samples = [bad for bad in found if bad.sample not in self.skip]
        self._write()

    def _write(self) -> None:
        write_json_lines(self.path, self.samples)

    def _write_replay(self, bad: BadSample, module: TrainingModule) -> None:
        weights = gather_tree(module.state_dict(), keep=self.folder is not None)  # a collective
        loader = module.trainer.train_dataloader
        if self.folder is None or not isinstance(loader, TrainingLoader):
            return
        path = self.folder.replays / f"sample_{bad.sample}.pt"
        try:
            batch = loader.again(bad.sample)
            write_replay(path, module, weights, batch, str(bad))
        except (UserError, OSError) as error:  # the run is worth more than the file
            _log.warning("%s is not written: %s", path, error)
        else:
            _log.warning("compute it again alone with: evodsp replay %s", path)

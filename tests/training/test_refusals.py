"""What `evodsp fit` refuses before anything starts: settings that do not fit together, command lines that cannot be read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import callbacks

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.training.checks import Settings, check_run
from evodsp.training.command import TrainingCLI, build
from evodsp.training.trainer import check_callbacks
from evodsp.training.world import World
from evodsp.weights.checkpoint import save_model
from evodsp.weights.deepmind import export_deepmind, write_npz
from tests.builders.training import changed, fit, told, words
from tests.builders.weights import random_model


@pytest.fixture(scope="module")
def settings(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of a run that can begin."""
    return TrainingCLI("fit", words(chains, tmp_path_factory.mktemp("refused") / "run")[1:]).settings


REFUSED = [
    # Meshes and devices.
    ("parallel.sequence: 0", "parallel.sequence is 0"),
    ("parallel.sequence: 2, trainer.devices: 3", "not a multiple of it"),
    ("parallel.sequence: 5", "data.train.msa_clusters is 4"),
    ("parallel.sequence: 4, data.train.crop_size: 3", "data.train.crop_size is 3"),
    ("parallel.parameters: zero2", "zero2"),
    ("parallel.parameters: fsdp2", "set model.optimizer.clip to batch"),
    ("parallel.timeout: 0", "parallel.timeout is 0"),
    ("parallel.timeout: .inf", "parallel.timeout is inf"),
    ("trainer.num_nodes: 2", "use torchrun, srun or mpirun"),
    ("trainer.devices: [0, 1]", "CUDA_VISIBLE_DEVICES=0,1"),
    ("trainer.devices: 0", "devices is 0, but must be a number of at least 1"),
    ("trainer.devices: -2", "devices is -2, but must be a number of at least 1"),
    ("trainer.devices: 1.5", "devices is 1.5, but must be a number of at least 1"),
    ("trainer.devices: []", "devices is [], but must be a number of at least 1"),
    ("trainer.devices: [0]", "trainer: `devices`"),
    ("trainer.devices: 2, trainer.strategy: ddp", "trainer.strategy is ddp"),
    ("trainer.strategy: ddp_spawn", "strategy is ddp_spawn, but must be auto"),
    ("trainer.accelerator: tpu", "trainer: "),
    ("trainer.accelerator: abacus", "abacus"),
    # Precision, clipping and kernels.
    ("trainer.devices: 2, trainer.precision: 16-mixed, model.optimizer.clip: batch", "bf16-mixed"),
    ("trainer.precision: 16-mixed, model.optimizer.clip: batch", "scaled gradients"),
    ("trainer.precision: 16-true", "keeps the weights in half precision"),
    ("trainer.precision: bf16-true, parallel.sequence: 2", "use bf16-mixed or 32-true"),
    ("trainer.gradient_clip_algorithm: value", "gradient_clip_algorithm is value"),
    ("trainer.gradient_clip_val: -1", "trainer.gradient_clip_val is -1, but must be at least 0"),
    ("model.optimizer.clip: none", "clip"),
    ("kernels.attention: chunkd", "kernels.attention is 'chunkd', but must be one of auto, "),
    ("compile: blocks, plan.stream_bias: true", "set plan.stream_bias to false"),
    ("compile: blocks, data.train.crop_size: null", "set data.train.crop_size"),
    ("compile: blocks, parallel.parameters: fsdp2, model.optimizer.clip: batch", "replicate or zero1"),
    # Intervals and lengths.
    ("trainer.val_check_interval: 0", "val_check_interval is 0, but must be above 0"),
    ("trainer.val_check_interval: 0.0", "val_check_interval is 0.0, but must be above 0"),
    ("trainer.val_check_interval: 5", "at most 4, the batches of an epoch"),
    ("trainer.val_check_interval: 3, trainer.devices: 2", "at most 2, the batches of an epoch"),
    ("trainer.val_check_interval: 9, global_batch: 4, data.batch_size: 2", "at most 4, the batch"),
    ("trainer.val_check_interval: '00:00:10:00', trainer.devices: 2", "a number on several ranks"),
    ("trainer.check_val_every_n_epoch: 0", "check_val_every_n_epoch is 0, but must be at least 1"),
    ("trainer.check_val_every_n_epoch: -1", "check_val_every_n_epoch is -1, but must be at least 1"),
    ("trainer.log_every_n_steps: -1", "log_every_n_steps is -1, but must be at least 0"),
    ("trainer.num_sanity_val_steps: -7", "num_sanity_val_steps is -7, but must be at least -1"),
    ("trainer.max_steps: 0", "max_steps is 0, but must be at least 1, or -1 for no limit"),
    ("trainer.max_steps: -2", "max_steps is -2, but must be at least 1, or -1 for no limit"),
    ("trainer.max_epochs: 0", "max_epochs is 0, but must be at least 1, or -1 for no limit"),
    ("trainer.min_steps: 7", "min_steps is 7, but must be at most 6, after which the run ends"),
    ("trainer.min_steps: 5, max_samples: 4", "min_steps is 5, but must be at most 4"),
    ("trainer.min_steps: -1", "min_steps is -1, but must be at least 0"),
    ("trainer.min_epochs: 3, trainer.max_epochs: 2", "min_epochs is 3, but must be at most 2"),
    ("trainer.max_time: soon", "trainer.max_time is soon"),
    ("max_samples: 0", "max_samples is 0, but must be at least 1"),
    ("checkpoint_every: 0", "checkpoint_every is 0, but must be at least 1"),
    ("early_stop: 2, data.validation_chains: null", "early_stop is 2, but the run validates nothing"),
    ("early_stop: 2, trainer.limit_val_batches: 0", "early_stop is 2, but the run validates nothing"),
    ("peak_tflops: 0.0", "peak_tflops is 0.0"),
    # Batches and samples.
    ("trainer.accumulate_grad_batches: 0", "trainer.accumulate_grad_batches is 0, but must be at least 1"),
    (
        "global_batch: 9, data.batch_size: 2",
        "global_batch is 9, but must be a multiple of 2 (data ranks 1 x data.batch_size 2); use another",
    ),
    (
        "global_batch: 4, trainer.accumulate_grad_batches: 4",
        "global_batch is 4, which sets how many batches are accumulated, but trainer.accumulate_grad_batches is 4; give",
    ),
    ("trainer.limit_train_batches: 0", "limit_train_batches is 0, but must be null: an epoch has data.samples"),
    ("trainer.limit_val_batches: 0.5", "limit_val_batches is 0.5, but must be a number, or a share of 1"),
    ("trainer.overfit_batches: 1", "overfit_batches is 1, but must be 0: each epoch draws other samples"),
    ("trainer.reload_dataloaders_every_n_epochs: 1", "reload_dataloaders_every_n_epochs is 1, but must be 0"),
    ("trainer.barebones: true", "barebones is true, but must be false: it forbids checkpoints, logs and prog"),
    ("data.batch_size: 0", "data.batch_size is 0"),
    ("data.train.crop_size: -5", "data.train.crop_size is -5, but must be at least 1"),
    ("data.train.msa_clusters: 0", "data.train.msa_clusters is 0, but must be at least 1"),
    ("data.train.recycles: -1", "data.train.recycles is -1, but must be at least 0"),
    ("data.validation.extra_msa: 0", "data.validation.extra_msa is 0, but must be at least 1"),
    ("data.train.masked_uniform: 2.0", "masked_uniform is 2.0, but must be at least 0 and at most 1"),
    ("seed: -1", "seed is -1, but must be at least 0 and below 4294967296"),
    # The model, its losses and its optimizer.
    (
        "model.loss.pae: 0.1",
        "model.loss.pae is 0.1, but the model has no head for it; set model.heads.predicted_aligned",
    ),
    ("model.evoformer.msa_heads: 0", "model.evoformer.msa_heads is 0, but must be at least 1"),
    ("model.extra_msa.pair_dropout: 1.5", "model.extra_msa.pair_dropout is 1.5, but must be at least 0 and below 1"),
    ("model.optimizer.beta2: 1.0", "model.optimizer.beta2 is 1.0, but must be at least 0 and below 1"),
    ("model.optimizer.lr: -1.0", "model.optimizer.lr is -1.0, but must be above 0"),
    ("model.optimizer.lr: .inf", "model.optimizer.lr is inf, but must be finite"),
    (
        "model.optimizer.schedule: cosine, trainer.max_steps: -1, max_samples: null",
        "model.optimizer.total_samples is null, but must be a number: max_samples and trainer.max_steps are off",
    ),
    ("data.train.max_templates: 2", "model.templates.enabled is false, but data.train.max_templates is 2"),
    # Parts that are trained, frozen or adapted.
    (
        "model.freeze: [evofromer]",
        "'evofromer' names no parameter of this model. Did you mean 'evoformer'? Its parts",
    ),
    ("model.freeze: ['*']", "'*' names all parameters, so that nothing is left to train"),
    ("model.train_only: [head]", "model.train_only: 'head' names no parameter of this model. Did you mean 'heads'?"),
    (
        "model.train_only: [heads], model.freeze: [heads]",
        "model.freeze: 'heads' names all that model.train_only trains ('heads'), so that nothing is left to train",
    ),
    (
        "model.adapters.rank: 2, model.adapters.parts: [evofromer]",
        "model.adapters.parts: 'evofromer' names no parameter of this model. Did you",
    ),
    ("model.adapters.rank: 2, model.adapters.parts: ['*.bias']", "names no matrix that may have an adapter of rank 2"),
    (
        "model.adapters.rank: 2, model.adapters.parts: [structure_module.attention.pair_bias]",
        "names no matrix that may have an adapter of rank 2",
    ),
    (
        "model.adapters.rank: 2, model.freeze: [extra_msa_stack, evoformer]",
        "model.freeze and model.train_only must not name it",
    ),
    (
        "model.adapters.rank: 2, parallel.parameters: fsdp2, model.optimizer.clip: batch",
        "set parallel.parameters to replicate or zero1",
    ),
    ("model.adapters.parts: [evoformer]", "model.adapters.parts is ['evoformer'], but model.adapters.rank is 0"),
    # Files.
    ("data.train_chains: [1abc_B]", "no alignments of chain '1abc_B'"),
    ("data.train_chains: nowhere.txt", "nowhere.txt: no such file"),
    ("data.train_chains: [1abc_A, 1abc_A]", "more than once"),
    ("data.structure_dir: nowhere", "data.structure_dir is nowhere, which is no folder; give the folder of structures"),
    (f"data.alignment_dir: {__file__}", "which is a file; give the folder of alignments, one sub-folder per chain"),
    ("ckpt_path: nowhere.ckpt", "nowhere.ckpt: no such checkpoint"),
    ("ckpt_path: last", "checkpoints/last.ckpt"),
    ("init_from: SOURCES/own.ckpt, ckpt_path: SOURCES/own.ckpt", "leave one out"),
    ("init_from: SOURCES/none.ckpt", "none.ckpt: no such file"),
    ("init_from: SOURCES/broken.npz", "broken.npz: neither a checkpoint nor"),
    ("init_from: SOURCES/own.ckpt, model.channels.pair: 6", "model.channels.pair 5, but the config says 6"),
]


@pytest.fixture(scope="module")
def sources(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of weights."""
    folder, model = tmp_path_factory.mktemp("sources"), random_model(settings.model.model_config(), 3)
    save_model(folder / "own.ckpt", model)
    write_npz(folder / "deepmind.npz", export_deepmind(model))
    (folder / "broken.npz").write_bytes((folder / "deepmind.npz").read_bytes()[:999])
    return folder


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_settings_that_do_not_fit_are_one_line(settings: Settings, sources: Path, options: str, said: str) -> None:
    """Found before a file is written; the traceback of another program, or a run that does something else."""
    with pytest.raises(UserError) as caught:
        build(check_run("fit", changed(settings, options.replace("SOURCES", str(sources)))), World(), 0.0)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path(settings.run.output).exists()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (callbacks.Timer(duration="00:00:01:00"), "Timer does not work with evodsp; set trainer.max_time"),
        (callbacks.GradientAccumulationScheduler({0: 2}), "set global_batch instead"),
        (callbacks.BatchSizeFinder(), "set data.batch_size instead"),
        (callbacks.LearningRateFinder(), "set model.optimizer.lr instead"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_that_cannot_work(made: callbacks.Callback, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_callbacks([callbacks.Checkpoint(), made])


def test_gpus_that_are_not_there(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A division by the number of GPUs; ranks that start and find no GPU of theirs."""
    for gpus, devices, said in (
        (0, "auto", "must be cpu or auto: this machine has no GPU"),
        (2, 3, "must be at most 2"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(UserError, match=said):
            check_run("fit", changed(settings, f"trainer.accelerator: gpu, trainer.devices: {devices}"))


def test_a_missing_compiler_is_one_line(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches torch's traceback on a machine without a C++ compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"no-such-compiler is not found; install g\+\+"):
        check_run("fit", changed(settings, "compile: blocks"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model.evoformr.blocks=3"], "Did you mean '--model.evoformer.blocks'?"),
        (["--trainer.max_step=3"], "Did you mean '--trainer.max_steps'?"),
        (["--model.evoformer.blocks=many"], "--model.evoformer.blocks: expected int, found 'many'; see"),
        (["--model.evoformer=3"], "model.evoformer: expected a group of options (blocks, "),
        (["--data=3"], "--data: expected a group of options (alignment_dir, "),
        (["--model.evoformer.msa_heads=0"], "--model.evoformer.msa_heads is 0, but must be at least 1"),
        (["--parallel.sequence=5"], "data.train.msa_clusters is 4"),
        (["--output=elsewhere"], "--output is given more than once; give it once"),
        (["--seed_everything=3"], "use --seed"),
        (["--config=nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--compile=model"], "compile: "),
        (["--init_from=SOURCES/deepmind.npz", "--model.channels.pair=6"], "model.channels.pair"),
        (
            ["--model.optimizer.drop_step=3"],
            "model.optimizer.drop_step was replaced by model.optimizer.drop_samples, which counts samples: steps x",
        ),
        (
            ["--trainer.callbacks=nowhere.Mine"],
            "callbacks: Problem with given class_path 'nowhere.Mine': No module named 'nowhere'; see",
        ),
        (["--trainer.callbacks=[{class_path: nowhere.Mine}]"], "'nowhere.Mine': No module named 'nowhere'; see"),
        (
            ["--trainer.callbacks={class_path: EarlyStopping, init_args: {monitr: a}}"],
            "--trainer.callbacks: Option 'monitr' is not accepted. Did you mean 'monitor'?",
        ),
        (
            ["--trainer.callbacks={class_path: EarlyStopping}"],
            "--trainer.callbacks: the following arguments are required: monitor",
        ),
        (["--trainer.callbacks={class_path: LearningRateFinder}"], "set model.optimizer.lr instead"),
        (
            ["--trainer.logger={class_path: tests.builders.observers.RecordingLogger, init_args: {file: ''}}"],
            "'tests.builders.observers.RecordingLogger': no module named 'records'",
        ),
        (
            ["--trainer.logger=[{class_path: tests.builders.observers.RecordingLogger, init_args: {file: ''}}]"],
            "'tests.builders.observers.RecordingLogger': no module named 'records'",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_leaves_nothing(
    chains: Path, sources: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    done = told(words(chains, tmp_path / "run", *(option.replace("SOURCES", str(sources)) for option in options)))
    assert done.code == 2
    assert done.error.startswith("evodsp: error: ")
    assert done.error.count("\n") == 1
    assert said in done.error
    assert not (tmp_path / "run").exists()


@pytest.mark.verify_but("batch_size*", "trainer*", "  evoformer*", "msa: 3*")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("batch_size", "batchsize", ":LINE: unknown config key 'data.batchsize'. Did you mean 'data.batch_size'?"),
        (
            "  train: {crop",
            "  trn: {crop",
            ":LINE: unknown config key 'data.trn.crop_size'. Did you mean 'data.train.crop_size'?",
        ),
        ("channels: {msa: 6", "channels: {msa: 0", ":LINE: model.channels.msa is 0, but must be at least 1"),
        ("  evoformer: *stack", "  evoformer: 3", ":LINE: model.evoformer: expected a group of options (blocks, "),
        ("channels: {msa: 6", "channels: {msa: six", ":LINE: model.channels.msa: expected int, found 'six'; see"),
        (
            "msa: 3, recycles: 1}",
            "msa: 3, recycles: -1}",
            ":LINE: data.train.recycles is -1, but must be at least 0",
        ),
        ("trainer: {", "trainer: [", ":LINE: not YAML that evodsp reads"),
    ],
)
def test_a_mistake_in_the_config_names_its_line(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    text = (chains / "tiny.yaml").read_text().replace(old, new)
    (tmp_path / "wrong.yaml").write_text(text)
    assert main(["fit", "--config", str(tmp_path / "wrong.yaml"), "--output", str(tmp_path / "run")]) == 2
    line = 1 + next(number for number, line in enumerate(text.splitlines()) if new in line)
    assert "wrong.yaml" + said.replace("LINE", str(line)) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("EVODSP_CHECKPOINT_EVERY", "-3", "EVODSP_CHECKPOINT_EVERY: checkpoint_every is -3, but must be at least 1"),
        ("EVODSP_TRAINER__GRADIENT_CLIP_VAL", "lots", "EVODSP_TRAINER__GRADIENT_CLIP_VAL: trainer.gradient_clip_val: expec"),
        ("EVODSP_MODEL__OPTIMIZER__LR", "fast", "EVODSP_MODEL__OPTIMIZER__LR: model.optimizer.lr: expected float, found"),
        ("EVODSP_DATA", "/x", "EVODSP_DATA: data: expected a group of options"),
        ("EVODSP_TRAINER__MAX_STEP", "3", "MAX_STEP: no such setting. Did you mean 'EVODSP_TRAINER__MAX_STEPS'?"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, value: str, said: str,
) -> None:  # fmt: skip
    """Catches a wrong value that is blamed on the config file, which is right; a misspelled variable that does nothing."""
    monkeypatch.setenv(name, value)
    assert main(["fit", f"--config={chains}/tiny.yaml", f"--output={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "tiny.yaml" not in error
    assert len(error.splitlines()) == 1


def test_variables_count_less_than_the_config(
    chains: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches variables that nobody reads, and another order than Lightning's: defaults, variables, config, options."""
    for name, value in {"SEED": 5, "DATA__BATCH_SIZE": 7, "CHECKPOINT_EVERY": 17, "TRAINER__MAX_EPOCHS": 9}.items():
        monkeypatch.setenv(f"EVODSP_{name}", str(value))
    assert main(["fit", f"--config={chains}/tiny.yaml", "--checkpoint_every=3", "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["seed"] == 5
    assert config["trainer"]["max_epochs"] == 9
    assert config["data"]["batch_size"] == 1, "the config's"
    assert config["checkpoint_every"] == 3, "the option's"


def test_a_folder_of_checkpoints_that_cannot_be_written(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found at the first save, after hours. A file stands for a folder without permission, which root has everywhere."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    assert fit(chains, tmp_path / "run") == 2
    assert "run/checkpoints: is a file" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


def test_a_broken_alignment_is_one_line_even_from_a_worker(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more chains than are read in advance, a broken file is found in a worker process of the loader."""
    monkeypatch.setattr("evodsp.training.chains.MOST_CHAINS_READ", 0)
    broken = tmp_path / "alignments"
    for key in ("1abc_A", "2abc_B"):
        (broken / key).mkdir(parents=True)
        (broken / key / "hits.a3m").write_text(">q\nMKT\n>r\nMK\n")
    options = ("--data.alignment_dir", str(broken), "--data.num_workers", "1")
    assert fit(chains, tmp_path / "run", *options) == 2
    error = capsys.readouterr().err
    assert "hits.a3m" in error
    assert error.splitlines()[-1].startswith("evodsp: error: ")
    assert "Traceback" not in error


@pytest.mark.verify_but("EarlyStopping*")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ModelCheckpoint", "`ModelCheckpoint(monitor='val/lddt')` could not find"),
        ("EarlyStopping", "Early stopping conditioned on metric `val/lddt`"),
    ],
)
def test_a_callback_that_monitors_what_is_not_logged(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    """A traceback for a misspelt score, with exit code 1, which a batch system may take for a failure of the machine."""
    own = f", dirpath: {tmp_path}/own" if name == "ModelCheckpoint" else ""
    callback = f"--trainer.callbacks={{class_path: {name}, init_args: {{monitor: val/lddt{own}}}}}"
    assert fit(chains, tmp_path / "run", callback, "--data.samples_per_epoch=1") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"evodsp: error: trainer: {said}")
    assert "val/lddt_ca" in error


def test_an_error_of_pytorch_is_no_mistake_of_the_user(
    chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a GPU without memory, or a collective that failed, reported as a wrong setting: torchrun would not restart."""

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("evodsp.training.command._execute", fails)
    with pytest.raises(torch.OutOfMemoryError):
        main(list(words(chains, tmp_path / "run")))


def test_a_callback_in_the_current_folder_is_found(
    chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`evodsp fit` that knows a user's file on several ranks only, which our launcher starts with `python -m evodsp`."""
    (tmp_path / "of_a_user.py").write_text(
        "from lightning.pytorch import Callback\n\n\nclass Mine(Callback):\n"
        "    def on_train_start(self, trainer, module):\n        print('MINE', trainer.global_rank)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    options = ("--trainer.max_steps", "1", "--trainer.callbacks", "of_a_user.Mine")
    assert main(list(words(chains, tmp_path / "run", *options))) == 0
    assert "MINE 0" in capfd.readouterr().out

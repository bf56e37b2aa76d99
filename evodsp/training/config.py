"""Typed settings of a training run: the options of `evodsp fit` besides those of Lightning's Trainer. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from evodsp.config import (
    FILTERS_OF_PREDICTIONS,
    FeatureConfig,
    FilterConfig,
    LossConfig,
    MatmulPrecision,
    ModelConfig,
    Sampling,
    check_exclusion,
    check_matmul,
    check_selection,
    import_layers,
    leaves,
)
from evodsp.errors import (
    BELOW_ONE,
    COUNT,
    FRACTION,
    POSITIVE,
    SEED,
    SIZE,
    Range,
    SettingError,
    UserError,
    check_numbers,
    memory_size,
)


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its learning rate (supplement 1.11.3), whose schedule counts the samples of all devices since the start."""

    RESUME: ClassVar[str] = "applied"

    lr: float = 1e-3
    """Learning rate after the warm-up."""
    beta1: float = 0.9
    """Adam's decay of the mean of the gradients."""
    beta2: float = 0.999
    """Adam's decay of the mean of the squared gradients."""
    eps: float = 1e-6
    """Adam's epsilon, added to the denominator."""
    warmup_samples: int = 128_000
    """Samples over which the learning rate rises linearly from zero (AF2: 128,000, which are 1000 steps of 128)."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: `constant`, lowered once after `drop_samples` (AF2), or `cosine`, down to `final_lr` at
    `total_samples`."""
    drop_samples: int = 6_400_000
    """Samples after which the constant learning rate is multiplied by `drop_factor` (AF2: 6.4 million)."""
    drop_factor: float = 0.95
    """Factor of the learning rate after `drop_samples`."""
    total_samples: int | None = None
    """Samples until the cosine ends; null takes the length of the run."""
    final_lr: float = 0.0
    """Learning rate at the end of the cosine."""
    clip: Literal["sample", "batch"] = "sample"
    """Norm that trainer.gradient_clip_val bounds. `sample`: the gradient of each sample (AF2); backward passes then hold one
    sample each, and a larger data.batch_size is accumulated. `batch`: the gradient of the whole batch of all devices."""

    def __post_init__(self) -> None:
        ranges = {
            "lr": POSITIVE,
            "warmup_samples": COUNT,
            "beta1": BELOW_ONE,
            "beta2": BELOW_ONE,
            "eps": COUNT,
            "final_lr": COUNT,
            "drop_samples": COUNT,
            "drop_factor": COUNT,
            "total_samples": COUNT,
        }
        check_numbers(self, ranges, "model.optimizer.")
        if self.clip not in ("sample", "batch"):
            raise SettingError("model.optimizer.clip", f"'{self.clip}'", "sample or batch")


_STACKS = ["extra_msa_stack", "evoformer"]


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters (LoRA): a weight W that is kept is used as W + B A, and B and A are trained. The model's other weights
    are kept too, except those that model.train_only names."""

    RESUME: ClassVar[str] = "refused"

    rank: int = 0
    """Rank of B A, such as 8. 0: no adapters, and the model's own weights are trained."""
    parts: list[str] = field(default_factory=_STACKS.copy)
    """Parts of the model whose matrices get adapters, in the form of model.freeze: [evoformer], or operators such as
    ['evoformer*.qkv', 'evoformer*.transition']. Matrices that model.freeze or model.train_only names get none."""

    def __post_init__(self) -> None:
        check_numbers(self, {"rank": COUNT}, "model.adapters.")
        if not self.rank and self.parts != _STACKS:
            raise UserError(
                f"model.adapters.parts is {self.parts}, but model.adapters.rank is 0: no adapters; give a rank, such as 8"
            )


WITHOUT_ADAPTERS = AdapterConfig()


@dataclass(frozen=True)
class TrainingConfig(ModelConfig):
    """The model's sizes, its losses and its optimizer."""

    loss: LossConfig = field(default_factory=LossConfig)
    """Weights of the loss terms."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Adam and its learning rate."""
    ema_decay: float | None = field(default=0.999, metadata={"resume": "applied"})
    """Decay of the exponential moving average of the weights, which validation and prediction use; null turns it off."""
    freeze: list[str] = field(default_factory=list, metadata={"resume": "refused"})
    """Parts of the model that keep the weights they begin with, by the names of its parameters: evoformer, extra_msa_stack,
    evoformer.blocks.0, or patterns such as evoformer.blocks.[0-3]. docs/training.md lists the parts."""
    train_only: list[str] = field(default_factory=list, metadata={"resume": "refused"})
    """Parts of the model that are trained, in the form of freeze: [structure_module] or [heads]. All others keep the weights
    that they begin with. An empty list trains all that freeze does not name; with adapters it trains these alone."""
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    """Low-rank adapters, which are trained in place of the weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"ema_decay": BELOW_ONE}, "model.")

    def model_config(self) -> ModelConfig:
        """Only the sizes, as stored in checkpoints. Raises UserError if a sub-layer's class cannot be imported."""
        return import_layers(ModelConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ModelConfig)}))


@dataclass(frozen=True)
class DistillationConfig:
    """A self-distillation set (supplement 1.3): predicted structures that are trained on too; null folders for none. For a
    multimer its keys are entries, as those of the other samples: a predicted chain is an entry of one chain."""

    RESUME: ClassVar[str] = "applied"

    alignment_dir: str | None = None
    """Folder of alignments, as data.alignment_dir."""
    structure_dir: str | None = None
    """Folder of predicted structures, as data.structure_dir, with the pLDDT (0 to 100) as B-factors."""
    store: str | None = None
    """Feature store of the set, which `evodsp data build --min_plddt` made; then the two folders are not used."""
    index: str | None = None
    """Index of both folders, as data.index."""
    chains: str | list[str] | None = None
    """Chains of the set: a list of names, or a text file with one name per line; null takes all chains with alignments. Chains
    without alignments or structure are left out."""
    chain_data_cache: str | None = None
    """Cache of the set, as data.chain_data_cache, for its filters and sampling weights."""
    filters: FilterConfig = field(default_factory=lambda: FILTERS_OF_PREDICTIONS)
    """Filters of the set's chains, as data.filters."""
    sampling: Sampling = "uniform"
    """Sampling of the set's chains, as data.sampling; alphafold2 needs its chain_data_cache or index."""
    fraction: float = 0.75
    """Share of the training samples that are from this set (AF2: 0.75)."""
    min_plddt: float = 50.0
    """Lowest pLDDT of residues whose atoms are not masked (AF2: 50)."""
    max_msa_rows: int = 1000
    """Largest number of rows of an MSA; of more, each sample draws so many anew (AF2: 1000)."""
    assumed_resolution: float | None = None
    """Resolution of the set's structures in Å, as data.assumed_resolution: predictions have none. null (AF2): the pLDDT, PAE
    and resolved losses do not count them."""

    def __post_init__(self) -> None:
        ranges = {"fraction": FRACTION, "min_plddt": Range(0, most=100), "max_msa_rows": SIZE}
        ranges |= {"assumed_resolution": POSITIVE}
        check_numbers(self, ranges, "data.distillation.")
        check_selection(self.filters, self.sampling, "data.distillation")
        if (self.alignment_dir is None) != (self.structure_dir is None):
            raise UserError(
                f"data.distillation.alignment_dir is {self.alignment_dir}, but data.distillation.structure_dir is "
                f"{self.structure_dir}; give both, or neither"
            )


@dataclass(frozen=True)
class DataConfig:
    """Training and validation chains, and how samples are made from them. Folders have OpenFold's layout (see docs/data.md)."""

    RESUME: ClassVar[str] = "applied"

    alignment_dir: str = "data/alignments"
    """Folder with a sub-folder of alignments, or one, per chain: `<pdbid>_<chain>`, or ColabFold's `<name>.a3m` (docs/data.md).
    OpenFold3's .npz files and OpenFold's databases are read, too."""
    structure_dir: str = "data/mmcif_files"
    """Folder of structures, `<pdbid>.cif` or `<pdbid>.pdb`, gzipped or not."""
    store: str | None = None
    """Feature store that `evodsp data build` made, for complexes with --complexes true: a folder, or an address such as
    s3://bucket/store. Chains and templates are then read from it; alignment_dir and structure_dir are not used. null reads the
    files."""
    index: str | None = None
    """Index of both folders, made by `evodsp data index`; for complexes with --complexes true. With it a run on hundreds of
    thousands of chains starts at once, and all processes of a machine share it. null lists the folders."""
    train_chains: str | list[str] | None = None
    """Chains to train on: a list of names, or a text file with one name per line; null takes all chains with alignments but the
    validation and test chains. Chains without alignments or structure are left out."""
    validation_chains: str | list[str] | None = None
    """Chains to validate on, in the same form; null for none."""
    test_chains: str | list[str] | None = field(default=None, metadata={"resume": "free"})
    """Chains that `evodsp test` scores, in the same form; null takes the validation chains."""
    chain_data_cache: str | None = None
    """OpenFold's chain_data_cache.json, with the facts for filters and sampling weights. null: the facts come from the index,
    and for filters without an index from the chains' files."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    """Filters of the training chains. They apply if one of them is not the default, if chain_data_cache is given, or if
    sampling is alphafold2."""
    exclude_like: str | list[str] | None = None
    """Chains or complexes of the same data, as a list or a text file, or a FASTA file. Training leaves out what
    resembles one of them. Usually the held-out ones. null excludes nothing."""
    exclude_identity: float = 0.4
    """Largest share of residues of the shorter sequence that may be identical with one of exclude_like."""
    sampling: Sampling = "uniform"
    """Sampling of the training chains. `uniform`: each epoch of as many samples as chains is a permutation. `alphafold2`: by
    their length and the size of their sequence cluster (supplement 1.2.5), which needs chain_data_cache or index."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """Predicted structures that are trained on too."""
    assumed_resolution: float | None = None
    """Resolution in Å for chains whose structure states none: NMR, predictions, often a file of your own. With one within the
    bounds of model.loss (0.1 to 3 Å) the pLDDT, PAE and resolved losses count these chains. null (AF2): they do not."""
    assembly: str | None = "1"
    """Complexes (model.arrangement multimer): the biological assembly that is read from a structure file; null reads the
    asymmetric unit."""
    pairing: Literal["species", "entry"] = "species"
    """Complexes: which rows of different chains' alignments stand beside each other. `species`: rows of uniprot_hits of one
    species, as in AlphaFold-Multimer. `entry`: rows of all alignments whose names are chains of one entry (1ao7_A, 1ao7_B)."""
    template_structure_dir: str | None = None
    """Folder of template structures, as structure_dir. Template hits are read from the .hhr files and
    from hmm_output.sto, hmmsearch_output.sto or pdb_hits.sto in the chains' alignment folders. null reads no templates."""
    max_template_date: str | None = None
    """Latest release date of a template, such as 2018-04-30. In any case, templates are at least 60 days older
    than their chain."""
    obsolete: str | None = None
    """The PDB's obsolete.dat, which names the entries that replace withdrawn templates; null takes those of the index."""
    template_chains: str | list[str] | None = None
    """Chains of structure_dir that serve as templates, in place of template_structure_dir: usually the training chains, in the
    form of train_chains. The best are found by alignment, without a search program and without regard to dates. An entry
    stands for all of its chains."""
    template_max_identity: float = 0.7
    """A chain that is itself in template_chains gets no template of its entry, and none with a larger share of identical
    residues. Set it to the highest identity of held-out chains with training chains, which `evodsp data doctor` says:
    otherwise the model learns to copy near copies, which held-out chains do not have."""
    train: FeatureConfig = field(default_factory=FeatureConfig)
    """Features of training samples."""
    validation: FeatureConfig = field(default_factory=lambda: FeatureConfig(crop_size=None, uniform_recycling=False))
    """Features of validation samples."""
    batch_size: int = field(default=1, metadata={"resume": "same"})
    """Samples of one batch on each device (or on each group of parallel.sequence devices)."""
    samples_per_epoch: int = field(default=1000, metadata={"resume": "refused"})
    """Samples of all devices between two validations; rounded up to whole optimizer steps."""
    num_workers: int = field(default=0, metadata={"resume": "free"})
    """Worker processes that read samples in advance; 0 reads them in the training process. Of a sequence group one rank
    reads."""
    prefetch: str = field(default="2GiB", metadata={"resume": "free"})
    """Samples that the workers of a rank prepare in advance, in bytes; at least one for each worker."""
    cache: str = field(default="2GiB", metadata={"resume": "free"})
    """Memory of a rank for parsed chains, so that chains that are drawn again are not read again. Its workers share it: each
    keeps the chains that it read, and drops those that it has not used for longest."""
    time_limit: float | None = None
    """Seconds after which a worker gives up a sample and its chain is left out; null for no limit. Needs num_workers."""
    skip_samples: list[int] | None = None
    """Training samples, by their number in bad_samples.jsonl, that do not count: their gradients are dropped (with
    model.optimizer.clip batch, that of their whole step). null for none."""
    max_quarantined: int = 100
    """Training chains that may fail before the run stops. A chain that cannot be read, exceeds time_limit or kills its worker
    is named in quarantine.jsonl and left out from then on; another one takes its place. 0: the first one stops the run."""

    def __post_init__(self) -> None:
        ranges = {
            "batch_size": SIZE,
            "samples_per_epoch": SIZE,
            "num_workers": COUNT,
            "assumed_resolution": POSITIVE,
            "template_max_identity": FRACTION,
            "exclude_identity": FRACTION,
            "time_limit": POSITIVE,
            "max_quarantined": COUNT,
        }
        check_numbers(self, ranges, "data.")
        check_selection(self.filters, self.sampling, "data")
        check_exclusion(self.exclude_like is not None, self.exclude_identity != DataConfig.exclude_identity, "data.")
        if self.pairing not in ("species", "entry"):
            raise SettingError("data.pairing", f"'{self.pairing}'", "species or entry")
        memory_size("data.prefetch", self.prefetch)
        memory_size("data.cache", self.cache)
        if any(sample < 0 for sample in self.skip_samples or ()):
            raise SettingError("data.skip_samples", self.skip_samples, "numbers of samples, which are at least 0")
        if self.time_limit is not None and self.num_workers == 0:
            raise SettingError("data.num_workers", 0, "at least 1 with data.time_limit: only a worker can be stopped")


def check_templates(model: ModelConfig, data: DataConfig) -> None:
    """Raise UserError if the model uses templates but its samples have none, or vice versa."""
    for name, features in (("train", data.train), ("validation", data.validation)):
        where = f"model.templates.enabled is {str(model.templates.enabled).lower()}, but data.{name}.max_templates is"
        if model.templates.enabled and features.max_templates == 0:
            raise UserError(f"{where} 0; set it (AlphaFold2: 4), or model.templates.enabled to false")
        if not model.templates.enabled and features.max_templates > 0:
            raise UserError(f"{where} {features.max_templates}; set it to 0, or model.templates.enabled to true")


_OF_COMPLEXES = (
    "data.assembly",
    "data.pairing",
    "data.train.spatial_crop_fraction",
    "data.validation.spatial_crop_fraction",
)


def check_samples(model: ModelConfig, data: DataConfig) -> None:
    """Raise UserError if a setting of complexes is given for a model of single chains: it would be ignored."""
    if model.arrangement == "multimer":
        return
    defaults = dict(leaves(DataConfig(), "data"))
    for name, value in leaves(data, "data"):
        if name in _OF_COMPLEXES and value != defaults[name]:
            raise UserError(
                f"{name} is {value}, but model.arrangement is {model.arrangement}, whose samples do not have it; leave {name} "
                "out, or choose another arrangement"
            )


@dataclass(frozen=True)
class RunConfig:
    """Output folder, intervals of checkpoints, seed and limits of a run."""

    seed: int = field(default=0, metadata={"resume": "refused"})
    """Seed of the initial weights, the samples and dropout. The same seed gives the same run."""
    global_batch: int | None = field(default=None, metadata={"resume": "same"})
    """Samples of all devices in one optimizer step (AF2: 128). As many batches are accumulated as this takes. null:
    trainer.accumulate_grad_batches says how many, and the samples of a step depend on the number of devices."""
    max_samples: int | None = field(default=10_000_000, metadata={"resume": "applied"})
    """Samples of all devices to train on (AF2: 10 million, then 1.5 million in fine-tuning), in whole optimizer steps.
    trainer.max_steps may end the run before. null for no limit."""
    matmul_precision: MatmulPrecision = field(default="highest", metadata={"resume": "applied"})
    """Products of float32 matrices on a GPU: `highest` (float32) or `high` (TF32: several times faster, 10 bits of each factor
    instead of 23). trainer.precision bf16-mixed leaves few such products."""
    compile: Literal["none", "blocks"] = field(default="none", metadata={"resume": "same"})
    """Compile the blocks of all stacks with torch.compile: `none` or `blocks`. Needs a C++ compiler on a CPU, Triton on a GPU.
    The first step takes minutes. Gathered biases are communicated again where activations are recomputed."""
    cuda_graphs: bool | Literal["auto"] = field(default="auto", metadata={"resume": "same"})
    """Record the stacks of blocks, with their collectives, as CUDA graphs in the second step, and replay them, so that the CPU
    launches none of their kernels. Needs GPUs, compile: none, no fsdp2, and a data.train.crop_size. auto: wherever that is so,
    and the run goes on without graphs if a stack cannot be recorded. true: what prevents it is an error. Either way the first
    replay is compared with launched kernels on every rank."""
    output: str = field(default="runs/evodsp", metadata={"resume": "free"})
    """Folder of the run's files: checkpoints/, curve.csv, tensorboard/ and config.yaml."""
    overwrite: bool = field(default=False, metadata={"resume": "free"})
    """Replace an earlier run in the output folder. false: a folder that holds checkpoints of one is refused."""
    ckpt_path: str | None = field(default=None, metadata={"resume": "free"})
    """Checkpoint to resume from or to score; `last` and `best` are the ones in the output folder. fit: `auto` resumes from
    `last` if it exists and otherwise starts a new run, so that one command line does both."""
    init_from: str | None = field(default=None, metadata={"resume": "refused"})
    """fit: begin with the weights of this file: a checkpoint of evodsp, a folder of `weights export --format safetensors` (or
    hf:organisation/name), DeepMind's .npz or OpenFold's .pt. Or with AlphaFold2's published parameters by name, such as
    model_1_ptm or model_1_multimer_v3; they are fetched if they are not there (`evodsp weights fetch`). The name, also that
    of a file `params_<name>.npz`, chooses model.preset and the number of templates. Optimizer, step and samples are new. A run
    that resumes (ckpt_path auto or last) does not read it again."""
    dry_run: bool = field(default=False, metadata={"resume": "free"})
    """fit: do all that comes before the first step, say which weights would be trained, how long and in how much memory, and
    end. Nothing is written."""
    early_stop: int | None = field(default=None, metadata={"resume": "free"})
    """End the run after this many validations in a row without a higher val/lddt_ca. null: it goes on to its last step."""
    raw: bool = field(default=False, metadata={"resume": "refused"})
    """Use the raw weights of a checkpoint instead of their moving average: those that validate and test score, and those of
    init_from."""
    checkpoint_every: int | None = field(default=500, metadata={"resume": "free"})
    """Steps between two writes of checkpoints/last.ckpt, which is also written after each validation; null for none."""
    checkpoint_every_samples: int | None = field(default=None, metadata={"resume": "free"})
    """The same in samples, in whole steps (rounded down, at least one). Both intervals count if both are given."""
    checkpoint_every_minutes: float | None = field(default=None, metadata={"resume": "free"})
    """Minutes without a write after which checkpoints/last.ckpt is written as well."""
    keep_last: int = field(default=2, metadata={"resume": "free"})
    """Newest checkpoints to keep: last.ckpt, last-1.ckpt, … If the newest is damaged, the run resumes from the one before."""
    keep_best: int = field(default=1, metadata={"resume": "free"})
    """Checkpoints with the highest validation lDDT-CA to keep: best.ckpt, best-1.ckpt, …"""
    async_checkpoints: bool = field(default=True, metadata={"resume": "free"})
    """Write checkpoints while training goes on. Costs rank 0's host one copy of weights, moving average and optimizer state (16
    bytes a parameter in all) while it writes. false: each step that saves waits for the disk."""
    stop_before_end: float | None = field(default=120.0, metadata={"resume": "free"})
    """Seconds before the end of its SLURM job (SLURM_JOB_END_TIME) at which a run saves and stops; null to ignore the end."""

    peak_tflops: float | None = field(default=None, metadata={"resume": "free"})
    """The most TFLOP/s that one device can compute in this run's precision, for `train/mfu_percent`; null takes that of GPUs
    that evodsp knows, and otherwise logs no utilisation."""
    max_bad_samples: int = field(default=10, metadata={"resume": "applied"})
    """Samples whose loss or gradient is not finite that may be left out before the run stops; bad_samples.jsonl names them.
    0: the first one stops the run."""
    replay_files: int = field(default=3, metadata={"resume": "free"})
    """The number of such samples that the run writes to files, with the weights, for `evodsp replay`."""

    def __post_init__(self) -> None:
        ranges = {"seed": SEED, "checkpoint_every": SIZE, "max_bad_samples": COUNT, "replay_files": COUNT}
        ranges |= {
            "keep_last": SIZE,
            "keep_best": SIZE,
            "early_stop": SIZE,
            "stop_before_end": COUNT,
            "global_batch": SIZE,
            "max_samples": SIZE,
        }
        ranges |= {"checkpoint_every_samples": SIZE, "checkpoint_every_minutes": POSITIVE, "peak_tflops": POSITIVE}
        check_numbers(self, ranges, "")
        check_matmul("matmul_precision", self.matmul_precision)

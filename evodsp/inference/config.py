"""Settings of `evodsp predict` and `evodsp estimate`. This module does not import torch, so that their help is quick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

from evodsp.config import (
    KernelsConfig,
    LayerPrecision,
    MatmulPrecision,
    check_matmul,
    check_preset,
    computes_in_half,
    parse_latest_date,
)
from evodsp.errors import COUNT, POSITIVE, SIZE, UserError, check_numbers, memory_size, nearest
from evodsp.model.kernels import check_names
from evodsp.model.schedule import CommunicationPlan
from evodsp.packaged import packaged_folder
from evodsp.parallel.config import SequenceConfig
from evodsp.search.config import ServerLimits, ServerPairing, check_server
from evodsp.weights.by_name import check_name, models_of

Pairing = Literal["species", "entry", "none"]
"""Rule that pairs rows of different chains' alignments."""

EXAMPLE = "s010_A"
"""The chain of data/ that --example predicts: a member of a family that the model of data/example_model has not seen. Its
record is called synthetic_protein, so that pages and files say that it is none of nature's."""

_OF_MEMORY = (
    "device", "precision", "working_memory", "msa_clusters", "extra_msa", "ensembles", "kernels", "plan", "parallel",
    "cuda_graphs",
)  # fmt: skip


def sources_of(inputs: Sequence[Path], fasta: Path | None) -> Sequence[Path]:
    """The inputs, of which a single one may be given as --fasta. Raises UserError if both are given."""
    if fasta is None:
        return inputs
    if inputs:
        raise UserError(f"--fasta {fasta} is given beside {inputs[0]}; give all inputs without --fasta")
    return (fasta,)


def _precision(given: LayerPrecision) -> Literal["fp32", "bf16"]:
    """The shorter name of a precision."""
    return "bf16" if computes_in_half(given) else "fp32"


@dataclass(frozen=True)
class PassSettings:
    """Precision, ensembling, early stopping, memory and ranks of the model's passes."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the model's layers."""
    matmul_precision: MatmulPrecision = "highest"
    """Precision of float32 matrix products on a GPU."""
    ensembles: int = 1
    """Number of feature sets whose representations are averaged in each pass."""
    stop_tolerance: float | None = None
    """Largest change of CA-CA distances (Å) at which recycling stops early; None: it never does."""
    working_memory: str = "auto"
    """Memory of each rank for what a layer computes beside the representations: the option of this name."""
    ranks: int = 1
    """Number of ranks that share a structure."""
    plan: CommunicationPlan = field(default_factory=CommunicationPlan)
    """Communication of the ranks."""
    cuda_graphs: bool = True
    """Whether passes may be recorded: the option of this name."""
    dropout: bool = False
    """Whether layers drop as in training: the option of this name."""

    @property
    def half(self) -> bool:
        """Whether layers compute in bf16."""
        return self.precision == "bf16"


@dataclass(frozen=True)
class SizeSettings:
    """The feature sizes that a user gives in place of the checkpoint's; None: the checkpoint's."""

    recycles: int | None = None
    msa_clusters: int | None = None
    extra_msa: int | None = None


@dataclass(frozen=True)
class TemplateSettings:
    """Source of the templates, and limits on them."""

    folder: Path | None
    """Folder of structures; None: no templates."""
    latest: date | None
    """Latest release date of a template; None: no limit."""
    obsolete: Path | None
    """The PDB's list of withdrawn entries."""
    chains: Path | None = None
    """List of the chains that serve as templates; None: those that search programs have found."""
    of_server: bool = False
    """Whether they are those that a server's searches have kept beside the alignments of each chain."""


SavedArray = Literal["single", "pair", "msa", "distogram", "structure_module"]


@dataclass(frozen=True)
class SaveSettings:
    """Arrays of the model to keep, and their form."""

    arrays: tuple[SavedArray, ...]
    format: Literal["npz", "safetensors"]
    dtype: Literal["float32", "float16", "bfloat16"]
    passes: Literal["last", "all"]


def save_settings(names: str | None, file_format: str, dtype: str, passes: str) -> SaveSettings | None:
    """The settings of --save. `names`: of arrays, with commas between them; None: none is kept. Raises UserError for an array
    that there is not, and for a choice that cannot be."""
    choices: dict[str, tuple[str, tuple[str, ...]]] = {
        "save_format": (file_format, ("npz", "safetensors")),
        "save_dtype": (dtype, ("float32", "float16", "bfloat16")),
        "save_passes": (passes, ("last", "all")),
    }
    for option, (given, known) in choices.items():
        if given not in known:
            raise UserError(f"--{option} is '{given}', but must be {', '.join(known[:-1])} or {known[-1]}")
    if names is None:
        if given_all := [option for option, (given, known) in choices.items() if given != known[0]]:
            raise UserError(f"--{given_all[0]} is given without --save; name the arrays, such as --save single,pair")
        return None
    arrays = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    if unknown := [name for name in arrays if name not in get_args(SavedArray)]:
        close = nearest(unknown[0], get_args(SavedArray))
        raise UserError(f"--save: no array '{unknown[0]}'.{close} There are {', '.join(get_args(SavedArray))}")
    if dtype == "bfloat16" and file_format == "npz":
        raise UserError("--save_dtype is bfloat16, which .npz files cannot hold; add --save_format safetensors")
    return SaveSettings(arrays, file_format, dtype, passes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class FileSettings:
    """The files of a prediction, and their folder. None of these settings changes a number."""

    output: Path
    format: Literal["cif", "pdb"]
    pae_in_cif: bool
    relax: Literal["none", "best", "all"]
    plots: bool
    save: SaveSettings | None
    """The arrays of the model that are kept; None: none."""
    overwrite: bool


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Records to predict, their model, and the folder of the results.

    Raises UserError if a value is out of range.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"alignment_dir": "alignments", "template_structure_dir": "templates"}
    )
    """Other names of options, those that other commands have for the same thing, each with its option."""
    inputs: Sequence[Path] = ()
    """FASTA files, A3M files (the first sequence is predicted, the file is its alignment), folders of either, CSV files with
    columns id and sequence, or - for standard input. Every record gets a folder in the output, named by the first word of its
    header, or by its A3M file. A sequence with ':' between chains is a complex, and so is ColabFold's A3M file of several
    chains; both need a multimer model."""
    complex: bool = False
    """The records of each FASTA or CSV file are the chains of one complex, which has the file's name."""
    example: bool = False
    """Predict a protein that comes with evodsp, from its alignment, by a small trained model that comes along unless another
    is given: `evodsp predict --example --output out`."""
    fasta: Path | None = None
    """A single input, for command lines of earlier versions."""
    alignments: Path | None = None
    """Folder of alignments (docs/data.md) with a sub-folder or a file per record, named as the record; the files of a single
    record may also lie directly in the folder. A record without alignments is predicted from its sequence alone. The chains of
    a complex have one each: `<record>_A`, or A in the folder of the record; identical chains need theirs once."""
    pairing: Pairing = "species"
    """Pairing of rows of different chains of a complex: those of one species in uniprot_hits, or as the server pairs them
    (species), those of one entry, 1abc of 1abc_A, in all alignments (entry), or none but the queries (none)."""
    msa_server: str | None = None
    """Address of a server with ColabFold's protocol, which searches alignments for records that have none, and pairs rows of
    the chains of a complex. Their sequences are sent there. The alignments are kept in `<output>/_alignments`. A name and a
    password may stand before the host (https://name:password@host); they are shown nowhere."""
    msa_server_limits: ServerLimits = field(default_factory=ServerLimits)
    """Limits of the time and of the bytes that the server may take."""
    msa_server_pairing: ServerPairing = "greedy"
    """How the server pairs rows of a complex's chains: rows of a species that at least two of the sequences have (greedy), or
    that all of them have (complete)."""
    msa_server_templates: bool = False
    """Use templates that the server finds, as ColabFold does: its best 20 chains of the PDB for each sequence, which evodsp
    aligns itself. Without --msa_server: those that `evodsp search` with this option has kept beside the alignments."""
    retry: bool = False
    """Ask the server again for records of which it found no related sequence. Without it they are asked for again after a day,
    unless they have been predicted."""
    checkpoint: Path | list[Path] | None = None
    """Checkpoint written by `evodsp fit`, a folder of `evodsp weights export --format safetensors`, a model of the Hugging Face
    hub (hf:organisation/name, or hf:organisation/name@revision), or another program's parameters: DeepMind's
    `params_model_<n>[_ptm].npz`, OpenFold's .pt or .ckpt, or the folder that DeepSpeed wrote for OpenFold. Several of them (the
    option once more for each, or a folder) predict in turn, and their predictions are ranked together."""
    weights: str | list[str] | None = None
    """AlphaFold2's published parameters by name, instead of or beside checkpoints: model_1 to model_5, model_1_ptm to
    model_5_ptm, for complexes model_1_multimer_v3 to model_5_multimer_v3; several as with --checkpoint, or all five of a kind
    as all_monomer, all_ptm or all_multimer_v3. They are read from weights_folder, and fetched first if they are not there
    (about 360 MiB each)."""
    weights_folder: Path | None = None
    """Folder of `params_<name>.npz`. null: $EVODSP_WEIGHTS, or evodsp/weights in the user's folder of caches (~/.cache)."""
    weights_url: str | None = None
    """Address that parameters are fetched from, of an archive (.tar) or a folder; null: DeepMind's archive."""
    weights_hours: float = 6.0
    """Stop a download of parameters after this many hours; the same command continues it."""
    output: Path
    """Folder for the results, created if it does not exist: `<output>/<name>/seed_<k>.cif` and the files beside it."""
    templates: Path | None = None
    """Folder of template structures, `<pdbid>.cif[.gz]`. The template hits are read from the .hhr files and from
    hmm_output.sto, hmmsearch_output.sto or pdb_hits.sto beside the alignments. null: no templates."""
    max_template_date: str | None = None
    """Latest release date of a template, such as 2020-05-14; null: no limit."""
    obsolete: Path | None = None
    """The PDB's obsolete.dat, which names the replacements of withdrawn entries among the template hits."""
    template_chains: Path | None = None
    """Text file of the chains in `templates` that serve as templates, one name a line, as data.template_chains of the training
    run; an entry stands for all of its chains. The best are found by alignment. null: template hits are read from search
    results."""
    seeds: int = 1
    """Number of predictions per record; each draws its own MSA clusters and masks."""
    first_seed: int = 0
    """The predictions are numbered (and seeded) first_seed, first_seed + 1, …"""
    recycles: int | None = None
    """Recycling iterations after the first pass; null: as in training."""
    stop_tolerance: float | None = None
    """Stop recycling when a pass changes CA-CA distances by at most this much (root mean square, Å); null: never stop early."""
    ensembles: int = 1
    """Feature sets drawn for each pass, whose representations are averaged. Time grows with their number."""
    dropout: bool = False
    """Dropout as in training, but in the structure module: each seed drops others, so that seeds differ more."""
    format: Literal["cif", "pdb"] = "cif"
    """File format of the structures. PDB holds at most 9,999 residues and 99,998 atoms."""
    pae_in_cif: bool = False
    """Write predicted aligned errors into ModelCIF files too, where ModelArchive looks for them: a line for each pair of
    residues, 14 MB for 600 residues. They are in `seed_<k>_pae.json` in any case."""
    relax: Literal["none", "best", "all"] = "none"
    """Relax predicted structures with OpenMM (pip install 'evodsp[relax]') as AlphaFold2 does, so that bonds and contacts are
    those of a real protein. best: only the one of each record that ranks first. The relaxed structure is written beside it."""
    plots: bool = False
    """Also write pictures as SVG files beside each report: pLDDT, contacts and aligned errors of every structure, and the
    coverage of the alignments."""
    save: str | None = None
    """Arrays of the model to keep beside each structure, with commas between their names: single, pair, msa (representations),
    distogram (logits), structure_module (single representation after it). The pair of 500 residues takes 128 MB; `evodsp
    estimate --save` says the sizes."""
    save_format: Literal["npz", "safetensors"] = "npz"
    """Format of the kept arrays."""
    save_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of the numbers in them; bfloat16 needs --save_format safetensors."""
    save_passes: Literal["last", "all"] = "last"
    """Keep the arrays of the last pass, or of all passes (recycling iterations), which are then their first axis."""
    preset: str | None = None
    """Model that DeepMind's or OpenFold's parameters belong to, such as model_1_ptm; null: read from the file's name."""
    layers: list[str] = field(default_factory=list)
    """Sub-layers of your own that the model has, as its checkpoint names them: [NAME=PACKAGE.MODULE:CLASS]. Only what you
    name is imported."""
    raw: bool = False
    """Use the raw weights of the checkpoint instead of their exponential moving average."""
    device: str = "auto"
    """Device of the model: cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    precision: LayerPrecision = "fp32"
    """Precision of the model's layers. bf16, or bf16-mixed: as in training with bf16-mixed; about half the memory, and
    faster on GPUs. fp32, or 32-true: float32."""
    matmul_precision: MatmulPrecision = "highest"
    """Products of float32 matrices on a GPU: highest (float32) or high (TF32: several times faster, 10 bits of each factor
    instead of 23)."""
    msa_clusters: int | None = None
    """Rows of the clustered MSA; null: as in training, which is best. More rows cost time and memory."""
    extra_msa: int | None = None
    """Rows of the extra MSA; null: as in training, which is best. More rows cost time and memory."""
    working_memory: str = "auto"
    """Memory of each rank for what a layer computes beside the representations, such as 512MB or 4GB: it computes a few rows at
    a time. auto: 1/32 of the GPU's memory, 256MiB on a CPU. all: layers compute whole, which takes several times as much."""
    try_anyway: bool = False
    """Run a record also where the estimate says that it does not fit into the memory."""
    overwrite: bool = False
    """Replace earlier results. By default a finished prediction with the same inputs and settings is kept."""
    parallel: SequenceConfig = field(default_factory=SequenceConfig)
    """Spread one structure over several ranks."""
    plan: CommunicationPlan = field(default_factory=CommunicationPlan)
    """Communication of the ranks."""
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    """Implementation of each operator of the model."""
    cuda_graphs: bool = True
    """On one GPU, record a whole pass of a record below 500 residues as a CUDA graph and replay it: in further passes, and for
    other records and seeds whose sizes, rounded up by less than a quarter, are the same. A pass that cannot be recorded is
    launched. false: every pass is launched."""

    def __post_init__(self) -> None:
        ranges = {
            "seeds": SIZE,
            "first_seed": COUNT,
            "recycles": COUNT,
            "stop_tolerance": COUNT,
            "ensembles": SIZE,
            "msa_clusters": SIZE,
            "weights_hours": POSITIVE,
            "extra_msa": SIZE,
        }
        check_numbers(self, ranges, "--")
        if self.example:
            self._take_example()
        check_server(self.msa_server, self.msa_server_pairing, self.msa_server_templates and self.alignments is None)
        if self.msa_server_templates and self.templates is not None:
            raise UserError(f"--msa_server_templates is given beside --templates {self.templates}; leave one out")
        if not self.sources:
            raise UserError(
                "nothing to predict: give FASTA or A3M files, folders of them, or '-' for standard input; --example predicts a "
                "protein that comes with evodsp"
            )
        if self.checkpoint is None and not self.weights:
            raise UserError(
                "no model is given; add --checkpoint FILE, or --weights model_1_ptm (AlphaFold2's parameters)"
            )
        _ = self.weights_names
        for name in ("max_template_date", "obsolete", "template_chains"):
            has_source = self.templates is not None or (name == "max_template_date" and self.msa_server_templates)
            if getattr(self, name) is not None and not has_source:
                raise UserError(f"--{name} is given without --templates; add the folder of template structures")
        for name in ("max_template_date", "obsolete"):
            if getattr(self, name) is not None and self.template_chains is not None:
                raise UserError(f"--{name} is given, but --template_chains names the templates; leave one of them out")
        _ = self.latest_template, self.saved
        check_preset(self.preset)
        check_names(self.kernels)
        check_matmul("--matmul_precision", self.matmul_precision)
        if self.working_memory not in ("auto", "all"):
            memory_size("--working_memory", self.working_memory)
        if self.precision not in get_args(LayerPrecision):
            raise UserError(f"--precision is '{self.precision}', but must be 'fp32' or 'bf16'")
        if self.pairing not in get_args(Pairing):
            raise UserError(f"--pairing is '{self.pairing}', but must be 'species', 'entry' or 'none'")
        if self.relax not in ("none", "best", "all"):
            raise UserError(f"--relax is '{self.relax}', but must be 'none', 'best' or 'all'")
        if self.format not in ("cif", "pdb"):
            raise UserError(f"--format is '{self.format}', but must be 'cif' or 'pdb'")
        if self.pae_in_cif and self.format != "cif":
            raise UserError("--pae_in_cif is given with --format pdb, which holds no aligned errors; give --format cif")
        if self.parallel.sequence > 1 and ":" in self.device:
            raise UserError(
                f"--device is '{self.device}', but --parallel.sequence {self.parallel.sequence} needs one device per rank; "
                "use cuda or cpu"
            )

    def _take_example(self) -> None:
        """Put the packaged protein, its alignment and the packaged model in the places of the options that name them."""
        if given := [one for one in (*self.inputs, self.fasta, self.alignments) if one is not None]:
            raise UserError(
                f"--example is given beside {given[0]}; it brings a protein with its alignment: leave one out"
            )
        data = packaged_folder("data")
        taken: dict[str, object] = {"inputs": (data / "example_model" / "synthetic_protein.fasta",)}
        taken["alignments"] = data / "alignments" / EXAMPLE
        if self.checkpoint is None and not self.weights:
            taken["checkpoint"] = data / "example_model"
        taken["example"] = False  # what it stands for is in the other options from here on
        for name, value in taken.items():
            object.__setattr__(self, name, value)

    @property
    def sources(self) -> Sequence[Path]:
        """The inputs to predict."""
        return sources_of(self.inputs, self.fasta)

    @property
    def passes(self) -> PassSettings:
        """Settings of the model's passes."""
        return PassSettings(
            _precision(self.precision),
            self.matmul_precision,
            self.ensembles,
            self.stop_tolerance,
            self.working_memory,
            self.parallel.sequence,
            self.plan,
            self.cuda_graphs,
            self.dropout,
        )

    @property
    def sizes(self) -> SizeSettings:
        """The feature sizes that the user gave."""
        return SizeSettings(self.recycles, self.msa_clusters, self.extra_msa)

    @property
    def template_settings(self) -> TemplateSettings:
        """Source of the templates."""
        return TemplateSettings(
            self.templates, self.latest_template, self.obsolete, self.template_chains, self.msa_server_templates
        )

    @property
    def saved(self) -> SaveSettings | None:
        """The arrays of the model that are kept."""
        return save_settings(self.save, self.save_format, self.save_dtype, self.save_passes)

    @property
    def files(self) -> FileSettings:
        """Files to write, and their folder."""
        return FileSettings(
            self.output, self.format, self.pae_in_cif, self.relax, self.plots, self.saved, self.overwrite
        )

    @property
    def memory_options(self) -> dict[str, str]:
        """The options that decide how much memory a record needs, and how much there is."""
        return {name: str(getattr(self, name)) for name in _OF_MEMORY}

    @property
    def seed_numbers(self) -> list[int]:
        """The seeds of the predictions."""
        return list(range(self.first_seed, self.first_seed + self.seeds))

    @property
    def weights_names(self) -> list[str]:
        """The models that `weights` names. Raises UserError for an unknown name."""
        return models_of([self.weights] if isinstance(self.weights, str) else self.weights) if self.weights else []

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints given."""
        return [self.checkpoint] if isinstance(self.checkpoint, Path) else list(self.checkpoint or ())

    @property
    def latest_template(self) -> date | None:
        """`max_template_date` as a date. Raises UserError if it is not a date."""
        return parse_latest_date("--max_template_date", self.max_template_date)


@dataclass(frozen=True)
class EstimateConfig:
    """A prediction that is not run, and its machine. Raises UserError if a value is out of range."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = MappingProxyType({"alignment_dir": "alignments"})
    """Other names of options, as `evodsp predict` has them."""
    inputs: Sequence[Path] = ()
    """Inputs of `evodsp predict`: FASTA, A3M or CSV files, folders of the first two, or - for standard input."""
    alignments: Path | None = None
    """Folder of the records' alignments, as in `evodsp predict`: each record is estimated with the rows of its own. null:
    records of A3M files are estimated with their own rows, all others with an alignment as deep as the model takes."""
    fasta: Path | None = None
    """A FASTA file, as in earlier versions. The same as giving it without an option."""
    residues: int | None = None
    """Length of a sequence, instead of inputs."""
    checkpoint: Path | None = None
    """Model: a checkpoint, or another program's parameters, as in `evodsp predict`."""
    weights: str | None = None
    """Model: AlphaFold2's published parameters by name, such as model_1_ptm. Their file is not needed."""
    preset: str | None = None
    """Model of this name, such as model_1_ptm; beside --checkpoint the one that the parameters belong to. null: model_1_ptm."""
    layers: list[str] = field(default_factory=list)
    """Sub-layers of your own that the model has, as its checkpoint names them: [NAME=PACKAGE.MODULE:CLASS]. Only what you
    name is imported."""
    device: str = "auto"
    """auto: the GPU of this machine, or its processor. cpu or cuda. Or a kind of GPU: a100, h100, h200, b200, or the path of
    your own file (see `evodsp plan`)."""
    precision: LayerPrecision = "fp32"
    """Precision of the model's layers, as in `evodsp predict`. So are the settings below."""
    matmul_precision: MatmulPrecision = "highest"
    """Products of float32 matrices on a GPU: highest or high."""
    recycles: int | None = None
    """Recycling iterations after the first pass; null: as in training."""
    ensembles: int = 1
    """Feature sets drawn for each pass."""
    msa_clusters: int | None = None
    """Rows of the clustered MSA; null: as in training."""
    extra_msa: int | None = None
    """Rows of the extra MSA; null: as in training."""
    working_memory: str = "auto"
    """Memory of each rank for what a layer computes beside the representations. auto: 1/32 of the GPU's memory, 256MiB on a
    CPU."""
    parallel: SequenceConfig = field(default_factory=SequenceConfig)
    """Ranks that share one structure."""
    gpus: int = 1
    """Number of devices. With several, 1, 2, 4, … of them for a structure are compared."""
    plan: CommunicationPlan = field(default_factory=CommunicationPlan)
    """Communication of the ranks."""
    cuda_graphs: bool = True
    """Record passes on a GPU, as in `evodsp predict`."""
    save: str | None = None
    """Arrays to keep, as in `evodsp predict`: the estimate says how large they are. So do the two settings below."""
    save_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of their numbers."""
    save_passes: Literal["last", "all"] = "last"
    """Passes whose arrays are kept: the last one, or all."""
    output: Path | None = None
    """JSON file for the numbers, or with --gpus a page (.html) with the JSON file beside it; null: they are only printed."""

    def __post_init__(self) -> None:
        sizes = ("residues", "ensembles", "msa_clusters", "extra_msa", "gpus")
        check_numbers(self, {**dict.fromkeys(sizes, SIZE), "recycles": COUNT}, "--")
        check_preset(self.preset)
        check_matmul("--matmul_precision", self.matmul_precision)
        if self.gpus > 1 < self.parallel.sequence:
            raise UserError(
                f"--gpus {self.gpus} compares numbers of ranks, but --parallel.sequence {self.parallel.sequence} names one; "
                "give one of them"
            )
        suffixes = (".json", ".html") if self.gpus > 1 else (".json",)
        if self.output is not None and self.output.suffix not in suffixes:
            raise UserError(
                f"--output is {self.output}, but its name must end in {' or '.join(suffixes)}"
                + "; a page draws what --gpus compares" * (self.output.suffix == ".html")
            )
        _ = self.saved
        if (self.residues is None) != bool(self.sources):
            given = "neither is given" if self.residues is None else "both are given"
            raise UserError(f"evodsp estimate takes INPUT... or --residues N, but {given}; give one of them")
        if self.weights is not None:
            check_name(self.weights)
            for name in ("checkpoint", "preset"):
                if (other := getattr(self, name)) is not None:
                    raise UserError(f"--weights {self.weights} and --{name} {other} are both given; give one model")
        if self.working_memory not in ("auto", "all"):
            memory_size("--working_memory", self.working_memory)

    @property
    def sources(self) -> Sequence[Path]:
        """The inputs."""
        return sources_of(self.inputs, self.fasta)

    @property
    def passes(self) -> PassSettings:
        """Settings of the model's passes."""
        return PassSettings(
            _precision(self.precision),
            self.matmul_precision,
            self.ensembles,
            working_memory=self.working_memory,
            ranks=self.parallel.sequence,
            plan=self.plan,
            cuda_graphs=self.cuda_graphs,
        )

    @property
    def saved(self) -> SaveSettings | None:
        """The arrays that would be kept."""
        return save_settings(
            self.save, "npz" if self.save is None else "safetensors", self.save_dtype, self.save_passes
        )

    @property
    def sizes(self) -> SizeSettings:
        """The feature sizes that the user gave."""
        return SizeSettings(self.recycles, self.msa_clusters, self.extra_msa)

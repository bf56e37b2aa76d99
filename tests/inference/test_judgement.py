"""Two models judged on the same chains: the statistics, the files, what is refused, and what is left out."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp import metrics
from evodsp.cli import main
from evodsp.config import ModelConfig, as_multimer
from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import Assembly, Chain
from evodsp.data.similarity.nearest import TrainingSet
from evodsp.data.sources.structures import StructureFolder
from evodsp.geometry.residues import CA, encode_sequence
from evodsp.inference.config import PredictConfig
from evodsp.inference.results import TIMINGS, Outcome, write_json, write_results
from evodsp.inference.score import judgement
from evodsp.inference.score.baseline import TrainingStructures
from evodsp.inference.score.config import ScoreConfig
from evodsp.inference.score.paired import Difference, families_of, students_quantile
from evodsp.inference.score.scores import compare
from evodsp.inference.structure_files import PredictedStructure
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import save_model
from tests.builders.parameters import noisy

from .conftest import TRAINED

DATA = Path(__file__).parents[2] / "data"
OWN, GENERAL = ("s005_A", "s010_A", "s015_A"), ("s001_A", "s006_A")


# ---- Statistics ----


def test_the_interval_is_students() -> None:
    """Catches a variance over n instead of n - 1, a standard error without the root of n, quantiles of the normal distribution
    or of one side alone, and degrees of freedom that are off by one."""
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 10: 2.2281, 30: 2.0423, 99: 1.9842}
    assert {freedom: round(students_quantile(freedom), 4) for freedom in table} == table
    pairs = [(0.5, 0.6), (0.4, 0.6), (0.3, 0.6), (0.7, 0.7)]  # differences 0.1, 0.2, 0.3, 0.0
    found = Difference.of(pairs, "abcd")
    assert (found.count, found.families, found.better) == (4, 4, 3)
    assert (found.first, found.second, found.mean) == pytest.approx((0.475, 0.625, 0.15))
    assert found.half == pytest.approx(3.182446 * math.sqrt(0.05 / 3) / 2, rel=1e-5)
    assert found.sign == 0
    assert found.interval == "-0.055 to +0.355"
    assert Difference.of([(b, a) for a, b in pairs[:3]], "abc").sign == 0
    assert Difference.of([(0.5, 0.6), (0.5, 0.61), (0.5, 0.62)], "abc").sign == 1
    assert Difference.of([(0.6, 0.5), (0.61, 0.5), (0.62, 0.5)], "abc").sign == -1


def test_chains_of_a_family_are_no_further_evidence() -> None:
    """Catches an interval that shrinks when a chain is listed five times, and one from two chains."""
    pairs = [(0.0, 0.1), (0.0, 0.2), (0.0, 0.3), (0.0, 0.0)]
    found = Difference.of(pairs, "aabc")  # deviations of families: 0, 0.15, -0.15
    assert found.half == pytest.approx(4.302653 * math.sqrt(3 / 2 * 0.045 / 16), rel=1e-5)
    alone, often = Difference.of(pairs, "abcd"), Difference.of(pairs * 5, "abcd" * 5)
    assert often.half == pytest.approx(alone.half)
    assert Difference.of(pairs[:2], "ab").half is None
    assert Difference.of(pairs * 5, "ab" * 10).half is None
    assert Difference.of(pairs[:1], "a").interval == "–"


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    """Catches an interval that promises more than it keeps, for the few chains of a laboratory, alone and in families."""
    rng, held = np.random.default_rng(0), [0, 0]
    for _ in range(2000):
        alone, shared = rng.normal(0.02, 0.1, 5), np.repeat(rng.normal(0.02, 0.1, 5), 3) + rng.normal(0, 0.02, 15)
        for n, (values, families) in enumerate(((alone, range(5)), (shared, np.repeat(range(5), 3)))):
            found = Difference.of([(0.0, float(value)) for value in values], [str(family) for family in families])
            held[n] += abs(found.mean - 0.02) <= found.half
    assert [share / 2000 for share in held] == pytest.approx([0.95, 0.95], abs=0.015)


def test_families_are_of_nearly_equal_sequences() -> None:
    """Catches near copies that count as two, other members of a fold that count as one, and an order of chains that matters."""
    letters = {key: read_chain(DATA / f"mmcif_files/{key[:4]}.cif", "A").sequence for key in ("s001_A", "s002_A")}
    first, other = letters.values()
    near = "".join("A" if n % 12 == 5 else letter for n, letter in enumerate(first))
    assert first != near
    part = first[:36] + other[20:32]  # three quarters
    found = families_of({"one": [first], "other": [other], "near": [near[4:]], "part": [part]})
    assert found == {"one": "one", "other": "other", "near": "one", "part": "part"}
    assert set(families_of({"pair": [first, other], "same": [other, near]}).values()) == {"pair"}


# ---- The command ----


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tiny models of single chains, and one of complexes."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    config = ModelConfig.preset("test")
    for seed, (name, of) in enumerate({"a": config, "b": config, "multimer": as_multimer(config)}.items()):
        torch.manual_seed(seed)
        made[name] = folder / f"{name}.ckpt"
        save_model(
            made[name], noisy(AlphaFold(replace(of, evoformer=replace(of.evoformer, blocks=1)))), features=TRAINED
        )
    return made


class Place:
    """A folder with both lists, and the command there."""

    def __init__(self, root: Path, models: Mapping[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.models, self.capsys = root, models, capsys
        self.output = root / "judged"
        self.write("own.txt", OWN)
        self.write("general.txt", GENERAL)

    def write(self, name: str, chains: tuple[str, ...]) -> None:
        (self.root / name).write_text("".join(f"{chain}\n" for chain in chains))

    def judge(self, *words: str, before: str = "a", after: str = "b") -> int:
        """The exit code. Options of `words` stand in the place of these."""
        options = {
            "--before": self.models[before],
            "--after": self.models[after],
            "--chains": self.root / "own.txt",
            "--general": self.root / "general.txt",
            "--alignments": DATA / "alignments",
            "--structures": DATA / "mmcif_files",
            "--train_chains": DATA / "train.txt",
            "--output": self.output,
            "--device": "cpu",
            **{name: "0" if name == "--recycles" else "4" for name in ("--recycles", "--msa_clusters", "--extra_msa")},
        }
        given = dict(zip(words[::2], words[1::2], strict=True))
        chosen = {name: str(value) for name, value in {**options, **given}.items() if value != ""}
        return main(["score", *(word for pair in chosen.items() for word in pair)])

    def refused(self, *words: str, **models: str) -> str:
        """The line of a refusal, which has left nothing behind."""
        before = sorted(self.root.rglob("*"))
        assert self.judge(*words, **models) == 2
        said = self.capsys.readouterr()
        assert said.err.startswith("evodsp: error: ")
        assert said.err.count("\n") == 1
        assert sorted(self.root.rglob("*")) == before
        return said.err

    def rows(self) -> dict[str, dict[str, str]]:
        with (self.output / "judgement.csv").open() as file:
            return {row["chain"]: row for row in csv.DictReader(file)}

    def said(self) -> list[str]:
        return self.capsys.readouterr().out.splitlines()

    def result(self) -> list[str]:
        """The lines after those of the predictions."""
        lines = self.said()
        return lines[lines.index("") + 1 :]


@pytest.fixture
def place(tmp_path: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, models, capsys)


def planted(noise: Mapping[str, float]) -> Callable[..., Outcome]:
    """In place of predictions: the true structures, with noise in Å by the name of the output folder, and pLDDT 80."""

    def predict(config: PredictConfig, say: object) -> Outcome:
        made = []
        for number, file in enumerate(sorted(Path(config.inputs[0]).iterdir())):
            chain = read_chain(DATA / "mmcif_files" / f"{file.stem[:4]}.cif", "A")
            off = np.random.default_rng(number).normal(size=chain.positions.shape) * noise[config.output.name]
            aatype = encode_sequence(chain.sequence).astype(np.int32)
            plddt = np.full(len(chain), 80.0, np.float32)
            structure = PredictedStructure(
                file.stem, aatype, (chain.positions + off).astype(np.float32), chain.mask, plddt
            )
            folder = config.output / file.stem
            folder.mkdir(parents=True)
            made.append(write_results(folder, {0: structure}, "cif", {}, file.stem))
            write_json(folder / TIMINGS, {})
        return Outcome(made, [])

    return predict


@pytest.mark.verify
def test_a_planted_worse_model_is_found_worse(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches before and after the wrong way round, a copy that is no baseline, general chains among one's own, and a page, a
    section or a line that disagree."""
    monkeypatch.setattr(judgement, "predict_records", planted({"before": 0.2, "after": 2.0}))
    place.write("general.txt", ("s001_A", "s006_A", "s011_A"))
    assert place.judge() == 0
    harm, copies, forgotten, *rest = place.result()
    assert harm.startswith("Fine-tuning has done harm: mean lDDT-CA 0.9")
    assert harm.endswith("better on 0 of 3 chains")
    assert copies.startswith(
        "The model is worse than copies of the nearest training structures: mean lDDT-CA 0.947 of copies"
    )
    assert forgotten.startswith("The model has forgotten: mean lDDT-CA 0.9")
    assert "general: training has 3 of 3 chains, too, such as s001_A; no chain is copied from itself" in rest
    page, section = ((place.output / f"judgement.{kind}").read_text() for kind in ("html", "md"))
    for line in (harm, copies, forgotten):
        assert f"{line}." in page
        assert f"- {line}.\n" in section
    assert page.count('class="dot s0"') == 3
    assert page.count('class="dot s1"') >= 3
    rows = place.rows()
    changes = [float(rows[name]["difference_lddt_ca"]) for name in OWN]
    mean, half = np.mean(changes), 4.302653 * np.std(changes, ddof=1) / math.sqrt(3)
    assert f"{mean:+.3f} (95 % confidence interval {mean - half:+.3f} to {mean + half:+.3f})" in harm
    assert [row["set"] for row in rows.values()] == ["chains"] * 3 + ["general"] * 3

    place.output = place.root / "the other way"
    monkeypatch.setattr(judgement, "predict_records", planted({"before": 2.0, "after": 0.2}))
    assert place.judge() == 0
    helped, copies, forgotten, *_ = place.result()
    assert helped.startswith("Fine-tuning has helped: mean lDDT-CA 0.")
    assert helped.endswith("better on 3 of 3 chains")
    assert forgotten.startswith("The model has forgotten nothing: ")


def test_a_sentence_counts_chains_and_families() -> None:
    """Catches 'better on 4 of 4 in 3 families chains'."""
    found = Difference.of([(0.5, 0.6 + 0.01 * number) for number in range(4)], ["a", "a", "b", "c"])
    row = judgement.Row("chains", "before", "lddt_ca", found)
    assert row.count == "4 in 3 families"
    assert row.sentence("chains").endswith(", better on 4 of 4 chains in 3 families")


def test_few_chains_give_no_interval(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a verdict on one chain or two, and a list of general chains that is needed."""
    monkeypatch.setattr(judgement, "predict_records", planted({"before": 0.2, "after": 2.0}))
    place.write("own.txt", OWN[:2])
    assert place.judge("--general", "", "--train_chains", "") == 0
    few, *rest = place.result()
    assert few.startswith("Too few chains (2) to tell whether fine-tuning helps: mean lDDT-CA 0.9")
    assert (
        f"Copies of training structures are not scored: {place.models['b']} lies in no run's folder; give"
        in "\n".join(rest)
    )
    assert "What the model has forgotten is not known; give chains of other proteins with --general." in rest
    assert place.rows()["s005_A"]["nearest"] == ""


def test_copies_are_those_of_the_models_own_run(tmp_path: Path) -> None:
    """Catches a checkpoint taken for one of a run that lies elsewhere or whose run has lost its config."""
    run = tmp_path / "run" / "checkpoints" / "last.ckpt"
    settings = ScoreConfig(structures=tmp_path, output=tmp_path, before=run, after=run, chains=tmp_path / "own.txt")
    for model in (tmp_path / "b.ckpt", run):
        found = judgement._training(settings, model)
        assert found == f"{model} lies in no run's folder; give --config or --train_chains"
    run.parent.mkdir(parents=True)
    (config := tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    assert str(config) in str(judgement._training(settings, run))


def test_the_numbers_are_those_of_the_predictions(place: Place) -> None:
    """Catches scores of the other model or of another chain, predictions that are made again, scores of another model's
    predictions that are there, and a card without the section."""
    place.write("own.txt", OWN[:1])
    place.write("general.txt", GENERAL[:1])
    assert place.judge() == 0
    lines = place.said()
    assert any(line.startswith("Too few chains (1) to tell whether the model has forgotten: ") for line in lines)
    rows = place.rows()
    assert list(rows) == [OWN[0], GENERAL[0]]
    for name, row in rows.items():
        for label in ("before", "after"):
            seed = place.output / label / name / "seed_0.cif"
            found = compare(seed, DATA / "mmcif_files" / f"{name[:4]}.cif", "A")
            for score in ("lddt_ca", "gdt_ts"):
                assert float(row[f"{label}_{score}"]) == pytest.approx(getattr(found, score), abs=1e-4)
            assert float(row[f"{label}_plddt"]) == pytest.approx(found.plddt, abs=0.01)
        assert float(row["better_than_copy_by"]) == pytest.approx(
            float(row["after_lddt_ca"]) - float(row["nearest_lddt_ca"]), abs=2e-4
        )
    written = (place.output / "judgement.csv").read_bytes()
    assert place.judge() == 0
    assert place.said().count("0 done, 2 kept, 0 failed") == 2
    assert (place.output / "judgement.csv").read_bytes() == written
    words = ["weights", "export", "--format", "safetensors", "--checkpoint", str(place.models["b"])]
    section = place.output / "judgement.md"
    assert main([*words, "--judgement", str(section), "--output", str(place.root / "model")]) == 0
    card = (place.root / "model" / "README.md").read_text()
    assert section.read_text().strip() in card
    assert str(place.root) not in card
    assert main([*words, "--judgement", str(place.root / "own.txt"), "--output", str(place.root / "other")]) == 2
    assert not (place.root / "other").exists()
    (place.output / "judgement.csv").unlink()
    assert "own.txt: does not begin with" in place.capsys.readouterr().err
    assert place.judge(before="b", after="a") == 2
    assert "holds results of another run (checkpoint: " in place.capsys.readouterr().err
    assert not (place.output / "judgement.csv").exists()


def test_a_record_that_fails_is_left_out_of_both(place: Place) -> None:
    """Catches a mean over other chains before than after, a failure that nobody hears of, and one that ends the command."""
    broken = place.root / "alignments"
    (broken / "s010_A").mkdir(parents=True)
    (broken / "s010_A" / "bfd_uniclust_hits.a3m").write_text(">query\nWWWW\n")
    (broken / "s005_A").symlink_to(DATA / "alignments" / "s005_A")
    place.write("own.txt", ("s005_A", "s010_A"))
    assert place.judge("--alignments", str(broken), "--general", "") == 1
    lines = place.said()
    assert any(re.match("s010_A is left out of both models: before: .*bfd_uniclust_hits", line) for line in lines)
    assert list(place.rows()) == ["s005_A"]
    assert not (place.output / "after" / "s010_A").exists()
    assert any(line.startswith("Too few chains (1) to tell whether fine-tuning helps") for line in lines)
    section = (place.output / "judgement.md").read_text()
    assert "s010_A is left out of both models" in section
    assert str(place.root) not in section


def mistakes() -> Iterator[tuple[tuple[str, ...], dict[str, str], str]]:
    """Options, models, and what the refusal says."""
    yield ("--chains", "{root}/typo.txt"), {}, "typo.txt:2: {data}/mmcif_files: no s999.cif"
    yield ("--general", "{root}/both.txt"), {}, "both.txt:1: 's010_A' is in {root}/own.txt:2, too; leave it out of one"
    yield ("--chains", "{root}/twice.txt"), {}, "twice.txt:2: 's005_A' is listed more than once"
    yield (), {"after": "multimer"}, "is a monomer model, but --after {models}/multimer.ckpt a multimer model"
    yield (), {"after": "a"}, "are the same model; give the one before its fine-tuning"
    yield ("--after", "{root}/none.ckpt"), {}, "--after {root}/none.ckpt: no such checkpoint or model folder"
    yield ("--predictions", "x"), {}, "--predictions is x, but --before and --after make the predictions"
    yield ("--after", ""), {}, "--after is not given; give it"
    yield ("--before", ""), {}, "--after is {models}/b.ckpt, but is for two models; give --before, or leave it out"
    yield (
        ("--train_chains", "{root}/typo.txt", "--structure_dir", "{root}"),
        {},
        "none of 2 training chains can be read",
    )
    yield ("--seeds", "0"), {}, "--seeds is 0, but must be at least 1"


@pytest.mark.parametrize(("words", "pair", "expected"), list(mistakes()))
def test_mistakes_are_refused_before_a_model_runs(
    place: Place, words: tuple[str, ...], pair: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an hour of predictions before a typo in a list is found, and half an output."""
    monkeypatch.setattr(judgement, "predict_records", None)
    place.write("typo.txt", ("s005_A", "s999_A"))
    place.write("both.txt", ("s010_A", "s001_A"))
    place.write("twice.txt", ("s005_A", "s005_A"))
    said = place.refused(*(word.format(root=place.root) for word in words), **pair)
    assert expected.format(root=place.root, data=DATA, models=place.models["a"].parent) in said


def test_a_copy_that_lacks_residues_has_the_gdt_ts_of_what_it_has() -> None:
    """Catches residues without a counterpart, which are far away, that spoil the superposition of the others."""
    folder = StructureFolder(DATA / "mmcif_files")
    whole = folder.chain("s001_A")
    moved = whole.positions + np.random.default_rng(0).normal(size=whole.positions.shape).astype(np.float32)
    part = slice(10, 40)
    short = Chain(
        pdb_id="x",
        chain_id="A",
        sequence=whole.sequence[part],
        residue_number=whole.residue_number[part],
        insertion_code=whole.insertion_code[part],
        is_missing=whole.is_missing[part],
        positions=moved[part],
        mask=whole.mask[part],
    )
    known = TrainingStructures(TrainingSet({"x_A": (short.sequence,)}), lambda key: Assembly.of_chain(key, short))
    copy = known.copies_for(["s001_A"], folder)["s001_A"]
    assert isinstance(copy, dict)
    ours, true = (torch.from_numpy(of[part, CA]).double() for of in (moved, whole.positions))
    of_part = float(metrics.gdt_ts(ours, true, torch.ones(30).double()))
    assert 0.3 < of_part < 0.95
    assert copy["nearest_gdt_ts"] == pytest.approx(30 / len(whole) * of_part, abs=0.02)

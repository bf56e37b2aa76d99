# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
RUNS   ?= runs

# DeepMind's JAX code, and DockQ, live in an environment of their own; only `make parity` makes it. DockQ is compiled.
PARITY       := .venv-parity
PARITY_READY := $(PARITY)/.ready
SEED         ?= 0
# A clone of OpenFold to compare with too: make parity OPENFOLD=DIR. Its requirements go into an environment of their own.
OPENFOLD       ?=
OPENFOLD_VENV  := .venv-openfold
OPENFOLD_READY := $(OPENFOLD_VENV)/.ready
OPENFOLD_SIDE   = $(if $(OPENFOLD),--openfold $(OPENFOLD_VENV)/bin/python)
COMPARE = $(if $(OPENFOLD),OPENFOLD_SOURCE=$(OPENFOLD)) $(BIN)/python -m scripts.parity.compare \
  --alphafold $(PARITY)/bin/python $(OPENFOLD_SIDE) --seed $(SEED)
# Readers and features beside OpenFold's: the folder of mmcif_files/ and alignments/ that both read.
DATA ?= data
COMPARE_DATA = OPENFOLD_SOURCE=$(OPENFOLD) $(BIN)/python -m scripts.parity.data --openfold $(OPENFOLD_VENV)/bin/python \
  --data $(DATA) --seed $(SEED)

# An environment like a GPU machine's, for a rehearsal without a GPU; only `make rehearse` makes it: 5 GB, for Linux on x86-64.
REHEARSAL        := .venv-rehearsal
REHEARSAL_READY  := $(REHEARSAL)/.ready
REHEARSAL_PYTHON ?= python3.12

# The documentation's packages, and the frameworks that only tests of compatibility use, are added to .venv when they are first
# needed, so that `make demo` does not fetch them. So is Triton, which tests of kernels use.
DOCS_READY   := $(VENV)/.ready-docs
COMPAT_READY := $(VENV)/.ready-compat
TRITON_READY := $(VENV)/.ready-triton

.PHONY: help venv demo test verify resolve parity parity-data bench rehearse docs docs-serve wheel dist lint format clean

help:
	@echo "make demo    train a small model on the bundled families, predict held-out members, show the result"
	@echo "make test    all tests (10 minutes on two idle cores; WORKERS=4 on more)"
	@echo "make verify  long sweeps (an hour and more); SHARE='--rotate WORD --budget-minutes 5' runs a part of them"
	@echo "make resolve whether constraints.txt and all extras can be installed from PyPI, on Linux and macOS, with each Python"
	@echo "make parity  compare live with DeepMind's JAX code, on random weights (SEED=0; OPENFOLD=DIR: with OpenFold too)"
	@echo "make parity-data OPENFOLD=DIR  readers and features beside OpenFold's alone (DATA=data: a folder of structures and alignments)"
	@echo "make bench   time and memory of the stacks against the formulas written out, and against DeepMind's JAX code and OpenFold"
	@echo "             where they are (40 minutes; wants an idle machine; ROUNDS=5 takes a quarter; OPENFOLD=DIR: a clone)"
	@echo "make rehearse  what a GPU machine will run, without a GPU but with its versions: GPU programs with --cpu, kernels compiled for an"
	@echo "             H100, tests of kernels, the quickstart (5 GB, Python 3.12; STEPS='graphs ahead' takes some of its steps)"
	@echo "make docs    build the documentation into site/ (make docs-serve shows it while you write)"
	@echo "make wheel   build dist/evodsp-<version>-py3-none-any.whl"
	@echo "make dist    build the wheel and the source distribution into dist/ and check both"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff fix and format the code"
	@echo "make clean   remove the environments, runs, and what was built"

venv: $(READY)

# A warning that setuptools gives with every editable installation is left out.
$(READY): pyproject.toml constraints.txt
	@echo "Making the environment in $(VENV): PyTorch and others, 1.4 GB with PyTorch for CPUs and 5 GB with PyPI's for Linux, minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

DEMO_STEPS ?= 500
demo: $(READY)
	@echo "1/4  Predicting a protein by the small trained model that comes with evodsp"
	$(BIN)/evodsp predict --example --output $(RUNS)/demo/example --overwrite
	@echo "The structure in 3D: open $(RUNS)/demo/example/index.html"
	@echo "2/4  Training it further on the proteins of data/train.txt, a third of them of a new family, each sample on two ranks"
	$(BIN)/evodsp fit --config configs/quickstart.yaml --init_from data/example_model --trainer.max_steps $(DEMO_STEPS) \
	  --model.optimizer.lr 2.0e-3 --model.loss.violation 0.3 --parallel.sequence 2 --output $(RUNS)/demo/model --overwrite
	@echo "3/4  Predicting them, and three members of their families that it has not seen"
	$(BIN)/evodsp predict data/fasta --alignments data/alignments \
	  --checkpoint $(RUNS)/demo/model/checkpoints/best.ckpt --output $(RUNS)/demo/predictions --overwrite
	@echo "4/4  Comparing the predictions with the true structures"
	$(BIN)/evodsp score --predictions $(RUNS)/demo/predictions --structures data/mmcif_files \
	  --train data/train.txt --held_out data/validation.txt --output $(RUNS)/demo
	@echo "The predictions, in 3D, with their confidence: open $(RUNS)/demo/predictions/index.html"

# Processes that share the tests. Each may start four ranks of its own, so more than the machine's cores is too many.
WORKERS ?= 2
test: $(READY) $(COMPAT_READY) $(TRITON_READY)
	$(BIN)/python -m pytest -m "not verify" -n $(WORKERS) --dist worksteal

verify: $(READY) $(DOCS_READY) $(COMPAT_READY) $(TRITON_READY)
	$(BIN)/python -m pytest -m verify $(SHARE)

# What pip would install elsewhere, by PyPI's own metadata: uv looks at no disk and at none of pip's settings, and downloads no
# package. openmm's wheels need a Linux of 2022 or newer (glibc 2.34), PyTorch's macOS 14.
PLATFORMS ?= x86_64-manylinux_2_34 aarch64-apple-darwin
PYTHONS   ?= 3.11.0 3.12 3.13
CONSTRAINTS ?= constraints.txt
resolve: $(READY)
	@for platform in $(PLATFORMS); do for version in $(PYTHONS); do \
	  echo "$(CONSTRAINTS) with all extras: $$platform, Python $$version"; \
	  env -u UV_FIND_LINKS -u UV_INDEX MACOSX_DEPLOYMENT_TARGET=14.0 $(BIN)/uv pip compile --no-config --quiet pyproject.toml --all-extras \
	    --constraint "$(CONSTRAINTS)" --python-platform $$platform --python-version $$version --output-file /dev/null || exit 1; \
	done; done

$(PARITY_READY): scripts/parity/constraints.txt
	$(PYTHON) -m venv --clear $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --upgrade pip
	$(PARITY)/bin/python -m pip install --quiet --constraint scripts/parity/constraints.txt alphafold-colabfold jaxlib DockQ
	@touch $(PARITY_READY)

# OpenFold's requirements that evodsp lacks; torch and the rest come from $(VENV).
$(OPENFOLD_READY): scripts/parity/openfold_requirements.txt | $(READY)
	$(PYTHON) -m venv --clear $(OPENFOLD_VENV)
	$(OPENFOLD_VENV)/bin/python -m pip install --quiet --no-deps --requirement scripts/parity/openfold_requirements.txt
	$(BIN)/python -c "import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])" > \
	  $$($(OPENFOLD_VENV)/bin/python -c "import site; print(site.getsitepackages()[0])")/evodsp.pth
	@touch $(OPENFOLD_READY)

parity: $(READY) $(PARITY_READY) $(if $(OPENFOLD),$(OPENFOLD_READY))
	$(COMPARE) --model model_1_ptm
	$(COMPARE) --model model_5_ptm --fused
	$(COMPARE) --model model_1_multimer_v2 --extra-msa 2
	$(COMPARE) --model model_1_multimer_v3 --extra-msa 2 --fused
	$(BIN)/python -m scripts.parity.pairing --alphafold $(PARITY)/bin/python --seed $(SEED)
	$(BIN)/python -m scripts.parity.complex_msas --alphafold $(PARITY)/bin/python --seed $(SEED)
	$(BIN)/python -m scripts.parity.confidence --alphafold $(PARITY)/bin/python --seed $(SEED)
	$(BIN)/python -m scripts.parity.chain_losses --alphafold $(PARITY)/bin/python --seed $(SEED)
	$(BIN)/python -m scripts.parity.dockq --dockq $(PARITY)/bin/python --seed $(SEED)
	$(if $(OPENFOLD),$(COMPARE_DATA))
	$(if $(OPENFOLD),OPENFOLD_SOURCE=$(OPENFOLD)) $(BIN)/python -m scripts.parity.fine_tuned --alphafold $(PARITY)/bin/python \
	  $(OPENFOLD_SIDE) --seed $(SEED)

parity-data: $(READY) $(OPENFOLD_READY)
	$(if $(OPENFOLD),,$(error name a clone of OpenFold: make parity-data OPENFOLD=DIR))
	$(COMPARE_DATA)

# DeepMind's JAX code takes part if `make parity` (or `make .venv-parity/.ready`) has installed it.
ROUNDS ?= 20
bench: $(READY) $(if $(OPENFOLD),$(OPENFOLD_READY))
	$(BIN)/python -m scripts.benchmarks.bench --alphafold $(PARITY)/bin/python --rounds $(ROUNDS) \
	  $(if $(OPENFOLD),--openfold $(OPENFOLD_VENV)/bin/python --openfold-source $(OPENFOLD)) \
	  --output scripts/benchmarks/results/bench.csv

# NumPy 2.4 and later cannot run Triton 3.6's interpreter, which only tests of kernels use.
$(REHEARSAL_READY): scripts/benchmarks/rehearsal_requirements.txt
	$(REHEARSAL_PYTHON) -m venv --clear $(REHEARSAL)
	$(REHEARSAL)/bin/python -m pip install --quiet --no-deps --requirement scripts/benchmarks/rehearsal_requirements.txt
	$(REHEARSAL)/bin/python -m pip install --quiet --no-deps --target $(REHEARSAL)/numpy numpy==2.3.5
	@touch $(REHEARSAL_READY)

STEPS ?=
rehearse: $(REHEARSAL_READY)
	scripts/benchmarks/rehearse.sh $(STEPS)

$(DOCS_READY): $(READY) pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $(DOCS_READY)

$(COMPAT_READY): $(READY) pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[compat,cluster,relax]'
	@touch $(COMPAT_READY)

$(TRITON_READY): $(READY) pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[triton]'
	@touch $(TRITON_READY)

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

docs-serve: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# build/ goes first: setuptools would pack the modules of an earlier version that it finds there.
wheel: $(READY)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

# uv builds the wheel from the source distribution, each with setuptools in an environment of its own.
dist: $(READY)
	rm -rf build dist
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/uvx twine check --strict dist/*.whl dist/*.tar.gz
	$(BIN)/uvx check-wheel-contents dist/*.whl

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(PARITY) $(OPENFOLD_VENV) $(REHEARSAL) $(RUNS) build dist site *.egg-info

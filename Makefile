# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
RUNS   ?= runs

.PHONY: help venv demo test verify lint format bundle clean

help:
	@echo "make demo    train a small model on the bundled families, predict held-out members, show the result"
	@echo "make test    all tests (under 15 minutes)"
	@echo "make verify  long sweeps (under 60 minutes)"
	@echo "make lint    ruff and mypy"
	@echo "make bundle  write the bundled families of data/ anew"

venv: $(READY)

# Exact pins: a looser one would pull several gigabytes of CUDA packages on a machine without a GPU.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/python scripts/demo.py --output $(RUNS)/demo

test: $(READY)
	$(BIN)/python -m pytest -m "not verify"

verify: $(READY)
	$(BIN)/python -m pytest -m verify

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(RUNS) build *.egg-info

# Everything runs in .venv, made on first use. torch comes first and exactly: an open range may pull gigabytes of CUDA.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0

export PYTHONUNBUFFERED := 1

.PHONY: demo test lint format conformance bench docs clean

demo: $(STAMP)
	$(BIN)/python examples/first.py
	$(BIN)/python examples/train_step.py

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

conformance: $(STAMP)
	$(BIN)/python -m tests.conformance --jobs 2 --dtypes all --json build/conformance.jsonl --resume

bench: $(STAMP)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks --plot

docs: $(STAMP)
	$(BIN)/python -m tests.conformance.table docs/ops.md
	$(BIN)/python -m tests.integrations.table docs/models.md

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

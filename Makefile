# Two commands for a newcomer: `make demo` and `make test`. Both make their own venv and can be run twice.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := .cache/SmolLM2-135M-Instruct

.PHONY: demo test model lint types docs bench clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned, so that the CPU wheel is taken where one is at hand.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "== installing rota into $(VENV) (torch first)"
	$(BIN)/pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,demo]"
	@touch $@

model: $(VENV)/.installed
	@$(BIN)/rota fetch-demo-model $(MODEL)

demo: model
	@$(BIN)/rota demo --model $(MODEL)

test: model
	PYTHONSAFEPATH=1 $(BIN)/python -m pytest

$(VENV)/.lint: pyproject.toml $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[lint]"
	@touch $@

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.lint
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	# Tests that only other lanes run: a name that is gone must not wait for those to be noticed.
	$(BIN)/pyright --pythonpath $(BIN)/python tests/rdma_vm tests/ui

docs: $(VENV)/.installed
	VENV=$(VENV) .ci/docs

bench: model
	$(BIN)/python bench/decode.py
	$(BIN)/python bench/swap.py

clean:
	rm -rf $(VENV) .cache build *.egg-info

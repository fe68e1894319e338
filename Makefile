# Two commands on a fresh machine: `make run` (three methods side by side on this CPU) and `make test`.
# Both create .venv from the pinned constraints.txt first; nothing needs to be active or installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: run test lint format clean

run: $(INSTALLED)
	$(BIN)/python run.py -m experiment=quickstart

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch alone first: a build of it that is already there (CPU or CUDA) then stays.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned packages into $(VENV) (once; a few minutes)"
	$(PIP) $(shell grep -E '^torch==' constraints.txt)
	$(PIP) -e ".[dev]"
	@touch $(INSTALLED)

clean:
	rm -rf $(VENV) build *.egg-info

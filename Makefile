# Each target brings its own set-up: on a machine with Python and make, any of them works first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: venv test check demo bench docs clean

venv: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

check: $(READY)
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

demo: $(READY)
	$(BIN)/python examples/demo.py

bench: $(READY)
	$(BIN)/tilewise bench page docs/performance.md --rounds 3

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $(VENV)/.docs

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis

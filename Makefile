# The two commands of the README, and what development needs. Everything is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow lint benchmarks clean

demo: $(STAMP)  ## the whole story: record, fit, train and drive a policy in a simulator
	$(BIN)/pi0-fast demo --overwrite $(DEMO_ARGS)

test: $(STAMP) lint  ## lint, types and tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-slow: $(STAMP)  ## also the long runs: kills, other Python versions, other libraries' environments
	PI0_FAST_INTEROP=4.57.6,5.5.4,newest,hub-0.36 $(BIN)/python -m pytest -m "slow or interop" $(PYTEST_ARGS)
	$(BIN)/python tests/python_versions.py

benchmarks: $(STAMP)
	for script in benchmarks/[a-z]*.py; do $(BIN)/python $$script || exit 1; done

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing everything into $(VENV), once: some 100 packages, which takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,policy,lora,openpi,metaworld]"
	touch $@

clean:
	rm -rf $(VENV) .venv-interop .venv-pythons build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_output tokens_and_success_output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make test` and `make demo` need only Python 3.10 or newer and make: the first
# run creates an environment in $(VENV), later runs reuse it.
PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2

TORCH   := 2.13.0
PIP     := $(VENV)/bin/python -m pip
READY   := $(VENV)/.ready
# The compiled packages stay outside of $(VENV), so that `make test` keeps testing
# the package without them.
SPARSE  := $(abspath $(VENV)-sparse)
WHEEL   := $(VENV)-wheel
# One thread for each test process: the tests are many and small.
PYTEST  := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest

.PHONY: help demo test test-sparse docs lint types format check-wheel dist clean

help:
	@echo 'make demo         a graph with wrong edges: GCN, IDGL, and a picture'
	@echo 'make test         lint, types and tests'
	@echo 'make test-sparse  all tests with torch-scatter and torch-sparse (compiled, slow)'
	@echo 'make docs         build the documentation into docs/_build/html, check links'
	@echo 'make lint         ruff check, ruff format --check, tables against results'
	@echo 'make types        mypy'
	@echo 'make format       apply what ruff can mend'
	@echo 'make check-wheel  build the wheel and use it in a clean environment'
	@echo 'make dist         build sdist and wheel, and check what an index would show'
	@echo 'make clean        remove environments, builds and caches'

$(VENV)/.torch-$(TORCH):
	$(PYTHON) -m venv $(VENV)
	$(PIP) install torch==$(TORCH)
	touch $@

$(READY): setup.cfg pyproject.toml $(VENV)/.torch-$(TORCH)
	$(PIP) install -e '.[test]'
	touch $@

demo: $(READY)
	$(VENV)/bin/python examples/demo.py

test: lint types
	$(PYTEST) -n $(WORKERS) -m 'not sparse'

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python benchmarks/report.py --check

types: $(READY)
	$(VENV)/bin/mypy

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(SPARSE)/.ready: $(VENV)/.torch-$(TORCH) | $(READY)
	$(PIP) install ninja setuptools wheel
	FORCE_ONLY_CPU=1 $(PIP) install --no-build-isolation --no-deps --upgrade \
	  --target $(SPARSE) torch-scatter torch-sparse
	touch $@

test-sparse: $(SPARSE)/.ready $(READY)
	PYTHONPATH=$(SPARSE) $(VENV)/bin/python -c 'import torch_scatter, torch_sparse'
	PYTHONPATH=$(SPARSE) $(PYTEST) -n $(WORKERS)

$(VENV)/.docs: setup.cfg $(READY)
	$(PIP) install -e '.[docs]'
	touch $@

docs: $(VENV)/.docs
	rm -rf docs/_build
	$(VENV)/bin/python -m sphinx -W --keep-going -n -q docs docs/_build/html
	$(VENV)/bin/python docs/check_links.py docs/_build/html

# The wheel must work with its three requirements only, and not lean on the sources.
check-wheel: dist
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install torch==$(TORCH)
	$(WHEEL)/bin/python -m pip install torch-geometric numpy
	$(WHEEL)/bin/python -m pip install --no-deps dist/*.whl
	$(WHEEL)/bin/python -m pip check
	$(WHEEL)/bin/python -I .ci/check_wheel.py

dist: $(READY)
	rm -rf build dist
	$(VENV)/bin/python -m build
	$(VENV)/bin/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) $(SPARSE) $(WHEEL) build dist demo docs/_build *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

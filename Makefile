# Everything a developer or CI runs. `make demo` and `make test` work on a fresh clone with Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow evidence-fedalt lint types unit format install install-dev clean

demo: install
	$(BIN)/personafl compare recipes/demo.toml

test: lint types unit

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/mypy

unit: install-dev
	$(BIN)/pytest -n 2

test-slow: install-dev
	$(BIN)/pytest -m slow

# The tables of docs/results.md on FedAlt and FedSim; long, CIFAR-10 wants a GPU. DATA has the data sets.
DATA ?= ../shared/data
evidence-fedalt: install
	$(BIN)/personafl compare recipes/fedalt-mnist.toml --dataset $(DATA)/mnist/mnist.npz
	$(BIN)/personafl compare recipes/fedalt-cifar10.toml --dataset $(DATA)/cifar10/cifar10_20k4k.npz
	$(BIN)/personafl compare recipes/fedalt-shakespeare.toml --dataset $(DATA)/shakespeare/shakespeare_roles.npz
	$(BIN)/personafl compare recipes/fedalt-speech.toml --dataset $(DATA)/fsdd/fsdd_logmel.npz

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: .venv/installed
install-dev: .venv/installed-dev

# torch is pinned in constraints.txt: an unpinned install may pull gigabytes of CUDA libraries.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build

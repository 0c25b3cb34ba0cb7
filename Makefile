# make demo    set up, then fixed-K GRPO against NGU on the CPU (about 2 minutes a seed; SEEDS="0 1 2" for more)
# make test    set up, then every test
# make check   set up, then lint, types, layers and every test
# make study-manufactoria   rewards per test and for all tests, NGU and fixed K; writes docs/results/manufactoria.md
# make study-chains   every strategy on the task chains, three seeds; writes docs/results/chains.md (about 20 minutes)
# make study-revival   a run that stopped learning, continued with NGU; writes docs/results/revival.md
# make chaos   runs that are killed and disturbed, and whether they lose anything (half an hour)

PYTHON ?= python3
SEEDS ?= 0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: demo test test-core check lint study-chains study-revival study-manufactoria chaos clean

demo: $(READY)
	$(BIN)/ngu demo --seeds $(SEEDS) --out runs/demo

test: $(READY)
	$(BIN)/python -m pytest

test-core: $(READY)
	$(BIN)/python -m pytest -m "not slow" tests/core

check: lint test

study-chains: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/study_chains.py

study-revival: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/study_revival.py

chaos: $(READY)
	$(BIN)/python benchmarks/chaos.py kills
	$(BIN)/python benchmarks/chaos.py trouble

study-manufactoria: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/study_manufactoria.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch is pinned in constraints.txt: a bare `torch` would bring gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "nevergiveup needs Python 3.11 or newer, not " + sys.version'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,reasoning-gym,verifiers,dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

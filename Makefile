# Every task has a name; `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The Ascend compiler's own environment: triton-ascend and the Triton that other packages bring exclude each other.
ASCEND := .venv-ascend
# One BLAS thread per test process: two workers on two cores, not four threads fighting for them.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadgroup

KERNELS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(ASCEND)/bin/python -m pytest -q -n auto --dist loadgroup \
	tests/kernels tests/ascend

.DEFAULT_GOAL := help
.PHONY: help setup test test-fast test-wheel ascend parity pictures notebooks lint fmt type bench check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install both packages with their tools, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("dsacp needs Python >= 3.11; %s is %d.%d. Try: make PYTHON=python3.11" % (sys.executable, *v))'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: setup ## everything that needs no device: laws, oracles, transformers, notebooks, doctests (minutes on 2 cores)
	$(PYTEST)

test-fast: setup ## the same in two minutes: few examples, one process, without what is slow
	$(PYTEST) --hypothesis-profile=fast -m 'not slow'

test-wheel: setup ## build the wheel and run the tests against it, away from the checkout
	tests/wheel.sh

$(ASCEND)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ASCEND)
	$(ASCEND)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[ascend]' pytest pytest-xdist hypothesis
	@touch $@

# Two runs: a process either interprets kernels or compiles them.
ascend: $(ASCEND)/.installed ## the Triton kernels: interpreted, compiled by the Ascend compiler, executed after its passes
	@command -v mlir-opt-19 > /dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq mlir-19-tools; } \
		|| { echo "make ascend executes lowered kernels with MLIR 19; as root: apt-get install mlir-19-tools"; exit 1; }
	$(ASCEND)/bin/python -c 'from dsacp_npu.ascend import toolchain; toolchain.check_toolchain()'
	$(KERNELS)
	TRITON_INTERPRET=1 $(KERNELS)

parity: setup ## the main job: ranks against one device, for the definition, both backends and over processes, as tables
	$(BIN)/python -m dsacp_npu parity --everything --short
	$(BIN)/python -m dsacp_npu parity --model v32 --short
	$(BIN)/python -m dsacp_npu parity --model v32 --processes --short

pictures: setup ## draw what README shows
	$(BIN)/python -m dsacp_npu explain --query-lens 12 6 --computed 4 0 --cp-size 4 --split zigzag --compress-ratio 4 --plot docs/pictures/partition.png > /dev/null

notebooks: setup ## execute all notebooks in place, outputs kept
	$(BIN)/python -m tests.docs.notebook_runs

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: setup ## format and fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: setup ## mypy, strict on dsacp_ref
	$(BIN)/mypy

bench: setup ## print the benchmark tables; writes nothing
	$(BIN)/python -m dsacp_npu bench

check: lint type test ## what CI runs

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) $(ASCEND) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

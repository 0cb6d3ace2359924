# `make demo` and `make test` are all a newcomer needs: each makes its own .venv.
#
# The .venv is a development install: Python comes from src/, the kernels are built into
# src/dynsparse/_native. Nothing is ever stale, and an existing .venv stays as it is otherwise.
#
#   PYTHON=python3.12 make test      another interpreter, when .venv is made
#   make test PYTEST="-k pattern"    other arguments for pytest
#   make fuzz FUZZ_SECONDS=60      another time for each reader, FUZZ=records for one of them
#   DYNSPARSE_NATIVE=0 make test     without the compiled kernels

MAKEFLAGS += --no-print-directory
PYTHON ?= python3
PYTEST ?= -n 2
FUZZ_SECONDS ?= 360
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
# An editable install remembers every file of the day it was made; a path sees those of today.
PLAIN_PATH = @echo "$(CURDIR)/src" >"$$($(BIN)/python -c \
	'import sysconfig; print(sysconfig.get_path("purelib"))')/_editable_skbc_dynsparse.pth"

.PHONY: help demo test test-all test-slow test-machines test-newest test-frameworks test-gpu-kernels docs test-docs test-wheels lint native sanitize bench fuzz soak faults rank-faults clean

help:
	@echo "make demo    train a network on digits, dense and sparse, write plots to demo-output/"
	@echo "make test    style, types and the quick tests (six minutes on two cores)"
	@echo "make test-all  everything else: all that follows called test-..."
	@echo "make test-slow  all algorithms, ranks, kills, compilers, sanitizers"
	@echo "make test-machines  what depends on the processor, with each instruction set and busy cores"
	@echo "make test-newest  the quick tests with the newest torch (may download gigabytes)"
	@echo "make test-frameworks  the tests of the callbacks and of others' models, with their libraries"
	@echo "make test-gpu-kernels  the Triton kernels without a GPU: interpreted, and compiled for every chip"
	@echo "make docs    build the site into build/site; a broken link or a public name without a place fails"
	@echo "make test-docs  execute the notebooks"
	@echo "make test-wheels  the wheel, and what pip makes of the source with every kind of compiler"
	@echo "make native  build the compiled kernels in place"
	@echo "make sanitize  drive the kernels under sanitizers (ten minutes; SANITIZE_SECONDS=3600 for longer)"
	@echo "make bench   time a training step beside the alternatives (two minutes)"
	@echo "make fuzz    mutate files for every reader, an hour in all (FUZZ_SECONDS for each)"
	@echo "make soak    10^5 steps with 10^3 updates: memory and open files stay flat, counts exact"
	@echo "make faults  kill, interrupt and break a thousand trainings (twenty minutes; FAULTS=100 for fewer)"
	@echo "make rank-faults  kill ranks of trainings 300 times; each must resume to the same bits (KILLS=30 for fewer)"
	@echo "make clean   remove what was built and made (not .venv)"

demo: $(VENV)/.installed-apps native
	@mkdir -p demo-output
	$(BIN)/dynsparse mnist --method dense --seed 0
	$(BIN)/dynsparse mnist --densities 0.1 0.3 --seed 0 \
		--records-path demo-output/records --overwrite --json demo-output/result.json
	$(BIN)/dynsparse visualise --records-path demo-output/records --output demo-output --animate
	@echo "The plots are in demo-output/: connectivity.png, connectivity.gif, curves.png"

# One thread per test process: threads that wait for cores others hold are slower than one alone.
test: $(VENV)/.installed-dev native lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST) -m "not slow" --hypothesis-profile quick

# Everything else.
test-all: test-slow test-machines test-frameworks docs test-docs test-wheels
ifeq ($(shell uname -sm),Linux x86_64)
test-all: test-gpu-kernels
endif

test-slow: $(VENV)/.installed-dev native
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST) -m "slow or hypothesis"

# What depends on the processor, as other machines would run it.
test-machines: $(VENV)/.installed-dev native
	$(BIN)/python tests/every_machine.py $(PYTEST) -q -m "not slow" --hypothesis-profile quick

# The quick tests with the newest torch that installs. No part of test-all: it may bring gigabytes.
test-newest:
	mkdir -p build
	sed '/^torch==/d;/^triton==/d' constraints.txt >build/newest.txt
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=build/newest.txt

test-frameworks: $(VENV)/.installed-frameworks native
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --no-skips $(PYTEST) tests/integrations \
		tests/bench/test_peers.py tests/bench/test_reinforcement.py tests/distributed/test_loops.py \
		tests/nn/test_pruned_models.py tests/nn/test_architectures.py tests/nn/test_experts.py \
		tests/nn/test_calibration.py tests/nn/test_common_checks.py tests/nn/test_adapters.py \
		tests/data/test_text_bpe.py \
		tests/training/test_optimizers_of_libraries.py tests/training/test_other_optimizers.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --no-skips tests/fuzz -k tokens
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --no-skips tests/api -k "onnx or keras"

test-gpu-kernels: $(VENV)/.installed-gpu-test native
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --no-skips $(PYTEST) tests/ops/cuda tests/bench/test_gpu_benchmark.py

# Strictly: a warning fails. Nothing is fetched, neither here nor by a reader's browser.
docs: $(VENV)/.installed-docs native
	OMP_NUM_THREADS=1 KERAS_BACKEND=torch NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test-docs: $(VENV)/.installed-docs native
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --no-skips tests/docs

test-wheels: $(VENV)/.installed-wheels
	$(BIN)/python tests/packaging/installs.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

native: $(VENV)/.installed-apps
	$(BIN)/cmake -S . -B build/dev -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/dev --parallel 2
	$(BIN)/cmake --install build/dev --prefix src

# Seconds of driving for each of the three ways (tests/sanitize/run.py); building comes on top.
SANITIZE_SECONDS ?= 120
sanitize: $(VENV)/.installed-apps native
	$(BIN)/python tests/sanitize/run.py --seconds $(SANITIZE_SECONDS)

bench: $(VENV)/.installed-apps native
	$(BIN)/dynsparse bench --benchmark quick

fuzz: $(VENV)/.installed-dev native
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) atheris || \
		echo "atheris is not to be had for this Python: seeded mutation takes its place"
	$(BIN)/python tests/fuzz/run.py $(FUZZ) --seconds $(FUZZ_SECONDS)

soak: $(VENV)/.installed-apps native
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/run.py

# The suite does the same at fewer moments.
FAULTS ?= 1000
faults: $(VENV)/.installed-dev native
	OMP_NUM_THREADS=1 INTERRUPTS=$(FAULTS) $(BIN)/python -m pytest tests/faults/test_interrupts.py
	@folder=$$(mktemp -d) && $(BIN)/python tests/faults/campaign.py $$folder $(FAULTS) && rm -r $$folder

KILLS ?= 300
rank-faults: $(VENV)/.installed-dev native
	OMP_NUM_THREADS=1 $(BIN)/python tests/distributed/kills.py --kills $(KILLS) --ranks 2 4 $(if $(LOG),--log $(LOG))

clean:
	rm -rf build dist demo-output src/dynsparse/_native .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "expected Python 3.10 or later, got $$($(PYTHON) --version 2>&1): make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Without kernels here, since `native` builds them in place: a second copy would only grow old.
$(VENV)/.installed-apps: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	DYNSPARSE_NATIVE=0 $(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[apps]' cmake
	$(PLAIN_PATH)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-apps
	DYNSPARSE_NATIVE=0 $(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[dev]'
	$(PLAIN_PATH)
	@touch $@

# What builds the site and executes the notebooks.
$(VENV)/.installed-docs: $(VENV)/.installed-dev
	DYNSPARSE_NATIVE=0 $(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[docs]'
	$(PLAIN_PATH)
	@touch $@

# The frameworks that the callbacks are for, and libraries of models: tests are skipped without them.
$(VENV)/.installed-frameworks: $(VENV)/.installed-dev
	DYNSPARSE_NATIVE=0 $(BIN)/python -m pip install -q -c $(CONSTRAINTS) \
		-e '.[bpe,huggingface,keras,lightning,models,onnx,optimizers,peers,serving,tuning]'
	$(PLAIN_PATH)
	@touch $@

# Triton, in step with torch: an interpreter and compilers, no driver and no GPU.
$(VENV)/.installed-gpu-test: $(VENV)/.installed-dev
	DYNSPARSE_NATIVE=0 $(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[gpu-test]'
	$(PLAIN_PATH)
	@touch $@

# What repairs a wheel, so that it runs on other Linuxes.
$(VENV)/.installed-wheels: $(VENV)/.installed-dev
	DYNSPARSE_NATIVE=0 $(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[wheels]'
	$(PLAIN_PATH)
	@touch $@

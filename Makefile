# `make demo` and `make test` do all the setup that they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find native -type f 2>/dev/null) $(wildcard llmaas_plugins/_native/*)

.PHONY: demo test test-slow quick test-train soak sanitized peer-tests compat results lint docs native-test releases canary tsan bench setup clean

demo: $(VENV)/.installed
	$(BIN)/llmaas demo

# The tests have many small engines and matrices: threads that wait must sleep instead of spinning, and OpenBLAS needs no threads.
QUIET := GGML_NO_BACKTRACE=1 OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1

# Run the tests, but for those that take more than a second of processor time each.
# PYTHONDONTWRITEBYTECODE is emptied: without bytecode on disk each worker and each child process would compile every module.
test: export PYTHONDONTWRITEBYTECODE =
test: setup $(VENV)/.clients native-test
	$(QUIET) $(BIN)/pytest -m "not slow" --ignore=tests/load --ignore=tests/train -n auto --dist worksteal --durations=10

# Run the others: memory budgets in processes of their own, kills, faults at every operation, mixed load, whole commands.
# tests/load runs last and alone, because its tests need the whole machine.
test-slow: export PYTHONDONTWRITEBYTECODE =
test-slow: setup $(VENV)/.clients
	$(QUIET) $(BIN)/pytest -m slow --ignore=tests/load --ignore=tests/train -n auto --dist worksteal --durations=10
	$(QUIET) $(BIN)/pytest tests/load

QUICK := tests/unit --ignore=tests/unit/eval tests/engine/test_pass_through.py tests/integration/test_requests.py \
	tests/integration/test_request_ends.py

# Run the unit tests that are not slow, and a few tests of whole models: a minute, for use while you work.
quick: export PYTHONDONTWRITEBYTECODE =
quick: setup $(VENV)/.clients
	$(QUIET) $(BIN)/pytest -m "not slow" -n auto --dist worksteal $(QUICK)

# Run the tests of code that needs torch, or the pretrained encoder. The first run installs both.
test-train: export PYTHONDONTWRITEBYTECODE =
test-train: setup $(VENV)/.train
	$(QUIET) $(BIN)/pytest tests/train -n auto --dist worksteal --durations=10

# Run the long forms of tests: thousands of kills, damaged stores, garbage collections, forks and fuzzed bodies, and half an
# hour of mixed load with faults. This takes two to three hours. You can stop it at any time: the next run continues with the
# tests that have not passed yet. SOAK=-k\ kills runs a part of it.
soak: export PYTHONDONTWRITEBYTECODE =
soak: setup $(VENV)/.clients
	mkdir -p build
	LLMAAS_SOAK=1 $(QUIET) $(BIN)/pytest -m soak --soak-log build/soak.jsonl -n 2 --dist worksteal --ignore=tests/load $(SOAK) || [ $$? = 5 ]
	LLMAAS_SOAK=1 $(QUIET) $(BIN)/pytest -m soak --soak-log build/soak.jsonl tests/load $(SOAK) || [ $$? = 5 ]
	$(MAKE) sanitized

# Run llama-cpp-python's own tests, from its sdist, without and with the plugins. Needs the network.
peer-tests: setup $(VENV)/.clients
	GGML_NO_BACKTRACE=1 $(BIN)/python -m llmaas_eval.peer_tests

# Write the tables of docs/reference/compatibility.md: a test that is marked with a table's cell fills that cell with its outcome.
compat: setup $(VENV)/.clients
	GGML_NO_BACKTRACE=1 $(BIN)/pytest -m compat --write-compat

# Write the tables of README.md and docs from eval/results/*.json.
results: setup
	$(BIN)/python -m llmaas_eval.results

# Run the C tests on the ggml of each supported release, and the whole suite on each older release. Needs the network. The
# first run compiles for ten minutes on two cores. RELEASE_TESTS=tests/engine runs a part of the suite.
releases: setup $(VENV)/.clients
	PATH="$(abspath $(BIN)):$$PATH" native/tests/releases.sh
	for version in $$($(BIN)/python -c 'from llmaas_patches.compat import TESTED_VERSIONS; print(*TESTED_VERSIONS[:-1])'); do \
	    PATH="$(abspath $(BIN)):$$PATH" tests/release.sh $$version $(RELEASE_TESTS) || exit 1; \
	done

# Report changes in llama.cpp's newest build that affect the engine. Only warns; needs the network.
canary: setup
	$(BIN)/python -m llmaas_eval.canary

native-test: setup
	PATH="$(abspath $(BIN)):$$PATH" native/tests/run.sh

# Run Python tests with both native libraries under ASan and UBSan. Tests that measure memory, preload a library or change what
# malloc returns are left out.
SANITIZED ?= tests/engine tests/property tests/integration/kv_chunks tests/integration/flash_weights/test_sparse.py \
	tests/integration/knn_lm tests/integration/elastic/test_plugin.py tests/integration/elastic/test_levels.py \
	tests/integration/test_requests.py tests/integration/test_request_ends.py tests/faults/test_life.py
MEASURED := --ignore=tests/engine/test_refusal.py --ignore=tests/integration/kv_chunks/test_memory.py -k "not memory and not are_streamed and not rows_of_embeddings"
sanitized: setup $(VENV)/.clients
	PATH="$(abspath $(BIN)):$$PATH" native/tests/python.sh -n 2 --dist worksteal $(SANITIZED) $(MEASURED)

# Run engines on many threads under ThreadSanitizer, with a ggml built for it. The first run downloads that ggml's source.
tsan: setup
	PATH="$(abspath $(BIN)):$$PATH" native/tests/tsan.sh

lint: setup $(VENV)/.clients
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --no-incremental
	$(BIN)/lint-imports
	$(BIN)/python -m llmaas_eval.house.voice
	$(BIN)/python -m llmaas_eval.house.sizes
	$(BIN)/python -m llmaas_eval.house.includes
	git ls-files -z | xargs -0 $(BIN)/codespell

# Build the documentation into build/site. Warnings are errors (--quiet would hide them from --strict), and nothing is fetched.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Run all benchmarks, or the file of BENCH=bench_codec.py, and write build/bench/benchmarks.json. LLMAAS_BENCH_QUICK=1 only checks that they work.
bench: setup
	mkdir -p build/bench
	GGML_NO_BACKTRACE=1 LLMAAS_BENCH_COMMAND="make bench$(if $(BENCH), BENCH=$(BENCH))" $(BIN)/pytest eval/bench/$(BENCH) -o python_files='bench_*.py' -o python_functions='bench_*' --benchmark-only --benchmark-json=build/bench/benchmarks.json

setup: $(VENV)/.installed $(VENV)/.eval

# This compiles llama-cpp-python for about three minutes on two cores; everything else takes seconds.
$(VENV)/.requirements: requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -r requirements-dev.txt
	touch $@

# Install the apps and clients that the tests run.
$(VENV)/.clients: requirements-clients.txt $(VENV)/.requirements
	$(BIN)/pip install --disable-pip-version-check -r requirements-dev.txt -r requirements-clients.txt
	touch $@

$(VENV)/.docs: requirements-docs.txt $(VENV)/.requirements
	$(BIN)/pip install --disable-pip-version-check -r requirements-dev.txt -r requirements-docs.txt
	touch $@

$(VENV)/.train: requirements-train.txt requirements-prompts.txt $(VENV)/.requirements
	$(BIN)/pip install --disable-pip-version-check -r requirements-dev.txt -r requirements-train.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps -r requirements-prompts.txt
	touch $@

$(VENV)/.installed: $(VENV)/.requirements pyproject.toml CMakeLists.txt $(NATIVE)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# llmaas_eval is a project of its own, so that no user installs it.
$(VENV)/.eval: $(VENV)/.requirements eval/pyproject.toml
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e ./eval
	touch $@

clean:
	rm -rf $(VENV) build dist .benchmarks

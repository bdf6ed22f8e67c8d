# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find native -type f 2>/dev/null) $(wildcard llmaas_plugins/_native/*)

.PHONY: demo test soak sanitized peer-tests compat lint native-test releases canary tsan bench setup clean

demo: setup
	$(BIN)/llmaas demo

# The engine's threads sleep while they wait: the tests' engines are many and small. What must have the machine for itself
# comes last. Bytecode is kept whatever your settings are: each worker and each process of a test would compile all again.
test: export PYTHONDONTWRITEBYTECODE =
test: setup $(VENV)/.clients native-test
	GGML_NO_BACKTRACE=1 OMP_WAIT_POLICY=passive $(BIN)/pytest --ignore=tests/load -n auto --dist worksteal --durations=10
	GGML_NO_BACKTRACE=1 OMP_WAIT_POLICY=passive $(BIN)/pytest tests/load

# The long forms: thousands of kills, damaged stores, collections, forks and fuzzed bodies, half an hour of mixed load with
# faults; up to four hours. Stop it at any time: it goes on with what has not passed yet. SOAK=-k\ kills runs a part of it.
soak: export PYTHONDONTWRITEBYTECODE =
soak: export GGML_NO_BACKTRACE = 1
soak: export OMP_WAIT_POLICY = passive
soak: setup $(VENV)/.clients
	mkdir -p build
	LLMAAS_SOAK=1 $(BIN)/pytest -m soak --soak-log build/soak.jsonl -n 2 --dist worksteal --ignore=tests/load $(SOAK) || [ $$? = 5 ]
	LLMAAS_SOAK=1 $(BIN)/pytest -m soak --soak-log build/soak.jsonl tests/load $(SOAK) || [ $$? = 5 ]
	$(MAKE) sanitized

# llama-cpp-python's own tests, from its sdist, without and with the plugins. Needs the network.
peer-tests: setup $(VENV)/.clients
	GGML_NO_BACKTRACE=1 $(BIN)/python -m llmaas_eval.peer_tests

# Writes the tables of docs/compatibility.md from the outcomes of the tests that are marked with their cells.
compat: setup $(VENV)/.clients
	GGML_NO_BACKTRACE=1 $(BIN)/pytest -m compat --write-compat

# The C tests on the ggml of each supported release, the whole suite on the older one. Needs the network; the first time
# ten minutes of compiling on two cores. RELEASE_TESTS=tests/engine runs a part of the suite.
releases: setup $(VENV)/.clients
	PATH="$(abspath $(BIN)):$$PATH" native/tests/releases.sh
	for version in $$($(BIN)/python -c 'from llmaas_patches.compat import TESTED_VERSIONS; print(*TESTED_VERSIONS[:-1])'); do \
	    PATH="$(abspath $(BIN)):$$PATH" tests/release.sh $$version $(RELEASE_TESTS) || exit 1; \
	done

# What the newest build of llama.cpp changes for the engine. Only warns; needs the network.
canary: setup
	$(BIN)/python -m llmaas_eval.canary

native-test: setup
	PATH="$(abspath $(BIN)):$$PATH" native/tests/run.sh

# Python tests with both native libraries under ASan and UBSan: those that neither measure memory nor preload a library.
SANITIZED ?= tests/engine tests/property tests/integration/test_kv_*.py tests/integration/test_flash_sparse.py \
	tests/integration/test_knn_*.py tests/integration/test_elastic_plugin.py tests/integration/test_requests.py \
	tests/faults/test_life.py
MEASURED := --ignore=tests/engine/test_refusal.py --ignore=tests/integration/test_kv_memory.py -k "not memory and not are_streamed"
sanitized: setup $(VENV)/.clients
	PATH="$(abspath $(BIN)):$$PATH" native/tests/python.sh -n 2 --dist worksteal $(SANITIZED) $(MEASURED)

# Engines on many threads under ThreadSanitizer, with a ggml built for it. Needs the network once, for that ggml's source.
tsan: setup
	PATH="$(abspath $(BIN)):$$PATH" native/tests/tsan.sh

lint: setup $(VENV)/.clients
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# All of them, or BENCH=bench_codec.py; LLMAAS_BENCH_QUICK=1 only shows that they work.
bench: setup
	GGML_NO_BACKTRACE=1 $(BIN)/pytest eval/bench/$(BENCH) -o python_files='bench_*.py' -o python_functions='bench_*' --benchmark-only

setup: $(VENV)/.installed

# llama-cpp-python is compiled here (about five minutes on two cores), everything else in seconds.
$(VENV)/.requirements: requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -r requirements-dev.txt
	touch $@

# The apps and clients that the tests drive.
$(VENV)/.clients: requirements-clients.txt $(VENV)/.requirements
	$(BIN)/pip install --disable-pip-version-check -r requirements-dev.txt -r requirements-clients.txt
	touch $@

$(VENV)/.installed: $(VENV)/.requirements pyproject.toml CMakeLists.txt $(NATIVE)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build dist .benchmarks

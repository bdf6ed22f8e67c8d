# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find native -type f 2>/dev/null) $(wildcard llmaas_plugins/_native/*)

.PHONY: demo test lint native-test bench setup clean

demo: setup
	$(BIN)/llmaas demo

test: setup native-test
	GGML_NO_BACKTRACE=1 $(BIN)/pytest --durations=10

native-test: setup
	PATH="$(abspath $(BIN)):$$PATH" native/tests/run.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	GGML_NO_BACKTRACE=1 $(BIN)/pytest eval/bench -o python_files='bench_*.py' -o python_functions='bench_*' --benchmark-only

setup: $(VENV)/.installed

# llama-cpp-python is compiled here (about five minutes on two cores), everything else in seconds.
$(VENV)/.requirements: requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -r requirements-dev.txt
	touch $@

$(VENV)/.installed: $(VENV)/.requirements pyproject.toml CMakeLists.txt $(NATIVE)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build dist .benchmarks

# The two commands are `make run` and `make test`; the others serve development.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= deployments/recipes/textcraft-tiny.yaml
STAMP := $(VENV)/.installed
# Three workers keep two processors busy, for tests of flows wait a lot; those of one file share what is costly.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder

# Prefect must not look for a server or a network in the embedded default.
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: run test test-vllm test-alfworld bench gpu-bench quick lint types contracts golden clean

run: $(STAMP)
	$(BIN)/agentr run $(RECIPE)

test: $(STAMP) lint types contracts
	$(BIN)/python -m pytest $(WORKERS)

# Installs vLLM for a CPU into an environment of its own (3.5 GB) and tests against a real server.
test-vllm: $(STAMP)
	$(BIN)/agentr models install --device cpu
	AGENTR_TEST_VLLM=1 $(BIN)/python -m pytest tests/vllm

# Builds ALFWorld's engine from source, which takes minutes, and plays real games on it.
test-alfworld: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[alfworld]'
	$(BIN)/python -m pytest tests/core/test_alfworld.py tests/golden/test_golden_alfworld.py tests/flows/test_alfworld_wheel.py

# Ratios and rates with their goals, as a table and in bench.jsonl; BENCH=--quick for seconds, "--clock cpu" on a busy machine.
bench: $(STAMP)
	$(BIN)/python tests/bench/bench.py $(BENCH)

# On a CUDA device: the tests that need one, then tokens a second and model FLOPs; BENCH="--size 1b".
gpu-bench: $(STAMP)
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python tests/bench/gpu.py $(BENCH)

quick: $(STAMP)
	$(BIN)/ruff check -q .
	$(BIN)/python -m pytest tests/core tests/properties -m "not slow" $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

golden: $(STAMP)
	$(BIN)/python -m pytest tests/golden --update-golden

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm runs

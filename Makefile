# `make demo` and `make test` from a fresh clone: they install what they need, system packages included, into .venv and
# onto the system, and then run. Files in .venv named after a step say that it was done; a second run skips it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH := torch==2.13.0
# Where pip finds torch; empty is PyPI, which for Linux has the CUDA build, gigabytes.
TORCH_INDEX ?=
INDEX_OPTION = $(TORCH_INDEX:%=--index-url %)
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
SGLANG_VENV := .venv-sglang
SYSTEM := $(shell uname -s)
EXTENSION_SOURCES := setup.py $(shell find csrc -type f) $(shell find shaders -name '*.h')
SIMULATOR_SOURCES := $(shell find mps_simulator/src -type f -not -name '*.pyc' -not -path '*.egg-info/*')
CXX_FILES = $(shell find csrc shaders check mps_simulator/src mps_simulator/tests evidence tests -name '*.cpp' -o -name '*.c' -o -name '*.h' -o -name '*.mm' -o -name '*.metal')

ifeq ($(SYSTEM),Darwin)
DEMO_DEVICE := mps
DEVICE := $(VENV)/.extension
TESTS := tests check/tests engines/tests evidence/tests
else
DEMO_DEVICE := simulated-mps
DEVICE := $(VENV)/.simulator
SIMULATOR := --editable ./mps_simulator
TESTS := tests check/tests engines/tests evidence/tests mps_simulator/tests
endif

.PHONY: help demo test test-vllm test-sglang quick proof sanitize docs lint format clean install

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s%s\n", $$1, $$2 }' Makefile
	@echo 'On Linux, TORCH_INDEX=https://download.pytorch.org/whl/cpu gets the CPU build of torch, not the CUDA build.'

demo: $(DEVICE)  ## generate with a Qwen3-Next on the Mac's GPU, or on a simulated one
	$(BIN)/python examples/generate.py --device $(DEMO_DEVICE)

# Tests that cross-compile the whole extension: four minutes of two cores, which `proof` needs anyway.
CROSS_BUILD_TESTS := evidence/tests/proof/test_mac_build.py evidence/tests/proof/test_mac_wheel.py evidence/tests/proof/test_torch_versions.py

test: lint $(DEVICE)  ## run the linters, and every test except the cross-build's, in two processes
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations=30 --durations-min=1 $(CROSS_BUILD_TESTS:%=--ignore=%) $(TESTS)

test-vllm: $(VLLM_VENV)/.packages $(DEVICE)  ## test vLLM's engine on the CPU and on mps, by a sample, in its own environment (3.5 GB)
	$(VLLM_VENV)/bin/python -m pytest -n 2 --confcutdir engines/tests/vllm engines/tests/vllm

test-sglang: $(SGLANG_VENV)/.packages $(DEVICE)  ## test SGLang's engine on mps, by a sample, in its own environment (1.9 GB)
	$(SGLANG_VENV)/bin/python -m pytest -n 2 --confcutdir engines/tests/sglang engines/tests/sglang

quick: install $(DEVICE)  ## test each op on both devices, errors, torch.compile and a model; three minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m quick

proof: install  ## examine the Mac build and the shaders without a Mac, and print one table
	@mkdir -p build
	$(BIN)/python -m evidence.proof --json build/proof.json
	$(BIN)/python -m pytest $(CROSS_BUILD_TESTS)
	TORCH_GDN_SWEEPS=all $(BIN)/python -m pytest -n 2 --dist loadgroup -m sweep $(TESTS)
	TORCH_GDN_SWEEPS=all $(MAKE) test-vllm test-sglang

# A copy of the checkout with its own build: g++ compiles host code and CPU kernels, clang the Metal half. Both use g++'s run
# time, which needs libstdc++ preloaded too. Leaks are Python's own; a kernel's fibres have stacks of their own.
SANITIZED := build/sanitized
RUN_TIMES = $(foreach name,asan ubsan stdc++,$(shell g++ -print-file-name=lib$(name).so))
SANITIZE_TESTS := tests/gdn tests/layers tests/aura tests/hostile

sanitize: install $(DEVICE)  ## test the ops under AddressSanitizer and UndefinedBehaviorSanitizer, on Linux
	mkdir -p $(SANITIZED)
	find $(SANITIZED) -mindepth 1 -maxdepth 1 -not -name build -exec rm -rf {} +
	git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --preserve=timestamps -t $(SANITIZED)
	cd $(SANITIZED) && TORCH_GDN_SANITIZE=1 $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace
	cd $(SANITIZED) && LD_PRELOAD='$(RUN_TIMES)' ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 \
	  MPS_SIMULATOR_FLAGS='-g1 -fsanitize=address,undefined -fno-sanitize=vptr,function -fno-sanitize-recover=all' \
	  $(CURDIR)/$(BIN)/python -m pytest -n 2 --dist loadgroup --capture=sys $(SANITIZE_TESTS)

docs: install  ## build the documentation into build/docs, with warnings as errors
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo 'build/docs/index.html'

PAGES := README.md check/README.md engines/README.md CODE_OF_CONDUCT.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs mps_simulator/README.md .github/ISSUE_TEMPLATE
SOURCES := bench check csrc engines evidence examples mps_simulator/src mps_simulator/tests setup.py shaders tests torch_gdn

lint: install  ## run ruff, mypy, clang-format, codespell for spelling and hard phrases, import-linter, and the budget of lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@echo '$(BIN)/clang-format --dry-run --Werror ...'
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/codespell
	$(BIN)/codespell --config .codespell/phrases.cfg $(PAGES) $(SOURCES)
	PYTHONPATH=.:check:engines $(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python .ci/sizes

format: install  ## format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:  ## remove what was built and installed here
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) {.,check,engines,mps_simulator}/{build,dist} {.,check,engines,mps_simulator/src}/*.egg-info torch_gdn/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

install: $(VENV)/.dev  ## make .venv with torch_gdn built in place, and what tests, linters and docs need

$(VENV)/.system:
	@PYTHON=$(PYTHON) ./.ci/system-packages
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.system
	@echo 'Installing $(TORCH) into $(VENV): some minutes'
	$(BIN)/python -m pip install $(INDEX_OPTION) '$(TORCH)'
	@touch $@

$(VENV)/.packages: $(VENV)/.torch pyproject.toml setup.py mps_simulator/pyproject.toml
	$(BIN)/python -m pip install --quiet 'setuptools>=77.0.3' wheel ninja
	@echo 'Building the extension: some minutes'
	$(BIN)/python setup.py --quiet build_ext --inplace  # shows its progress, unlike pip
	$(BIN)/python -m pip install --quiet --no-build-isolation $(SIMULATOR) --editable '.[examples]'
	@touch $@

# Beyond what the demo needs.
$(VENV)/.dev: $(VENV)/.extension pyproject.toml check/pyproject.toml engines/pyproject.toml
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]' --editable ./check --editable ./engines
	@touch $@

# An environment of an engine links to .venv's torch. It is not unpacked again, and the simulated device, which is built
# against it, is not built again. pip then only adds torch's dependencies. It compiles no modules ahead: the tests import
# few of them.
LINK_TORCH = ln -s $(abspath $(VENV))/lib/python*/site-packages/{torch,torchgen,functorch,torch-[0-9]*.dist-info}

# vLLM wants versions of its own, of transformers among others. Its tests take torch_gdn from the checkout, with .venv's
# extension, because Python and torch are the same; egg_info writes the metadata with the entry points. An editable
# installation would compile the extension again, with the paths of the other environment.
$(VLLM_VENV)/.packages: $(VENV)/.extension pyproject.toml engines/pyproject.toml mps_simulator/pyproject.toml
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	@echo 'Installing vLLM into $(VLLM_VENV): some minutes'
	$(LINK_TORCH) $(VLLM_VENV)/lib/python*/site-packages
	$(VLLM_VENV)/bin/python -m pip install --quiet $(INDEX_OPTION) '$(TORCH)'
	$(VLLM_VENV)/bin/python -m pip install --quiet 'setuptools>=77.0.3' wheel ninja
	$(VLLM_VENV)/bin/python setup.py --quiet egg_info --egg-base $(VLLM_VENV)/lib/python*/site-packages
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile --no-build-isolation $(SIMULATOR) --editable './engines[test-vllm]'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec  # PyPI's are for CUDA: torch cannot load them
	@touch $@

# SGLang too wants versions of its own.
$(SGLANG_VENV)/.packages: $(VENV)/.extension pyproject.toml engines/pyproject.toml mps_simulator/pyproject.toml engines/tests/sglang/requirements.txt
	$(PYTHON) -m venv --clear $(SGLANG_VENV)
	@echo 'Installing SGLang into $(SGLANG_VENV): some minutes'
	$(LINK_TORCH) $(SGLANG_VENV)/lib/python*/site-packages
	$(SGLANG_VENV)/bin/python -m pip install --quiet $(INDEX_OPTION) '$(TORCH)'
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile --no-deps --requirement engines/tests/sglang/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet 'setuptools>=77.0.3' wheel ninja
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation $(SIMULATOR)
	$(SGLANG_VENV)/bin/python setup.py --quiet egg_info --egg-base $(SGLANG_VENV)/lib/python*/site-packages
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable ./engines
	@touch $@

$(VENV)/.extension: $(VENV)/.packages $(EXTENSION_SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

$(VENV)/.simulator: $(VENV)/.extension $(SIMULATOR_SOURCES)
	@echo 'Building the simulated device: two to four minutes on two cores'
	$(BIN)/python -m mps_simulator -c pass
	@touch $@

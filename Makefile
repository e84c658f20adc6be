# make demo   the five reference models through cutfuse and through PyTorch, checked and timed
# make test   the tests
# Both make a virtual environment in .venv and install cutfuse there, in place: Python edits need no second install.
# Variables: PYTHON, VENV, TORCH, CUTFUSE_CUDA (AUTO, ON, OFF), PIP_FLAGS, DEMO_FLAGS, PYTEST_FLAGS.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo test lint stub format clean

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for python in python3 python python3.13 python3.12 python3.11 python3.10; do \
	if $$python -c '$(NEW_ENOUGH)' 2>/dev/null; then echo $$python; break; fi; done)
VENV ?= .venv
TORCH ?= torch==2.13.0
RUN := $(VENV)/bin/python
CLANG_FORMAT := $(RUN) -c 'import clang_format; clang_format.clang_format()'
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(RUN) -m pip install $(PIP_FLAGS)

GPU := $(shell if nvidia-smi -L >/dev/null 2>&1 || test -e /dev/nvidia0; then echo yes; fi)
ifeq ($(GPU),yes)
CUTFUSE_CUDA ?= AUTO
else
CUTFUSE_CUDA ?= OFF
endif

NATIVE := pyproject.toml CMakeLists.txt $(wildcard cmake/* build_backend/*.py csrc/*.cpp csrc/*/*)
INSTALLED := $(VENV)/.installed-cuda-$(CUTFUSE_CUDA)
CPP_FILES := $(wildcard $(foreach suffix,h cuh cpp cu,csrc/*.$(suffix) csrc/*/*.$(suffix)))

help:
	@sed -n '1,4s/^# //p' Makefile

demo: $(INSTALLED)
	$(RUN) -m cutfuse.demo $(DEMO_FLAGS)

test: $(INSTALLED)
	$(RUN) -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.lint
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(CPP_FILES)

stub: $(VENV)/.lint
	$(RUN) tests/native_stub.py
	$(RUN) -m ruff format --quiet cutfuse/_C.pyi

format: $(VENV)/.lint
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format
	$(CLANG_FORMAT) -i $(CPP_FILES)

clean:
	rm -rf build dist $(VENV)

# A torch that $(PYTHON) already has is used from there, by a .pth file: it is large, and it fits the machine.
$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 or later was found; name one: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { echo "$(PYTHON) is older than Python 3.10; name another: make PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu install \
	python3-venv"; exit 1; }
	$(PIP) --quiet "pip>=23.1"
	@site=$$($(PYTHON) -c 'import torch; from pathlib import Path; \
	assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8); \
	print(Path(torch.__file__).parents[1])' 2>/dev/null); \
	if test -n "$$site"; then \
		echo "Using the torch in $$site"; \
		echo "$$site" > $$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-the-machine.pth; \
	else \
		echo "Installing $(TORCH)"; \
		$(PIP) --quiet "$(TORCH)"; \
	fi
	@touch $@

$(INSTALLED): $(VENV)/.torch $(NATIVE)
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	{ echo "No C++ compiler was found; on Debian and Ubuntu install g++, or set CXX"; exit 1; }
ifeq ($(CUTFUSE_CUDA),OFF)
	@echo "$(if $(GPU),CUTFUSE_CUDA is OFF,No GPU is visible): installing without the CUDA kernels."
else
	@echo "Installing with CUTFUSE_CUDA=$(CUTFUSE_CUDA). Compiling the CUDA kernels can take half an hour on 2 cores."
endif
	$(PIP) $(if $(filter OFF,$(CUTFUSE_CUDA)),--quiet,--verbose) --editable ".[test]" \
		--config-settings=cmake.define.CUTFUSE_CUDA=$(CUTFUSE_CUDA) \
		--config-settings=cmake.define.CUTFUSE_NVCC_WHEELS=ON
	@rm -f $(VENV)/.installed-cuda-*
	@touch $@

$(VENV)/.lint: $(INSTALLED)
	$(PIP) --quiet "cutfuse[lint]"
	@touch $@

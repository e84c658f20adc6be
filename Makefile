# make demo   the five reference models through cutfuse and through PyTorch, checked, and timed on a GPU
# make test   the tests
# make docs   the documentation, into site/
# They make a virtual environment in .venv and install cutfuse there, in place: Python edits need no second install.
# Variables: PYTHON, VENV, TORCH, CUTFUSE_CUDA (AUTO, ON, OFF), PIP_FLAGS, DEMO_FLAGS, PYTEST_FLAGS.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo test docs lint format clean

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for python in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do \
	if $$python -c '$(NEW_ENOUGH)' 2>/dev/null; then echo $$python; break; fi; done)
VENV ?= .venv
TORCH ?= torch==2.13.0
RUN := $(VENV)/bin/python
# A process for each core, of half a gigabyte; PYTEST_FLAGS="-n 0" runs the tests in one.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal
CLANG_FORMAT := $(RUN) -c 'import clang_format; clang_format.clang_format()'
CLANG_TIDY := $(VENV)/bin/clang-tidy
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(RUN) -m pip install $(PIP_FLAGS)

GPU := $(shell if nvidia-smi -L >/dev/null 2>&1 || test -e /dev/nvidia0; then echo yes; fi)
ifeq ($(GPU),yes)
CUTFUSE_CUDA ?= AUTO
else
CUTFUSE_CUDA ?= OFF
endif

NATIVE := pyproject.toml CMakeLists.txt $(wildcard cmake/*.* build_backend/*.py csrc/*.cpp csrc/*/*)
INSTALLED := $(VENV)/.installed-cuda-$(CUTFUSE_CUDA)
CPP_FILES := $(wildcard $(foreach suffix,h cuh cpp cu def,csrc/*.$(suffix) csrc/*/*.$(suffix)))
# What a build without CUDA compiles; clang-tidy needs no more to know it, and takes a minute on 2 cores.
HOST_FILES := $(filter-out csrc/launch/cuda_kernels.cpp csrc/bindings_kernels.cpp, \
	$(wildcard csrc/*.cpp $(foreach folder,common epilogue plan specialize call launch,csrc/$(folder)/*.cpp) \
	csrc/*/*_plan.cpp))
CLANG_TIDY_JOBS ?= $(shell nproc 2>/dev/null || echo 2)

help:
	@sed -n '1,5s/^# //p' Makefile

demo: $(INSTALLED)
	$(RUN) -m cutfuse.demo $(DEMO_FLAGS)

test: $(INSTALLED)
	$(RUN) -m pytest $(PARALLEL) $(PYTEST_FLAGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "The documentation is in site/index.html"

lint: $(VENV)/.lint cutfuse/_C.pyi
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(CPP_FILES)
	@echo "clang-tidy: $(words $(sort $(HOST_FILES))) files, $(CLANG_TIDY_JOBS) at a time"
	@includes=$$($(RUN) -c 'import pybind11, sysconfig; \
	print("-isystem", pybind11.get_include(), "-isystem", sysconfig.get_path("include"))'); \
	printf '%s\n' $(sort $(HOST_FILES)) | xargs -P $(CLANG_TIDY_JOBS) -I {} \
	$(CLANG_TIDY) --quiet {} -- -std=c++17 -Icsrc $$includes

# The types of the native module, read from the one that is installed.
cutfuse/_C.pyi: $(VENV)/.lint
	$(RUN) -m pybind11_stubgen cutfuse._C --exit-code --output-dir .
	@touch $@

format: $(VENV)/.lint
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format
	$(CLANG_FORMAT) -i $(CPP_FILES)

clean:
	rm -rf build dist site $(VENV)

# A torch that $(PYTHON) already has is used from there, by a .pth file: it is large, and it fits the machine.
$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 or later was found; name one: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { echo "$(PYTHON) is older than Python 3.10; name another: make PYTHON=..."; exit 1; }
	@echo "Making a virtual environment in $(VENV) with $(PYTHON)"
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
		echo "Installing $(TORCH): minutes, as its build for CUDA takes several GB to download"; \
		$(PIP) "$(TORCH)"; \
	fi
	@touch $@

$(INSTALLED): $(VENV)/.torch $(NATIVE)
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	{ echo "No C++ compiler was found; on Debian and Ubuntu install g++, or set CXX"; exit 1; }
ifeq ($(CUTFUSE_CUDA),OFF)
	@echo "$(if $(GPU),CUTFUSE_CUDA is OFF,No GPU is visible): installing without the CUDA kernels."
	@echo "Compiling the module takes about 2 minutes on 2 cores; PIP_FLAGS=--verbose shows each file."
else
	@echo "Installing with CUTFUSE_CUDA=$(CUTFUSE_CUDA). Compiling the CUDA kernels takes about 10 minutes on 2 cores."
endif
	$(PIP) $(if $(filter OFF,$(CUTFUSE_CUDA)),,--verbose) --editable ".[test]" \
		--config-settings=cmake.define.CUTFUSE_CUDA=$(CUTFUSE_CUDA) \
		--config-settings=cmake.define.CUTFUSE_NVCC_WHEELS=ON
	@rm -f $(VENV)/.installed-cuda-*
	@touch $@

$(VENV)/.lint: $(INSTALLED)
	$(PIP) "cutfuse[lint]"
	@touch $@

$(VENV)/.docs: $(INSTALLED)
	$(PIP) "cutfuse[docs]"
	@touch $@

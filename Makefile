# Everything needs Python >= 3.10, a C++ compiler and a package index; compiler, engines and tools come from there.
#
#   make demo             build, install into .venv and run `etap demo`
#   make test             test-unit, then test-contract: what every change needs
#   make test-unit        without engines; the kernels run in an emulator
#   make test-contract    in the newest supported vLLM and SGLang: registration, selection, a layer
#   make test-engines     the contract tests that make test leaves out, in all supported versions
#   make test-exhaustive  all emulated cases and planted faults, for a change of kernels or emulator
#   make test-bench       the tests of bench/
#   make test-gpu         the tests marked gpu; fails where there is no Hopper GPU
#   make wheel            the wheel that is published, in dist/
#   make build            the library into etap_backend/lib, for work in the source tree
#   make lint             ruff and types
#
# Output of compilers and installers is in build/logs, its end on the screen where one fails.
# make test-gpu NO_INSTALL=1 PYTHON=python3 installs nothing: it uses that interpreter's torch, pytest and hypothesis,
# the source tree, and the library of an earlier `make build` (or the one that ETAP_LIBRARY names).

PYTHON ?= python3
# The torch that the newest tested vLLM pins: it is stored once for all tests. The package binds none.
TORCH ?= torch==2.14.0
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
LOGS := build/logs
GPU_TESTS = $(shell grep -rl "mark.gpu" tests bench --include "test_*.py")
SOURCES := pyproject.toml README.md LICENSE $(shell find csrc etap_backend configs -type f -not -path '*/lib/*' -not -name '*.pyc')

# Environments share their files with this cache by hard links; installations into one environment wait for each other.
# The index is the one that pip is told, by its files or the environment, which uv does not read.
export UV_CACHE_DIR ?= $(CURDIR)/build/cache
export UV_LOCK_TIMEOUT ?= 3600
INDEX := $(or $(UV_DEFAULT_INDEX),$(shell $(PYTHON) -m pip config list 2> /dev/null | \
  sed -n "s/^[a-z:]*\.index.url='\(.*\)'$$/\1/p" | head -n 1))
ifneq ($(INDEX),)
export UV_DEFAULT_INDEX := $(INDEX)
endif
install := $(BIN)/uv pip install --python $(BIN)/python

# $(call quietly,NAME,COMMANDS): what they print goes into NAME's log.
quietly = @mkdir -p $(LOGS); echo "... $(1)"; log="$(LOGS)/$(subst $() ,-,$(1)).log"; begin=$$(date +%s); \
  { $(2); } > "$$log" 2>&1 || { tail -n 50 "$$log"; echo "failed: $(1), see $$log"; exit 1; }; \
  echo "    $(1): $$(($$(date +%s) - begin)) s"
# $(call compile_ahead,NAMES): sources of tests/emulator.
compile_ahead = $(call quietly,kernels for the emulator,\
  PYTHONPATH=tests/emulator $(BIN)/python -c 'from kernels import compile_ahead; compile_ahead(*"$(1)".split())')
# $(call at_once,TARGETS): the network's work beside the compiler's.
at_once = @$(MAKE) --no-print-directory -j $(words $(1)) $(1)

.PHONY: build clean demo engines lint test test-bench test-contract test-engines test-exhaustive test-gpu test-unit wheel

wheel: dist/built

demo: $(STAMPS)/packaging
	@echo "Compiles the wheel for 3 minutes on two cores; meanwhile downloads torch and the compilers, 5 GB on disk."
	$(call at_once,dist/built $(STAMPS)/torch)
	@$(MAKE) --no-print-directory $(STAMPS)/product
	$(BIN)/etap demo

test: $(STAMPS)/packaging
	@echo "Compiles the wheel and meanwhile downloads torch, compilers, the newest vLLM and SGLang, 12 GB on disk; then runs"
	@echo "the unit tests and the engines' first contract tests: 11 minutes on two idle cores."
	$(call at_once,dist/built $(STAMPS)/tools $(STAMPS)/build engines)
	@$(MAKE) --no-print-directory test-unit
	@$(MAKE) --no-print-directory test-contract

# The emulator takes the kernels' PTX from the wheel's build, and that of what tests add to them is compiled: with the build
# requirements, which may not be missing.
test-unit: $(STAMPS)/installed
	$(call compile_ahead,products)
	@echo "... unit tests"
	$(pytest) -m "not gpu and not exhaustive" --durations 15 tests --ignore tests/vllm --ignore tests/sglang

test-contract: dist/built
	@echo "... contract tests, of the newest vLLM and SGLang at the same time"
	@$(BIN)/python tests/contract.py --wheel dist/*.whl

test-engines: $(STAMPS)/torch dist/built
	@echo "Downloads the older supported vLLM and SGLang, 6 GB on disk, and runs the contract tests that make test leaves out in"
	@echo "all four, two at a time: 7 minutes on two cores."
	@$(BIN)/python tests/contract.py --rest --wheel dist/*.whl

test-exhaustive: $(STAMPS)/installed
	$(call compile_ahead,marked marked_sparse)
	@echo "... emulated cases and planted faults, 9 minutes on two cores"
	$(pytest) -m "exhaustive and not gpu" tests --ignore tests/vllm --ignore tests/sglang
	@$(BIN)/python tests/emulator/verified.py --write

test-bench: $(STAMPS)/installed $(STAMPS)/bench
	$(pytest) -m "not gpu" bench/tests

pytest = ETAP_REQUIRE_NVCC=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal

engines: $(STAMPS)/torch
	$(call quietly,engines installed,$(BIN)/python tests/contract.py --install)

ifdef NO_INSTALL
test-gpu:
	PYTHONPATH=$(CURDIR):$(PYTHONPATH) ETAP_REQUIRE_GPU=1 $(PYTHON) -m pytest -m gpu $(GPU_TESTS)
else
test-gpu: $(STAMPS)/installed $(STAMPS)/bench
	ETAP_REQUIRE_GPU=1 $(BIN)/pytest -m gpu $(GPU_TESTS)
endif

lint: $(STAMPS)/lint $(STAMPS)/torch
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

build: $(STAMPS)/build
	$(BIN)/cmake -S csrc -B build/tree -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
	$(BIN)/cmake --build build/tree
	$(BIN)/cmake --install build/tree --prefix .

clean:
	rm -rf $(VENV) .contract build dist etap_backend/lib

$(STAMPS)/venv:
	$(call quietly,environment,$(PYTHON) -m venv $(VENV) || uv venv --seed --python $(PYTHON) $(VENV) && \
	  $(BIN)/python -m pip install --no-cache-dir uv)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/packaging: pyproject.toml $(STAMPS)/venv
	$(call quietly,tools of packaging,$(install) --group packaging)
	@touch $@

$(STAMPS)/lint: pyproject.toml $(STAMPS)/venv
	$(call quietly,tools of lint,$(install) --group lint)
	@touch $@

$(STAMPS)/torch: pyproject.toml $(STAMPS)/packaging
	$(call quietly,torch,$(install) --requirements pyproject.toml "$(TORCH)")
	@touch $@

$(STAMPS)/tools: pyproject.toml $(STAMPS)/torch
	$(call quietly,tools of tests,$(install) --requirements pyproject.toml --group test "$(TORCH)")
	@touch $@

$(STAMPS)/bench: bench/requirements.txt $(STAMPS)/torch
	$(call quietly,requirements of bench,$(install) -r bench/requirements.txt)
	@touch $@

# The build requirements, as the build backend itself names them.
$(STAMPS)/build: pyproject.toml $(STAMPS)/packaging
	$(call quietly,build requirements,$(BIN)/python -c "from build import ProjectBuilder as B; \
	  print(*B('.').build_system_requires, sep='\n')" > $(STAMPS)/build.txt && \
	  $(install) -r $(STAMPS)/build.txt cmake ninja)
	@touch $@

# auditwheel reads from the library which glibc it needs, names the wheel after that, and refuses any other dependency.
dist/built: $(SOURCES) | $(STAMPS)/packaging
	@rm -rf dist build/raw
	$(call quietly,wheel,PATH=$(CURDIR)/$(BIN):$$PATH; \
	  $(BIN)/python -m build --installer uv --wheel --outdir build/raw -C cmake.define.ETAP_KEEP_PTX=ON && \
	  $(BIN)/auditwheel repair --plat auto --wheel-dir dist build/raw/*.whl)
	@touch $@ && ls dist/*.whl

# The same version may be there already, of other sources.
$(STAMPS)/product: dist/built $(STAMPS)/torch
	$(call quietly,wheel installed,$(install) --no-deps --reinstall-package etap-backend dist/*.whl)
	@touch $@

$(STAMPS)/installed: $(STAMPS)/product $(STAMPS)/tools $(STAMPS)/build
	@touch $@

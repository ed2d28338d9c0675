# Everything needs Python >= 3.10, a C++ compiler and a package index; compiler, engines and tools come from there.
#
#   make demo           build, install into .venv and run `etap demo`
#   make test           all tests that need no GPU: test-unit, then test-contract
#   make test-unit      without engines; the kernels run in an emulator
#   make test-contract  beside each tested version of vLLM and SGLang
#   make test-gpu       the tests marked gpu; fails where there is no Hopper GPU
#   make wheel          the wheel that is published, in dist/
#   make build          the library into etap_backend/lib, for work in the source tree
#   make lint           ruff, and whether documents and results agree
#
# Output of compilers and installers is in build/logs, its end on the screen where one fails.
# make test-gpu NO_INSTALL=1 PYTHON=python3 installs nothing: it uses that interpreter's torch, pytest and hypothesis,
# the source tree, and the library of an earlier `make build` (or the one that ETAP_LIBRARY names).

PYTHON ?= python3
# One torch for all tests, so that they can be repeated; the package itself does not bind it.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
LOGS := build/logs
GPU_TESTS = $(shell grep -rl "mark.gpu" tests --include "test_*.py")
SOURCES := pyproject.toml README.md LICENSE $(shell find csrc etap_backend configs -type f -not -path '*/lib/*' -not -name '*.pyc')

# $(call quietly,NAME,COMMANDS): what they print goes into NAME's log.
quietly = @mkdir -p $(LOGS); echo "... $(1)"; log="$(LOGS)/$(subst $() ,-,$(1)).log"; \
  { $(2); } > "$$log" 2>&1 || { tail -n 50 "$$log"; echo "failed: $(1), see $$log"; exit 1; }

.PHONY: build clean demo lint test test-contract test-gpu test-unit wheel

wheel: dist/built

demo:
	@echo "Builds the wheel, installs it beside $(TORCH) into $(VENV) and runs etap demo. The first time that downloads 0.2 GB"
	@echo "of compilers and a torch of 0.7 (CPU) to 5.5 GB (CUDA) on disk, and compiles for 3 minutes on two cores."
	@$(MAKE) --no-print-directory $(STAMPS)/product
	$(BIN)/etap demo

# The engines come while the kernels are compiled and the unit tests run.
test: $(STAMPS)/venv
	@echo "Builds the wheel, then runs all tests that need no GPU: about 30 minutes on two cores, with the download of"
	@echo "what make demo needs and of four engines, 20 to 35 GB on disk in .contract and the installer's cache, 11 where less is free."
	@mkdir -p $(LOGS)
	@$(BIN)/python tests/contract.py --install > $(LOGS)/engines.log 2>&1 & engines=$$!; \
	  $(MAKE) --no-print-directory test-unit || { kill $$engines 2> /dev/null; exit 1; }; \
	  wait $$engines || { tail -n 50 $(LOGS)/engines.log; exit 1; }; \
	  $(MAKE) --no-print-directory test-contract

# Takes the kernels' PTX from the wheel's build, for their tests in an emulator, and compiles what tests add to them: with
# the build requirements, which may not be missing.
test-unit: $(STAMPS)/installed $(STAMPS)/build
	$(call quietly,kernels for the emulator,\
	  PYTHONPATH=tests/emulator $(BIN)/python -c "from kernels import compile_all; compile_all()")
	ETAP_REQUIRE_NVCC=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal -m "not gpu" \
	  --ignore tests/vllm --ignore tests/sglang

test-contract: dist/built
	@echo "... contract tests, two engines at a time"
	@$(BIN)/python tests/contract.py --wheel dist/*.whl

ifdef NO_INSTALL
test-gpu:
	PYTHONPATH=$(CURDIR):$(PYTHONPATH) ETAP_REQUIRE_GPU=1 $(PYTHON) -m pytest -m gpu $(GPU_TESTS)
else
test-gpu: $(STAMPS)/installed
	ETAP_REQUIRE_GPU=1 $(BIN)/pytest -m gpu $(GPU_TESTS)
endif

lint: $(STAMPS)/lint
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/python -m etap_backend.lab.tables --check

build: $(STAMPS)/build
	$(BIN)/cmake -S csrc -B build/tree -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
	$(BIN)/cmake --build build/tree
	$(BIN)/cmake --install build/tree --prefix .

clean:
	rm -rf $(VENV) .contract build dist etap_backend/lib

$(STAMPS)/venv:
	$(call quietly,environment,$(PYTHON) -m venv $(VENV) || uv venv --seed --python $(PYTHON) $(VENV) && \
	  $(BIN)/python -m pip install --upgrade "pip>=25.1")
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/packaging: pyproject.toml $(STAMPS)/venv
	$(call quietly,tools of packaging,$(BIN)/python -m pip install --group packaging)
	@touch $@

# The laboratory's requirements without the package, which would have to be compiled first.
$(STAMPS)/lint: pyproject.toml $(STAMPS)/venv
	$(call quietly,tools of lint,$(BIN)/python -m pip install --group lint && $(BIN)/python -c "import sys; \
	  toml = __import__('tomllib' if sys.version_info >= (3, 11) else 'tomli'); \
	  print(*toml.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['lab'], sep='\n')" \
	  > $(STAMPS)/lab.txt && $(BIN)/python -m pip install -r $(STAMPS)/lab.txt)
	@touch $@

# The build requirements, as the build backend itself names them.
$(STAMPS)/build: pyproject.toml $(STAMPS)/packaging
	$(call quietly,build requirements,$(BIN)/python -c "from build import ProjectBuilder as B; \
	  print(*B('.').build_system_requires, sep='\n')" > $(STAMPS)/build.txt && \
	  $(BIN)/python -m pip install -r $(STAMPS)/build.txt cmake ninja)
	@touch $@

# auditwheel reads from the library which glibc it needs, names the wheel after that, and refuses any other dependency.
dist/built: $(SOURCES) | $(STAMPS)/packaging
	@rm -rf dist build/raw
	$(call quietly,wheel,$(BIN)/python -m build --wheel --outdir build/raw -C cmake.define.ETAP_KEEP_PTX=ON && \
	  PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --plat auto --wheel-dir dist build/raw/*.whl)
	@touch $@ && ls dist/*.whl

# The wheel first alone: the same version may be there already, of other sources.
$(STAMPS)/product: dist/built
	$(call quietly,wheel and torch installed,\
	  $(BIN)/python -m pip install --force-reinstall --no-deps dist/*.whl && \
	  $(BIN)/python -m pip install dist/*.whl $(TORCH))
	@touch $@

$(STAMPS)/installed: pyproject.toml $(STAMPS)/product
	$(call quietly,tools of tests installed,\
	  $(BIN)/python -m pip install --group test "$$(ls dist/*.whl)[lab]" $(TORCH))
	@touch $@

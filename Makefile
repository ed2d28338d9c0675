# Everything needs Python >= 3.10, a C++ compiler and a package index; compiler, engines and tools come from there.
#
#   make demo       build, install into .venv and run `etap demo`
#   make test       all tests that need no GPU, the engines' contract tests among them
#   make test-gpu   the tests marked gpu; fails where there is no Hopper GPU
#   make wheel      the wheel that is published, in dist/
#   make build      the library into etap_backend/lib, for work in the source tree
#   make lint       ruff
#
# make test-gpu NO_INSTALL=1 PYTHON=python3 installs nothing: it uses that interpreter's torch, pytest and hypothesis,
# the source tree, and the library of an earlier `make build` (or the one that ETAP_LIBRARY names).

PYTHON ?= python3
# One torch for all tests, so that they can be repeated; the package itself does not bind it.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
GPU_TESTS = $(shell grep -l "mark.gpu" tests/test_*.py)
SOURCES := pyproject.toml README.md LICENSE $(shell find csrc etap_backend configs -type f -not -path '*/lib/*' -not -name '*.pyc')

.PHONY: build clean demo lint test test-contract test-gpu test-unit wheel

wheel: dist/built

demo: $(STAMPS)/installed
	$(BIN)/etap demo

test: test-unit test-contract

# Compiles the kernels to PTX, for their tests in an emulator: with the build requirements, which may not be missing.
test-unit: $(STAMPS)/installed $(STAMPS)/build
	ETAP_REQUIRE_NVCC=1 $(BIN)/pytest -m "not gpu" --ignore tests/vllm --ignore tests/sglang

test-contract: dist/built
	$(BIN)/python tests/contract.py --wheel dist/*.whl

ifdef NO_INSTALL
test-gpu:
	PYTHONPATH=$(CURDIR):$(PYTHONPATH) ETAP_REQUIRE_GPU=1 $(PYTHON) -m pytest -m gpu $(GPU_TESTS)
else
test-gpu: $(STAMPS)/installed
	ETAP_REQUIRE_GPU=1 $(BIN)/pytest -m gpu $(GPU_TESTS)
endif

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

build: $(STAMPS)/build
	$(BIN)/cmake -S csrc -B build/tree -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
	$(BIN)/cmake --build build/tree
	$(BIN)/cmake --install build/tree --prefix .

clean:
	rm -rf $(VENV) .contract build dist etap_backend/lib

$(STAMPS)/venv:
	$(PYTHON) -m venv $(VENV) || uv venv --seed --python $(PYTHON) $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/packaging: pyproject.toml $(STAMPS)/venv
	$(BIN)/python -m pip install --quiet --group packaging
	touch $@

$(STAMPS)/lint: pyproject.toml $(STAMPS)/venv
	$(BIN)/python -m pip install --quiet --group lint
	touch $@

# The build requirements, as the build backend itself names them.
$(STAMPS)/build: pyproject.toml $(STAMPS)/packaging
	$(BIN)/python -c "from build import ProjectBuilder as B; b = B('.'); print(*b.build_system_requires, sep='\n')" \
	  > $(STAMPS)/build.txt
	$(BIN)/python -m pip install --quiet -r $(STAMPS)/build.txt cmake ninja
	touch $@

# auditwheel reads from the library which glibc it needs, names the wheel after that, and refuses any other dependency.
dist/built: $(SOURCES) | $(STAMPS)/packaging
	rm -rf dist build/raw
	$(BIN)/python -m build --wheel --outdir build/raw
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --plat auto --wheel-dir dist build/raw/*.whl
	touch $@

$(STAMPS)/installed: pyproject.toml dist/built
	$(BIN)/python -m pip install --quiet --group test $(TORCH)
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps dist/*.whl
	$(BIN)/python -m pip install --quiet dist/*.whl $(TORCH)
	touch $@

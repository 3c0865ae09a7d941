# Every target sets up what it needs in .venv, once, and again when pyproject.toml or
# constraints.txt change. Requires Python 3.11 or newer and make.
# Another interpreter: make clean && make test PYTHON=/path/to/python3.12

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin

.PHONY: demo test test-all test-numerics test-kernels test-oldest lint bench bench-gpu \
  notebooks pictures docs clean
.NOTPARALLEL:

demo: $(VENV)/ready-demo
	@$(BIN)/regard demo

# A process for each core, of one thread each: the tests are many and small, and two threads that
# wait for each other on a busy machine are many times slower than one. A module's tests share what
# it makes for them, so they stay in one process.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n auto --maxprocesses 8 \
  --dist loadfile

test: $(VENV)/ready-test
	@$(PYTEST)

test-all: $(VENV)/ready-test-all
	@$(PYTEST) -m ""
	@$(INTERPRETED) -m triton

# The oldest versions that pyproject.toml admits, in an environment of their own.
test-oldest:
	@$(MAKE) --no-print-directory test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# Whatever is computed, as on a CPU without vector instructions.
test-numerics: $(VENV)/ready-test
	@ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST) \
	  tests/attention tests/model tests/decode tests/look tests/interop

# The Triton kernels on a CPU, in Triton's interpreter: every kernel, on small shapes.
INTERPRETED = TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(PYTEST) --dist worksteal

test-kernels: $(VENV)/ready-test-kernels
	@$(INTERPRETED) -m "triton and not slow" \
	  tests/attention tests/checks tests/decode tests/model tests/train

lint: $(VENV)/ready-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.checkers

bench: $(VENV)/ready-test
	@$(BIN)/python -m bench

# Every published GPU figure and the gpu tests, on a machine with a GPU, in ten minutes:
# make bench-gpu DATA=folder-of-multi30k OUT=folder
bench-gpu: $(VENV)/ready-test-kernels
	@$(BIN)/python -m bench.gpu $(if $(DATA),--data $(DATA)) $(if $(OUT),--out $(OUT))

# Runs the notebooks again, and writes them with their outputs.
notebooks: $(VENV)/ready-demo
	@$(BIN)/python -m regard.lab.kernel examples/*.ipynb

# Takes the pictures of docs/ again, with Chromium, and writes the demo's output into docs/start.md.
pictures: $(VENV)/ready-test
	@$(BIN)/python docs/pictures.py

# The documentation as a site that opens from disk: build/docs/index.html
docs: $(VENV)/ready-demo
	@$(BIN)/python docs/build.py build/docs

clean:
	rm -rf $(VENV) .venv-oldest build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

extras = all
$(VENV)/ready-demo: extras = demo,lab,serve,studio,text,train
$(VENV)/ready-test: groups = test peers
$(VENV)/ready-test-kernels: groups = test peers kernels
$(VENV)/ready-test-all: extras = all,ray
$(VENV)/ready-test-all: groups = test peers kernels fuzz
$(VENV)/ready-lint: groups = lint

modern = $(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11))' 2>&1 || true)
found = $(shell $(PYTHON) --version 2>&1 || true)

# The stamp takes the time at which the installation began and its name only when everything
# is in place: an interrupted installation, or a file changed meanwhile, is installed again.
# Dependency groups need pip 25.1, and a new environment has the pip of its Python.
$(VENV)/ready-%: pyproject.toml $(CONSTRAINTS)
	@$(if $(filter True,$(modern)),,$(error Regard needs Python 3.11 or newer, but $(PYTHON) \
	  gives "$(found)"; name another one: make $(MAKECMDGOALS) PYTHON=python3.12))
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@touch $@.begun
	@echo "Setting up $(VENV) for make $* ..."
	@$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) pip setuptools
	@$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) --no-build-isolation -e '.[$(extras)]' \
	  $(foreach group,$(groups),--group $(group))
	@mv $@.begun $@

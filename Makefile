# Every target sets up what it needs in .venv, once, and again when pyproject.toml or
# constraints.txt change. All that is wanted beforehand is Python 3.11 or newer and make.
# Another interpreter: make clean && make test PYTHON=/path/to/python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all lint bench clean
.NOTPARALLEL:

demo: $(VENV)/ready-demo
	@$(BIN)/regard demo

# One thread: the tests are many and small, and two threads that wait for each other on a busy
# machine are many times slower than one.
test: $(VENV)/ready-test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-all: $(VENV)/ready-test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ""

lint: $(VENV)/ready-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/ready-test
	@$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/ready-demo: extras =
$(VENV)/ready-test: extras = [test,peers]
$(VENV)/ready-lint: extras = [lint]

modern = $(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11))' 2>&1 || true)
found = $(shell $(PYTHON) --version 2>&1 || true)

# The stamp takes the time at which the installation began and its name only when everything
# is in place: an interrupted installation, or a file changed meanwhile, is installed again.
$(VENV)/ready-%: pyproject.toml constraints.txt
	@$(if $(filter True,$(modern)),,$(error Regard needs Python 3.11 or newer, but $(PYTHON) \
	  gives "$(found)"; name another one: make $(MAKECMDGOALS) PYTHON=python3.12))
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@touch $@.begun
	@echo "Setting up $(VENV) for make $* ..."
	@$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.$(extras)'
	@mv $@.begun $@

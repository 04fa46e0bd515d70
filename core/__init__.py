"""Furniture of a training script. Scripts import these modules; none of them imports a script.

args          command lines from dataclasses, and the sections that scripts share
ranks         processes: setup, one error on all ranks, sums, lines on rank 0, requests to stop
weights       Hugging Face files to shards
export        shards to Hugging Face files
steps         the samples of each step, parameter groups, learning rates
chunked_loss  the loss of a causal model without its whole logits
checkpoint    save, find, load and prune checkpoints; the identity of a run
log           OUTPUT_DIR/status, metrics.jsonl, lines and the progress bar
reading       rows of text, CSV, JSON and Parquet files and of hub data sets
"""

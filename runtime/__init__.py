"""Modules that serve a run, whatever its model and data are.

The run: each object has one owner of its state
    run           Run: OUTPUT_DIR, its status, saves, exports and end; it owns the objects below
    lock          Lock: one run at a time writes to OUTPUT_DIR
    stops         StopRequest: whether this process was asked to stop
    steps         Steps and Step: what must happen around each optimizer step
    metrics       Metrics: metrics.jsonl, speed, the lines on the screen; it owns the trackers
    state         TrainState: what is trained and saved, and its counters
    checkpoints   Saver: checkpoints and failed saves; find, check, load, prune
    checkpoint_reader  reads checkpoints without running code in them
    identity      values that all ranks and starts of a run must share
    watchdog      the timer that writes the stacks of a rank without progress
    screen        progress of long work
    ranks         work on all processes or on one, and exits with a message
    arguments     the flags that mean the same in every script
    batches       the order of samples, cut into global batches
    optimization  parameter groups, the learning rate by step
Model and data
    weights       Hugging Face files in; names and shapes, whatever wraps the model
    export        Hugging Face files out
    model_checks  checks that the loss is the model's own
    chunked_loss  the loss of a causal model, in chunks of logits
    readers       rows of files and data sets, mapped to samples
Optional: a copy that has no use for them leaves them out
    lora, adapters, nf4 (LoRA, 4 bits)   paged (--optimizer)   attention (packed documents)
    rouge   trackers   chats (Llama's formats and templates)   tokens (--prepare-only)
"""

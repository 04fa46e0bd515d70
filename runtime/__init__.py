"""Rooms that serve a run whatever its model and data are.

The training
    state         what is trained and saved, and its counters
    steps         what must happen around each optimizer step
    batches       the order of samples, cut into global batches
    optimization  parameter groups, the learning rate by step
    metrics       metrics.jsonl, and its lines on the screen
The run
    run           what a script tells its run, and asks of it
    life          who holds OUTPUT_DIR, what a run goes on from, how it ends
    lock          one run at a time writes to OUTPUT_DIR
    output        the checkpoints found there, the status
    checkpoints   save, check, load, prune
    identities    what a run and its continuation must share
    stops         requests to stop
    watchdog      where a rank is that takes too long
    free_space    is there room on the disk
    screen        progress of long work
    ranks         work on all processes or on some
    arguments     the flags that mean the same in every script
The model
    models        names and shapes, whatever wraps them
    hub           whether the Hugging Face hub gives a name, and why not
    hf_load       Hugging Face files in
    stored_tensors  the tensors in those files
    hf_export     Hugging Face files out
    model_checks  is the loss the model's own
    trained       the seam that adapters plug into
The data
    readers       rows of files and data sets, mapped to samples
Optional: a copy that has no use for them leaves them out
    adapters, nf4 (LoRA, 4 bits)   paged, paged_adamw (--optimizer)   attention (packed documents)
    rouge   trackers   profiling   chats (Llama's formats and templates)
    tokens (--prepare-only)   generate, torchrun (programs: prompts; exit codes for launchers)
"""

"""Modules of a training run, independent of its model and data.

The run (one object owns each piece of state)
    run           Output: OUTPUT_DIR, its lock, status, exports and end; Run: log, saves, best/
    steps         Steps and Step: the work around each optimizer step; requests to stop
    metrics       Metrics: metrics.jsonl, speed, log lines; and trackers
    state         State: what is trained and saved; Facts: what wrapping hides of a model
    checkpoints   Saver; find, check, load and prune checkpoints, without running code in them;
                  the identity: values that all ranks and starts of a run must share
    screen        progress bars; the stacks of a rank that makes no progress
    ranks         run functions on all ranks or on one; log lines; exit with a message
    options       flags as typed fields, and the flags that all scripts share
    batches       the order of samples, cut into global batches; parameter groups and schedules
Model and data
    weights       reads Hugging Face files; names and shapes of wrapped models
    export        writes Hugging Face files
    checks        of a model before training: its config, its loss, the tokens it attends to
    chunked_loss  the loss of a causal model, in chunks of logits
    readers       reads files and data sets as rows, and maps rows to samples
Optional: leave them out of a copy that does not use them
    adapters (LoRA, 4 bits)   paged (--optimizer)   attention (packed documents)
    rouge   chats (Llama's formats and templates)
"""

import logging
import re
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parents[1]:  # in a script
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback

# As in requirements.txt. Older versions lack names that are imported. `packaging` may be missing.
RANGES = {
    "torch": ("2.11", "2.16"), "transformers": ("5.10.4", "5.25"), "datasets": ("5.0", "5.3"),
    "safetensors": ("0.7", "0.9"), "filelock": ("4.2.12", "4.4"), "tqdm": ("4.67", "5"),
}  # fmt: skip
for package, (low, high) in RANGES.items():
    try:
        installed = version(package)
    except PackageNotFoundError:
        installed = "missing"
    if [*map(int, re.findall(r"\d+", installed)[:3])] < [*map(int, low.split("."))]:
        wanted = f"{package}>={low},<{high}"
        raise SystemExit(f"error: {package} is {installed}, but {wanted} is needed: install it.")

# peft imports bitsandbytes, which then asks for a kernel that only 4 bits on a CPU would use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

"""Run changed copies of scripts one after another under torchrun, for test_change_a_script.py.

recipes_worker.py RUNS.json

RUNS.json has a list [script, replacements, flags] for each run. OUTPUT_DIR/rows.json receives the
training samples, Llama's one document after another.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from copied import edited_script
from ten_steps import parse_args, run

from core import ranks

if __name__ == "__main__":
    device = ranks.setup(7)
    for name, replacements, flags in json.loads(Path(sys.argv[1]).read_text()):
        script = edited_script(name, replacements)
        args = parse_args(script, flags)
        code, seen = run(script, args, device)
        assert code == 0, (flags, code)
        if dist.get_rank() == 0:
            rows = []
            train_set = seen["train_set"]
            for sample in (train_set[i] for i in range(len(train_set))):
                for text in sample if isinstance(sample, list) else [sample]:
                    ids = {key: text[key] for key in ("input_ids", "labels") if key in text}
                    rows.append({key: list(map(int, values)) for key, values in ids.items()})
            (args.run.output_dir / "rows.json").write_text(json.dumps(rows))
    ranks.finish()

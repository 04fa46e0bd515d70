"""A profile of one step.

<!-- profile -->
```diff
 import policies
+from step_profile import profile_step
```

```diff
     is_saved = True
+    profiler = profile_step(6, run.output_dir)
```

```diff
         scaler.update()
+        profiler.step()
```
"""

from pathlib import Path

import torch.distributed as dist
from torch.profiler import profile, schedule


def profile_step(number: int, directory: Path) -> profile:
    """Return a profiler that writes a trace of this process's step `number`, counted from 1 and at
    least 3, if `step` is called after each step. Open it in https://ui.perfetto.dev."""

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(f"{directory}/trace-{dist.get_rank()}.json")

    profiler = profile(
        schedule=schedule(wait=number - 2, warmup=1, active=1, repeat=1), on_trace_ready=write
    )
    profiler.start()
    return profiler

"""Saves by time: every half hour.

<!-- save by time -->
```diff
 import policies
+from timer import Timer
```

```diff
     is_saved = True
+    timer = Timer(minutes=30)
```

```diff
         save_due = step in save_steps
+        save_due |= timer.is_due()
```
"""

import time

from core import ranks


class Timer:
    """Says when some minutes have passed, on all ranks in the same step."""

    def __init__(self, minutes: float) -> None:
        self.seconds = minutes * 60
        self.start = time.monotonic()

    def is_due(self) -> bool:
        """Return whether the time has passed on any rank, because clocks differ, and if so start
        again. Call on all ranks."""
        is_over = time.monotonic() - self.start >= self.seconds
        (count,) = ranks.host_sums([is_over])
        if count > 0:
            self.start = time.monotonic()
        return count > 0

"""The events in a run's metrics.jsonl, as they are read back.

Imports nothing else of this repository.
"""

import json
from pathlib import Path
from typing import Any


def read_events(directory: Path) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Read metrics.jsonl of the run in `directory`; no file is an empty one.

    Returns the events, each with its line, and how many lines are none: torn, or somebody else's.
    """
    path = directory / "metrics.jsonl"
    if not path.exists():
        return [], 0
    events = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        is_event = isinstance(event, dict) and {"event", "step"} <= event.keys()
        if is_event and line.endswith("\n"):
            events.append((line, event))
    return events, len(lines) - len(events)


def last_start(directory: Path) -> dict[str, Any]:
    """Return the last event "start" of the run in OUTPUT_DIR `directory`, with its `arguments`;
    they are {} if there was none."""
    found = {"arguments": {}}
    for _, event in read_events(directory)[0]:
        if "arguments" in event:
            found = event
    return found

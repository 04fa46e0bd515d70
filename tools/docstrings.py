"""Write the docstrings of Python's standard library to a file of rows that all scripts read.

    python tools/docstrings.py docstrings.jsonl

T5 learns headlines from text, GPT-2 the text, and Llama completions, the text, from headlines.
"""

import ast
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def rows() -> Iterator[dict[str, str]]:
    """Yield each docstring as its first line and its body."""
    seen = set()
    warnings.simplefilter("ignore", SyntaxWarning)  # about escapes in the library's own strings
    folder = Path(sysconfig.get_path("stdlib"))
    for file in sorted(folder.rglob("*.py"), key=lambda file: (file.parent.parts, file.name)):
        if not EXCLUDED_FOLDERS.isdisjoint(file.relative_to(folder).parts):
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            headline, _, body = (text or "").partition("\n\n")
            body = body.strip()
            # A first line that continues on the second is not a summary.
            if "\n" in headline or len(headline) < 10 or len(body) < 20 or body in seen:
                continue
            seen.add(body)
            yield {"text": body, "headline": headline, "prompt": headline, "completion": body}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows()))

"""Record how edited scripts are refused under torchrun: model_checks_worker.py OUTPUT.json

The output has each rank's error message by edit and variant, empty if the script is accepted.
"""

import json
import os
import sys
from pathlib import Path

from test_startup_checks import EDITS, ON_TWO_RANKS, VARIANTS, check_edit

from core import ranks

if __name__ == "__main__":
    device = ranks.setup(5.0)
    results = {}
    for variant, values in VARIANTS.items():
        for name in ON_TWO_RANKS:
            message = ""
            try:
                check_edit(EDITS[name], device, **values)
            except ranks.Problem as error:
                message = str(error)
            results[f"{name} {variant}"] = ranks.on_every_rank(lambda: message)  # noqa: B023
    if int(os.environ["RANK"]) == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    ranks.finish()

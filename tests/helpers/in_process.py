"""Run a script in this process: faster than a launch, and open to monkeypatching."""

import os
import sys
from types import ModuleType
from unittest import mock

import torch.distributed as dist

from core import args, ranks
from optional import flag_advice


def start(script: ModuleType, *flags: object) -> int:
    """Run a script as a process group of one, and return its exit code; errors go to stderr."""

    exit_now, process = os._exit, os.getpid()

    def end(code: int) -> None:
        if os.getpid() != process:  # a worker of a loader
            exit_now(code)
        raise SystemExit(code)

    argv = [script.__file__, *map(str, flags)]
    with mock.patch.object(os, "_exit", end), mock.patch.object(sys, "argv", argv):
        try:
            script.fsdp_main(script.parse_args())
        except SystemExit as error:
            return error.code or 0
        except (OSError, ranks.Problem) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return 0


def refusal(script: ModuleType, *flags: object) -> str:
    """Return the message with which a script refuses its flags, or "" if it accepts them."""
    argv = [script.__file__, *map(str, flags)]
    refuse = mock.Mock(side_effect=SystemExit)
    with (
        mock.patch.object(args, "finish", refuse),
        mock.patch.object(flag_advice, "finish", refuse),
        mock.patch.object(sys, "argv", argv),
    ):
        try:
            script.parse_args()
        except SystemExit:
            return str(refuse.call_args.args[0])
    return ""

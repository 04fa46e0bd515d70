"""Run scripts in forks of a process that has imported PyTorch and Transformers.

    fork_server.py SOCKET  # a request is a line of JSON, the answer an exit code

A launch by torchrun starts three interpreters that import PyTorch, two of them Transformers too,
before it trains for a second. A fork starts with both. No module of this project is imported here,
because launches run copies of them. Unlike torchrun's, ranks share the seed of `hash`.
"""

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import datasets  # noqa: F401
import safetensors.torch  # noqa: F401
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.tensor  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.t5.modeling_t5  # noqa: F401
import tyro  # noqa: F401
from transformers import AutoTokenizer, ByT5Tokenizer, GenerationMixin  # noqa: F401

GRACE_SECONDS = 30.0  # of torchrun, between SIGTERM and SIGKILL


def run_rank(request: dict, rank: int) -> None:
    """Become a rank: run the script, and end the process with its exit code."""
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND
        os.dup2(os.open(request[name], flags), number)
    sys.stdin = os.fdopen(0)  # the old one may have read ahead
    sys.stdout.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["processes"]:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["processes"]}
        ranks |= {"LOCAL_WORLD_SIZE": request["processes"], "GROUP_RANK": 0}
        ranks |= {"MASTER_ADDR": "localhost", "MASTER_PORT": request["port"]}
        os.environ.update({name: str(value) for name, value in ranks.items()})
    os.chdir(request["cwd"])
    path, *_ = sys.argv = request["argv"]
    paths = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [str(Path(path).resolve().parent), *paths]
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(request: dict) -> int:
    """Run all ranks. Return 1 if one fails, as torchrun does, after it has ended the others; of a
    script without torchrun, return the exit code."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        request["port"] = free.getsockname()[1]
    ranks = set()
    for rank in range(request["processes"] or 1):
        pid = os.fork()
        if not pid:
            run_rank(request, rank)
        ranks.add(pid)
    result, end = 0, None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            ranks.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            result = result or code
            if code and end is None:
                end = time.monotonic() + GRACE_SECONDS
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        elif end and time.monotonic() > end:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        else:
            time.sleep(0.02)
    return int(result != 0) if request["processes"] else result


def serve(path: str) -> None:
    """Answer each connection in a fork, until the process that started this one has ended."""
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        server.settimeout(1.0)
        while os.getppid() == parent:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                if not os.fork():
                    connection.settimeout(None)
                    with connection.makefile("rw") as stream:
                        code = run(json.loads(stream.readline()))
                        stream.write(f"{code}\n")
                    os._exit(0)
                connection.close()


if __name__ == "__main__":
    gc.freeze()  # so that collections in the forks do not copy these pages
    serve(sys.argv[1])

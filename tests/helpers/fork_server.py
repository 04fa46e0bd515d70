"""Run scripts in forks of a process that has imported PyTorch and Transformers.

    fork_server.py SOCKET  # until its standard input ends; a request is a line of JSON

A launch by torchrun starts three interpreters that import PyTorch, two of them Transformers too,
before it trains for a second. A fork starts with both. Unlike torchrun's, ranks share the seed of
`hash`, and rank 0 hosts the store.

tests/conftest.py starts one server for a pytest run and its workers, and names its socket in
FORK_SERVER. Several runs, also those of copies of this project, share a server that is started
before them: FORK_SERVER=SOCKET pytest ... It imports no module of this project, so each run has its
own. With FORK_SERVER=0, torchrun starts everything.
"""

import contextlib
import gc
import importlib
import itertools
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import time
from pathlib import Path

GRACE_SECONDS = 30.0  # of torchrun, between SIGTERM and SIGKILL
POLL_SECONDS = 0.02


def import_libraries() -> None:
    """Import what the scripts import, so that forks need not."""
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

    gc.freeze()  # so that collections in the forks do not copy these pages


def become_rank(request: dict, rank: int) -> None:
    """Run the script in this process, and end it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        flags = os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY
        os.dup2(os.open(request[name], flags), number)
    sys.stdout.reconfigure(line_buffering=True)  # torchrun lets ranks not buffer
    os.environ.clear()
    os.environ.update(request["environment"])
    importlib.reload(sys.modules["datasets.config"])  # reads HF_DATASETS_CACHE
    if size := request["processes"]:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        ranks |= {"GROUP_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": request["port"]}
        ranks["TORCHELASTIC_RUN_ID"] = "test"  # dist.is_torchelastic_launched() reads it
        os.environ.update({name: str(value) for name, value in ranks.items()})
    os.chdir(request["cwd"])
    path, *_ = sys.argv = request["argv"]
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [str(Path(path).resolve().parent), *paths]
    runpy.run_path(path, run_name="__main__")
    sys.exit()


def run(request: dict, client: socket.socket) -> int:
    """Run all ranks. Return 1 if one fails, as torchrun does, after it has ended the others; of a
    script without torchrun, return the exit code. If the client leaves, end this process too."""
    os.setsid()
    ranks = set()
    for rank in range(request["processes"] or 1):
        pid = os.fork()
        if not pid:
            become_rank(request, rank)
        ranks.add(pid)
    result, end = 0, None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ranks.remove(pid)
            result = result or os.waitstatus_to_exitcode(status)
            if result and end is None:
                end = time.monotonic() + GRACE_SECONDS
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        elif end and time.monotonic() > end:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        elif select.select([client], [], [], POLL_SECONDS)[0]:  # closed
            os.killpg(0, signal.SIGKILL)
    return int(result != 0) if request["processes"] else result


def reap(options: int) -> None:
    """Wait for forks that have ended, or without WNOHANG for all: their CPU time counts here."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def serve(path: str) -> None:
    """Answer each connection in a fork with the exit code, until standard input ends."""
    # Below the ports that the system gives to connections, any of which might take one first.
    ports = itertools.count(random.randrange(10_000, 25_000))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while server in select.select([server, 0], [], [])[0]:
            client, _ = server.accept()
            import_libraries()
            port = next(ports)
            if not os.fork():
                with client.makefile("r") as stream:
                    request = json.loads(stream.readline()) | {"port": port}
                client.sendall(str(run(request, client)).encode())
                os._exit(0)
            client.close()
            reap(os.WNOHANG)
    reap(0)


if __name__ == "__main__":
    serve(sys.argv[1])

"""Commands in processes of their own, forked from a server that has imported what they need."""

import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from threading import RLock
from types import MappingProxyType

import torch
from tqdm import tqdm

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "avq_diffusers.cli.main",
        "distill.__main__",
        "distill.loop",
        "distill.run",
        "eval.__main__",
        "eval.quality.coco",
        "eval.quality.coco_score",
        "diffusers.schedulers.scheduling_ddim",
        "hosts.kinds",
        "processes",
        "scipy.linalg",
    ]
)
PATIENCE = 300  # seconds until a process counts as hanging


class Command:
    """A running command.

    Args:
        entry: module and function, as `"eval.__main__:main"`.
        arguments: of the command.
        file_limit: bytes in a file that it writes, in place of a full disk.
        environment: variables beside those of the server.
    """

    def __init__(
        self,
        entry: str,
        arguments: Iterable[object],
        file_limit: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        reader, writer = FORKED.Pipe(duplex=False)
        given = entry, [*map(str, arguments)], file_limit, dict(environment), writer
        self.process = FORKED.Process(target=_run, args=given)
        self.process.start()
        writer.close()
        os.read(reader.fileno(), 1)  # it leads its group now
        self.started = time.monotonic()
        self.pool = ThreadPoolExecutor(1)
        # A pipe: a limit of file sizes would cut a file of messages too.
        self.output = self.pool.submit(_drain, reader)

    def finish(self) -> tuple[int, str]:
        """Wait for the exit code and what was printed; kills what hangs."""
        self.process.join(PATIENCE)
        return self.kill()

    def kill(self) -> tuple[int, str]:
        """Send SIGKILL to the group; return the exit code and what was printed."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        output = self.output.result()
        self.pool.shutdown()
        return self.process.exitcode, output

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def start_ranks(entry: str, world: int, arguments: Iterable[object]) -> list[Command]:
    """Start a command in every process of a group."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [group | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(world)]
    return [Command(entry, arguments, environment=rank) for rank in ranks]


def _run(
    entry: str,
    arguments: list[str],
    file_limit: int | None,
    environment: dict[str, str],
    output: Connection,
) -> None:
    os.setsid()
    os.environ |= environment
    os.write(output.fileno(), b"\n")
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # the old one may take the pipe for a file
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    torch.set_num_threads(1)  # sums depend on the number of threads
    tqdm.set_lock(RLock())  # its own kind is shared by processes and would outlive the kill
    module, function = entry.split(":")
    sys.argv = [module, *arguments]
    getattr(import_module(module), function)()


def _drain(reader: Connection) -> str:
    with reader:
        return b"".join(iter(lambda: os.read(reader.fileno(), 2**16), b"")).decode(errors="replace")

"""Run a function in two processes that form a gloo process group on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 2


def on_two_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on both ranks, one thread each; results in the order of ranks. What one raises is raised here."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_worker, (port, queue, function, args), nprocs=WORLD)
    found = dict(queue.get() for _ in range(WORLD))
    return [found[rank] for rank in range(WORLD)]


def _worker(rank: int, port: int, queue: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    result = function(rank, *args)
    dist.barrier()
    queue.put((rank, result))
    # A mesh keeps its process groups, and a gloo thread that still runs while the interpreter goes down aborts the process
    # ("terminate called without an active exception"): leave without taking it down.
    os._exit(0)

"""What a reader needs to know to repeat a run: versions, host, device, rank."""

import os
import platform
import socket
from typing import Any

import torch

from flopwatch.run_log.process import identify_process
from flopwatch.version import __version__


def describe_environment(device: torch.device) -> dict[str, Any]:
    elastic = _torchelastic()
    return {
        **({} if elastic is None else {"torchelastic": elastic}),
        "flopwatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": identify_process(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }


def _torchelastic() -> dict[str, Any] | None:
    """Which job of torchrun this process belongs to, and which attempt it is; None without torchrun."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return {
        "run_id": run_id,
        "restart_count": int(restarts) if restarts.isdigit() else 0,
        "agent_pid": os.getppid(),
    }


def rank_and_world_size() -> tuple[int, int]:
    """From the process group, else from what torchrun sets."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)


def device_memory_gib(device: torch.device) -> dict[str, float]:
    """Most memory held and reserved so far; asks the allocator, not the device."""
    if device.type != "cuda":
        return {}
    return {
        "perf/memory_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "perf/memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }

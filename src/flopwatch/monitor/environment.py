"""Describes this process, its ranks and its device, and what it runs, for the log."""

import os
import platform
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from getpass import getuser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flopwatch import process
from flopwatch.errors import InputError
from flopwatch.guard import Guard
from flopwatch.hardware import read_device
from flopwatch.records.what_ran import git_state, mask_arguments, mask_text
from flopwatch.version import __version__

_IDS = (
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    *("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT"),
    *("RAY_JOB_ID", "RAY_SUBMISSION_ID", "RAY_ADDRESS", "RAY_NODE_ID", "RAY_WORKER_ID"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
)
_PACKAGES = (
    *("torch", "numpy", "transformers", "accelerate", "trl", "peft", "datasets", "tokenizers"),
    *("lightning", "deepspeed", "opacus", "xformers", "bitsandbytes", "triton", "ray"),
    *("torchvision", "torchao", "torchtitan", "timm", "safetensors"),
    *("pytorch_lightning", "flash_attn", "transformer_engine"),
)
"""Modules whose version can change speed or FLOPs; the name of the package has a hyphen for each underscore."""
_MOST_ARGUMENTS, _LONGEST = 200, 500


def describe_environment(device: torch.device) -> dict[str, Any]:
    environment: dict[str, Any] = {}
    run_id, restarts = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if run_id is not None:  # the torchrun job of this process, and how often it was restarted
        count = int(restarts) if restarts.isdigit() else 0
        environment["torchelastic"] = {"run_id": run_id, "restart_count": count, "agent_pid": os.getppid()}
    environment |= {
        "flopwatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": process.own_identity(),
        "device": str(device),
    }
    with suppress(InputError):  # torch does not say enough to identify the device
        facts = read_device(device)
        environment |= {"device_name": facts.name, "device_units": facts.unit_count}
    return {**environment, "threads": torch.get_num_threads()}


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size from the process group or, without one, from the variables that torchrun sets."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)


def device_memory_gib(device: torch.device) -> dict[str, float]:
    """Peak memory of a CUDA device so far, from torch's allocator, which answers without waiting for the device."""
    if device.type != "cuda":
        return {}
    return {
        "perf/memory_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "perf/memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }


def what_ran() -> dict[str, Any]:
    """What this process runs, as far as it can be found out. Takes some seconds if git is slow."""
    script = Path(sys.argv[0] if sys.argv else "")
    names = [name.replace("_", "-") for name in _PACKAGES if name in sys.modules]
    facts: dict[str, Callable[[], Any]] = {
        "script": lambda: _short(mask_text(sys.argv[0])),
        "arguments": lambda: [_short(each) for each in mask_arguments(sys.argv[1 : _MOST_ARGUMENTS + 1])],
        "folder": lambda: str(Path.cwd()),
        "git": lambda: git_state(str(script.parent if script.is_file() else Path.cwd())),
        "user": getuser,
        "job": lambda: {name: _short(mask_text(os.environ[name])) for name in _IDS if os.environ.get(name)},
        "packages": lambda: {name: found for name in names if (found := _try(partial(version, name)))},
    }
    found = {name: _try(find) for name, find in facts.items()}
    return {name: value for name, value in found.items() if value not in (None, "", {})}


def _try(find: Callable[[], Any]) -> Any:
    with Guard("what ran"):  # a folder that was removed, a user without a name, broken metadata of a package
        return find()
    return None


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

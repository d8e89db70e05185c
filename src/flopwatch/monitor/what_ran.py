"""What ran: script, arguments, folder, git commit, user, ids of the job, versions of packages; for the local log."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flopwatch.git_state import git_state
from flopwatch.records.masking import mask_arguments, mask_text

_IDS = (
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    *("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT"),
    *("RAY_JOB_ID", "RAY_SUBMISSION_ID", "RAY_ADDRESS", "RAY_NODE_ID", "RAY_WORKER_ID"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
)
_PACKAGES = {
    **{
        name: name for name in ("torch", "numpy", "transformers", "accelerate", "trl", "peft", "datasets", "tokenizers")
    },
    **{name: name for name in ("lightning", "deepspeed", "opacus", "xformers", "bitsandbytes", "triton", "ray")},
    **{name: name for name in ("torchvision", "torchao", "torchtitan", "timm", "safetensors")},
    "pytorch_lightning": "pytorch-lightning",
    "flash_attn": "flash-attn",
    "transformer_engine": "transformer-engine",
}
"""Modules whose version can change speed or FLOPs, and the names of their packages."""
_MOST_ARGUMENTS, _LONGEST = 200, 500


def what_ran() -> dict[str, Any]:
    """What this process runs; what cannot be found out is left out. Takes up to some seconds, where git is slow."""
    facts: dict[str, Callable[[], Any]] = {
        "script": lambda: _short(mask_text(sys.argv[0])),
        "arguments": lambda: [_short(each) for each in mask_arguments(sys.argv[1 : _MOST_ARGUMENTS + 1])],
        "folder": lambda: str(Path.cwd()),
        "git": lambda: git_state(_folder_of_script()),
        "user": _user,
        "job": lambda: {name: _short(mask_text(os.environ[name])) for name in _IDS if os.environ.get(name)},
        "packages": _versions,
    }
    found = {}
    for name, find in facts.items():
        with suppress(Exception):  # a folder that was removed, a user without a name, broken metadata of a package
            found[name] = find()
    return {name: value for name, value in found.items() if value not in (None, "", {})}


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _folder_of_script() -> str:
    script = Path(sys.argv[0])
    return str(script.parent if script.is_file() else Path.cwd())


def _user() -> str:
    from getpass import getuser

    return getuser()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    found = {}
    for module, package in _PACKAGES.items():
        if module in sys.modules:
            with suppress(Exception):
                found[package] = version(package)
    return found

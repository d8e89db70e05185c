"""What a reader needs to know of the process that measured: device, clocks, threads, git."""

import contextlib
import os
from typing import Any

import torch

from flopwatch.sweep.environment import git_state, machine


def describe_worker(device: torch.device) -> dict[str, Any]:
    found = {
        **machine(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "git": git_state(os.getcwd()),
    }
    if device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        with contextlib.suppress(Exception):  # needs nvidia-ml-py and a driver that answers
            found["clock_mhz"] = torch.cuda.clock_rate(device)
    return {name: value for name, value in found.items() if value is not None}

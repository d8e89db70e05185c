"""Known problems: what makes a part of flopwatch fail or measure less on a machine, and the command that removes it."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flopwatch.cli.doctor.extras import is_older
from flopwatch.cli.doctor.findings import Problem
from flopwatch.cli.doctor.machine import ROOT, built_for, shared_memory_bytes
from flopwatch.hardware.cpu import cpu_quota
from flopwatch.hardware.peaks import cache_path
from flopwatch.numbers import byte_size

OLDEST_TORCH = "2.6"
_LEAST_SHARED_BYTES = 256 << 20
# The wheels of PyPI are those for CUDA; those for CPUs only and for ROCm have an index of their own.
_CUDA_WHEELS = "pip install --force-reinstall torch --index-url https://pypi.org/simple"
_ROCM_WHEELS = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/rocm6.4"
_VENDORS = (("NVIDIA", "CUDA", "dev/nvidiactl", _CUDA_WHEELS), ("AMD", "ROCm", "dev/kfd", _ROCM_WHEELS))
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ALLOW_PROFILING = (
    "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/profiling.conf "
    "&& sudo reboot"
)


@dataclass(frozen=True, slots=True)
class Around:
    """What problems are looked for in: a tree with /proc, /sys and /dev, torch, and the environment."""

    root: Path = ROOT
    torch_module: Any = torch
    environment: Mapping[str, str] | None = None
    is_admin: bool = False

    def has(self, path: str) -> bool:
        return (self.root / path).exists()

    def setting(self, name: str) -> str | None:
        return (os.environ if self.environment is None else self.environment).get(name)


def here() -> Around:
    return Around(is_admin=hasattr(os, "geteuid") and os.geteuid() == 0)


def find_problems(around: Around) -> list[Problem]:
    found = (_of_torch(around), _of_accelerators(around), _of_nvidia(around), _of_the_host(around))
    return [problem for problems in found for problem in problems]


def _of_torch(around: Around) -> Iterator[Problem]:
    own = str(around.torch_module.__version__)
    if is_older(own, OLDEST_TORCH):
        what = f"torch {own} is older than {OLDEST_TORCH}, the oldest that flopwatch supports"
        yield Problem(what, f'pip install --upgrade "torch>={OLDEST_TORCH}"', is_failure=True)


def _of_accelerators(around: Around) -> Iterator[Problem]:
    """An accelerator that the system has and torch does not find."""
    if around.torch_module.accelerator.is_available():
        return
    build = built_for(around.torch_module)
    for vendor, platform, sign, wheels in _VENDORS:
        if not around.has(sign):
            continue
        hidden = [name for name in _HIDING if around.setting(name) in ("", "-1")]
        if not build.startswith(platform):
            yield Problem(f"there is an {vendor} GPU, but this torch is built for {build}, so it cannot use it", wheels)
        elif hidden:
            yield Problem(f"the variable {hidden[0]} hides all GPUs from torch", f"unset {hidden[0]}")
        elif vendor == "AMD" and not os.access(around.root / sign, os.R_OK | os.W_OK):
            what = "this user may not open /dev/kfd, so torch finds no AMD GPU"
            yield Problem(what, "sudo usermod -aG render,video $USER, then log in again")
        else:
            what = f"there is an {vendor} GPU, but torch, built for {build}, finds none: the driver may be too old"
            yield Problem(what, 'python -c "import torch; torch.zeros(1).cuda()"')


def _of_nvidia(around: Around) -> Iterator[Problem]:
    parameters = around.root / "proc/driver/nvidia/params"
    try:
        is_restricted = "RmProfilingAdminOnly: 1" in parameters.read_text(errors="replace")
    except OSError:
        return
    if is_restricted and not around.is_admin:
        what = (
            "NVIDIA's driver lets only administrators profile (RestrictProfilingToAdminUsers), so tensor activity "
            "cannot be read, and traces may lack kernels"
        )
        yield Problem(what, _ALLOW_PROFILING)


def _of_the_host(around: Around) -> Iterator[Problem]:
    quota, threads = cpu_quota(around.root), around.torch_module.get_num_threads()
    if quota is not None and threads > math.ceil(quota):
        what = f"torch runs {threads} threads, but the control group allows {quota:g} cores, so threads wait"
        yield Problem(what, f"export OMP_NUM_THREADS={math.ceil(quota)}")
    shared = shared_memory_bytes(around.root)
    if shared is not None and shared < _LEAST_SHARED_BYTES:
        what = f"/dev/shm has {byte_size(shared)}, so workers of a DataLoader may end with a bus error"
        yield Problem(what, "docker run --shm-size=8g ...")
    if not around.has("proc/self/status"):
        yield Problem("there is no /proc, so sweeps cannot measure and limit the memory of a trial's processes")
    folder = next((each for each in cache_path().parents if each.exists()), None)
    if folder is not None and not os.access(folder, os.W_OK):
        what = "measured peaks cannot be kept, because the folder for caches cannot be written"
        yield Problem(what, "export XDG_CACHE_HOME=/tmp/cache")

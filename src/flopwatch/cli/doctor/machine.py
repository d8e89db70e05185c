"""What this machine has: versions, devices with their peaks, extras, and problems with what removes them."""

import math
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flopwatch.errors import FlopwatchError
from flopwatch.hardware import explain_unknown, list_peaks, read_device
from flopwatch.hardware.counters.sampler import read_once
from flopwatch.hardware.cpu import cpu_quota, read_cpu
from flopwatch.hardware.identity import identify
from flopwatch.hardware.peaks import DeviceFacts
from flopwatch.numbers import byte_size
from flopwatch.records.flops import Peak
from flopwatch.version import __version__

COMMON_TYPES = ("bf16", "fp16", "tf32", "fp32", "fp8")
ROOT = Path("/")
_OLDEST_TORCH = "2.6"
_LEAST_SHARED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """A device that torch can use, and its peaks; `why_unknown` says what to do if it has none."""

    facts: DeviceFacts
    count: int
    peaks: tuple[Peak, ...]
    why_unknown: str = ""


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra of pyproject.toml.

    Attributes:
        versions: The versions of its packages that are installed, by name.
        command: The command that installs what is missing; empty if nothing is.
    """

    name: str
    use: str
    versions: dict[str, str]
    command: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about this machine that makes a part of flopwatch fail or measure less.

    Attributes:
        is_failure: Whether what is installed does not work with it.
    """

    what: str
    command: str = ""
    is_failure: bool = False


_EXTRAS: dict[str, tuple[str, dict[str, str]]] = {
    "tensorboard": ("sink", {"tensorboard": "2.17.1"}),
    "wandb": ("sink", {"wandb": "0.31"}),
    "mlflow": ("sink", {"mlflow-skinny|mlflow": "2.17"}),
    "prometheus": ("sink", {"prometheus-client": "0.20"}),
    "hf": ("Hugging Face", {"transformers": "4.57", "accelerate": "1.4", "trl": "0.24"}),
    "lightning": ("callback", {"lightning|pytorch-lightning": "2.4"}),
    "dp": ("private training", {"opacus": "1.6"}),
    "ray": ("sweeps on Ray", {"ray": "2.40"}),
    "nvml": ("NVIDIA counters", {"nvidia-ml-py": "12.535"}),
}
"""By extra, its use, and the lowest versions of its packages. Of several names joined by `|`, one is enough."""


def versions(root: Path = ROOT, torch_module: Any = torch) -> dict[str, str]:
    """The versions of what flopwatch runs on, and what this process may use of the machine, as far as it is known."""
    cores = read_cpu(root).core_count
    found = {
        "flopwatch": __version__,
        "Python": platform.python_version(),
        "torch": f"{torch_module.__version__}, built for {built_for(torch_module)}",
        "driver": _driver(root),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": "" if cores is None else f"{cores:g} usable, and torch runs {torch_module.get_num_threads()} threads",
    }
    return {name: text for name, text in found.items() if text}


def built_for(torch_module: Any = torch) -> str:
    """What torch was built for: with a wheel for CPUs only, it finds no GPU.

    >>> built_for(type("torch", (), {"version": type("version", (), {"cuda": "12.8", "hip": None})}))
    'CUDA 12.8'
    """
    build = torch_module.version
    if getattr(build, "hip", None):
        return f"ROCm {build.hip}"
    return f"CUDA {build.cuda}" if build.cuda else "neither CUDA nor ROCm"


def _driver(root: Path) -> str:
    with suppress(OSError, IndexError):
        said = (root / "proc/driver/nvidia/version").read_text(errors="replace")
        return f"NVIDIA {said.split('Module')[-1].split()[0]}"
    return ""


def devices(torch_module: Any = torch) -> list[Device]:
    """The accelerators that torch finds, equal ones together, and the CPU."""
    found = Counter([*_accelerators(torch_module), read_device("cpu")])
    return [_device(facts, count) for facts, count in found.items()]


def _accelerators(torch_module: Any) -> list[DeviceFacts]:
    if not torch_module.accelerator.is_available():
        return []
    kind = torch_module.accelerator.current_accelerator().type
    facts = []
    for index in range(torch_module.accelerator.device_count()):
        with suppress(FlopwatchError):  # a device that is lost
            facts.append(read_device(f"{kind}:{index}", torch_module))
    return facts


def _device(facts: DeviceFacts, count: int) -> Device:
    known = {peak.dtype: peak for peak in list_peaks(facts)}
    peaks = tuple(known[dtype] for dtype in COMMON_TYPES if dtype in known) or tuple(known.values())
    return Device(facts, count, peaks, "" if peaks else explain_unknown(facts))


def counters() -> str:
    """Whether the hardware counters of the current device can be read, in a sentence."""
    window, why_absent = read_once(identify())
    if window is None:
        return f"absent: {why_absent}"
    what = "clock, power and energy"
    if window.source == "nvml-gpm":
        return f"NVML: activity, {what}"
    return f"NVML: {what}; the activity of the GPU needs Hopper or newer, and the permission to read it"


def extras() -> list[Extra]:
    return [_extra(name, use, packages) for name, (use, packages) in _EXTRAS.items()]


def _extra(name: str, use: str, packages: dict[str, str]) -> Extra:
    found = {names.partition("|")[0]: _installed_version(names) for names in packages}
    known = {package: own for package, own in found.items() if own is not None}
    return Extra(name, use, known, "" if len(known) == len(found) else f'pip install "flopwatch[{name}]"')


def _installed_version(names: str) -> str | None:
    for name in names.split("|"):
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def is_older(found: str, lowest: str) -> bool:
    """Whether a version is below another one, by its numbers.

    >>> is_older("2.9.1", "2.17.1"), is_older("1.6.0rc1", "1.6"), is_older("2.13.0+cpu", "2.6")
    (True, False, False)
    """
    own, other = (tuple(map(int, re.findall(r"\d+", re.split(r"[+a-zA-Z]", text)[0]))) for text in (found, lowest))
    return own < other


def problems(root: Path = ROOT, torch_module: Any = torch) -> list[Problem]:
    """What is known to make a part of flopwatch fail or measure less, and is so on this machine."""
    return [*_old_versions(torch_module), *_of_gpus(root, torch_module), *_of_the_host(root, torch_module)]


def _old_versions(torch_module: Any) -> Iterator[Problem]:
    own = str(torch_module.__version__)
    if is_older(own, _OLDEST_TORCH):
        what = f"torch {own} is older than {_OLDEST_TORCH}, the oldest that flopwatch supports"
        yield Problem(what, f'pip install --upgrade "torch>={_OLDEST_TORCH}"', is_failure=True)
    for extra, (_, packages) in _EXTRAS.items():
        for names, lowest in packages.items():
            installed = _installed_version(names)
            if installed is not None and is_older(installed, lowest):
                package = names.partition("|")[0]
                what = f"{package} {installed} is older than {lowest}, the oldest that flopwatch supports"
                yield Problem(what, f'pip install --upgrade "flopwatch[{extra}]"', is_failure=True)


def _of_gpus(root: Path, torch_module: Any) -> Iterator[Problem]:
    if (root / "dev/nvidiactl").exists() and not torch_module.accelerator.is_available():
        what = (
            f"there is an NVIDIA GPU, and torch, built for {built_for(torch_module)}, finds none: it needs a build for "
            "CUDA, a driver that is new enough, and no empty CUDA_VISIBLE_DEVICES"
        )
        yield Problem(what, 'python -c "import torch; torch.zeros(1).cuda()"')
    with suppress(OSError):
        if "RmProfilingAdminOnly: 1" in (root / "proc/driver/nvidia/params").read_text(errors="replace"):
            what = (
                "NVIDIA's driver lets only administrators profile, so for others traces may lack kernels and the "
                "activity of the GPU is unknown; load it with NVreg_RestrictProfilingToAdminUsers=0"
            )
            yield Problem(what)


def _of_the_host(root: Path, torch_module: Any) -> Iterator[Problem]:
    quota, threads = cpu_quota(root), torch_module.get_num_threads()
    if quota is not None and threads > math.ceil(quota):
        what = f"torch runs {threads} threads, but the control group allows {quota:g} cores, so threads wait"
        yield Problem(what, f"export OMP_NUM_THREADS={math.ceil(quota)}")
    with suppress(OSError, AttributeError):  # Windows has no such function
        shared = os.statvfs(root / "dev/shm")
        if (size := shared.f_frsize * shared.f_blocks) < _LEAST_SHARED_BYTES:
            what = f"/dev/shm has {byte_size(size)}, so workers of a DataLoader may end with a bus error"
            yield Problem(what, "docker run --shm-size=8g ...")

"""What this machine has: versions, limits, devices with their peaks, sources of counters, and programs."""

import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flopwatch.cli.doctor.findings import Part
from flopwatch.errors import FlopwatchError
from flopwatch.hardware import explain_unknown, list_peaks, read_device
from flopwatch.hardware.counters.chain import open_counters, why_not
from flopwatch.hardware.counters.protocol import CounterSource
from flopwatch.hardware.cpu import read_cpu
from flopwatch.hardware.identity import identify
from flopwatch.hardware.peaks import DeviceFacts
from flopwatch.numbers import byte_size
from flopwatch.records.counters import CounterReading
from flopwatch.records.flops import Peak
from flopwatch.sweep.host.environment import available_bytes
from flopwatch.text import first_line, one_line
from flopwatch.version import __version__

COMMON_TYPES = ("bf16", "fp16", "tf32", "fp32", "fp8")
ROOT = Path("/")
_PROGRAM_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Device:
    """A device that torch can use, and its peaks; `why_unknown` says what to do if it has none."""

    facts: DeviceFacts
    count: int
    peaks: tuple[Peak, ...]
    why_unknown: str = ""


def versions(root: Path = ROOT, torch_module: Any = torch) -> dict[str, str]:
    """The versions of what flopwatch runs on; unknown ones are left out."""
    cudnn = torch_module.backends.cudnn.version() if torch_module.version.cuda else None
    found = {
        "flopwatch": __version__,
        "Python": platform.python_version(),
        "torch": str(torch_module.__version__),
        "built for": built_for(torch_module),
        "cuDNN": "" if cudnn is None else f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}",
        "driver": _driver(root),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
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
    if build.cuda:
        return f"CUDA {build.cuda}"
    return "Intel GPUs" if getattr(build, "xpu", None) else "Apple GPUs" if sys.platform == "darwin" else "CPUs only"


def _driver(root: Path) -> str:
    with suppress(OSError, IndexError):
        said = (root / "proc/driver/nvidia/version").read_text(errors="replace")
        return f"NVIDIA {said.split('Module')[-1].split()[0]}"
    with suppress(OSError):
        return f"amdgpu {(root / 'sys/module/amdgpu/version').read_text().strip()}"
    return ""


def limits(root: Path = ROOT) -> dict[str, str]:
    """What this process may use of the machine; in a container, less than the machine has."""
    cores, memory = read_cpu(root).core_count, available_bytes()
    found = {}
    if cores is not None:
        found["cores"] = f"{cores:g} usable, and torch runs {torch.get_num_threads()} threads"
    if memory is not None:
        found["memory"] = f"{byte_size(memory)} are free"
    shared = shared_memory_bytes(root)
    if shared is not None:
        found["shared memory"] = byte_size(shared)
    return found


def shared_memory_bytes(root: Path = ROOT) -> int | None:
    """The size of /dev/shm, in which the workers of a DataLoader hand over batches; None if there is none."""
    try:
        found = os.statvfs(root / "dev/shm")
    except (OSError, AttributeError):  # Windows has no such function
        return None
    return found.f_frsize * found.f_blocks


def devices(torch_module: Any = torch) -> list[Device]:
    """The accelerators that torch finds, equal ones together, and the CPU."""
    found = Counter([*accelerators(torch_module), read_device("cpu")])
    return [_device(facts, count) for facts, count in found.items()]


def accelerators(torch_module: Any = torch) -> list[DeviceFacts]:
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


def counters(torch_module: Any = torch) -> list[Part]:
    """The source of hardware counters of the current device, and why those that are tried before it are not there."""
    device = identify(None, torch_module)
    opened = open_counters(device)
    # Of sources that are read together, each says itself why it is not there.
    parts = [Part(name, "missing", reason) for name, reason in opened.reasons.items() if "+" not in name]
    if opened.source is not None:
        parts.append(_source(opened.source, opened.first))
    return parts


def _source(source: CounterSource, first: CounterReading | None) -> Part:
    try:
        readings = first, source.sample()  # a rate or an activity is known from the second one on
    except Exception as error:  # noqa: BLE001 - a driver's bindings may raise anything
        return Part(source.name, "unusable", why_not(error))
    finally:
        source.close()
    known = [said for name, said in _COUNTED.items() if any(getattr(each, name, None) is not None for each in readings)]
    return Part(source.name, "there", f"reads {', '.join(known) or 'nothing yet'}")


_COUNTED: Mapping[str, str] = {
    "tensor_active": "tensor activity",
    "sm_active": "compute activity",
    "dram_active": "memory activity",
    "sm_clock_mhz": "clock",
    "power_watts": "power",
    "energy_joules": "energy",
    "flops_per_s": "FLOP/s",
    "other_memory_bytes": "memory of other processes",
}


_PROGRAMS = (
    Part("sbatch", "missing", "", "sudo apt install slurm-client", "sweeps on Slurm"),
    Part("sacct", "missing", "", "sudo apt install slurm-client", "sweeps on Slurm"),
    Part("nvidia-smi", "missing", "", "sudo ubuntu-drivers install", "NVIDIA's driver"),
    Part("git", "missing", "", "sudo apt install git", "commit of a run"),
)
_VERSIONS = {"nvidia-smi": ("--query-gpu=driver_version", "--format=csv,noheader")}


def programs() -> list[Part]:
    return [_program(missing) for missing in _PROGRAMS]


def _program(missing: Part) -> Part:
    path = shutil.which(missing.name)
    if path is None:
        return missing
    command, found = [path, *_VERSIONS.get(missing.name, ("--version",))], replace(missing, command="")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return replace(found, state="unusable", said=f"does not answer: {first_line(error)}")
    said = one_line(done.stdout.strip().partition("\n")[0] or done.stderr.strip().partition("\n")[0], 100)
    if done.returncode:
        return replace(found, state="unusable", said=f"ended with status {done.returncode}: {said}")
    return replace(found, state="there", said=said)

"""What this process can see of its CPU, as far as Linux tells. Never loads torch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_IDENTITY = {"vendor_id": "vendor_id", "family": "cpu family", "model": "model", "arm_part": "CPU part"}


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The CPU as this process sees it; what cannot be read is None or empty.

    Attributes:
        name: Model name.
        flags: Instruction sets.
        identity: `vendor_id`, `family`, `model`, `arm_part`, as the kernel prints them.
        core_count: Physical cores this process may use; a quota can make it fractional.
        clock_ghz: Clock all cores can hold.
        clock_source: Where the clock was read.
    """

    name: str = "cpu"
    flags: frozenset[str] = frozenset()
    identity: tuple[tuple[str, str], ...] = ()
    core_count: float | None = None
    clock_ghz: float | None = None
    clock_source: str = ""


def read_cpu(root: Path = Path("/"), usable_cpus: set[int] | None = None) -> CpuFacts:
    """Read this CPU; on systems without /proc everything is unknown.

    Args:
        root: Where /proc and /sys are; tests pass a folder.
        usable_cpus: Numbers of the logical CPUs to count; None asks for this process's affinity.
    """
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return CpuFacts()
    blocks = (_fields(block) for block in text.split("\n\n"))
    processors = [fields for fields in blocks if fields.get("processor", "").isdigit()]
    if not processors:
        return CpuFacts()
    first = processors[0]
    clock_ghz, clock_source = _clock(root, first)
    return CpuFacts(
        name=first.get("model name", "cpu"),
        flags=frozenset((first.get("flags") or first.get("Features") or "").split()),
        identity=tuple((key, first.get(field, "")) for key, field in _IDENTITY.items()),
        core_count=_core_count(root, processors, _affinity() if usable_cpus is None else usable_cpus),
        clock_ghz=clock_ghz,
        clock_source=clock_source,
    )


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _affinity() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _core_count(root: Path, processors: list[dict[str, str]], usable: set[int] | None) -> float | None:
    cores = set()
    for fields in processors:
        number = int(fields["processor"])
        if usable is None or number in usable:
            # Hyper-threads share a core; Arm prints no core id and has none.
            cores.add((fields.get("physical id", ""), fields.get("core id", f"cpu{number}")))
    if not cores:
        return None
    quota = _cgroup_quota(root)
    return len(cores) if quota is None else min(float(len(cores)), quota)


def _cgroup_quota(root: Path) -> float | None:
    """CPUs' worth of time the control groups allow; the tightest of them counts."""
    quotas = []
    for path in _cgroup_folders(root):
        quota_and_period = _words(path / "cpu.max")
        if not quota_and_period:
            quota_and_period = _words(path / "cpu.cfs_quota_us") + _words(path / "cpu.cfs_period_us")
        if len(quota_and_period) == 2 and all(word.isdigit() for word in quota_and_period):
            quotas.append(int(quota_and_period[0]) / int(quota_and_period[1]))
    return min(quotas, default=None)


def _cgroup_folders(root: Path) -> list[Path]:
    folders = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        own = mount / group.strip("/")
        # Inside a container the group's own path may not be mounted; its limits are then at the mount.
        folders += [folder for folder in (own, *own.parents) if folder == mount or mount in folder.parents]
    return folders


def _clock(root: Path, fields: dict[str, str]) -> tuple[float | None, str]:
    """The clock all cores can hold. Not the single-core turbo, which would flatter the peak by a third."""
    cpu0 = root / "sys/devices/system/cpu/cpu0"
    in_name = re.search(r"@\s*([\d.]+)\s*GHz", fields.get("model name", ""))
    candidates = (
        (_number(cpu0 / "cpufreq/base_frequency"), 1e6, "base clock, sysfs"),
        (_number(cpu0 / "acpi_cppc/nominal_freq"), 1e3, "nominal clock, sysfs"),
        (float(in_name[1]) if in_name else None, 1, "base clock, in the model name"),
        (float(fields["cpu MHz"]) if "cpu MHz" in fields else None, 1e3, "current clock, /proc/cpuinfo"),
        # Reached on Arm servers only, which run all cores at it.
        (_number(cpu0 / "cpufreq/cpuinfo_max_freq"), 1e6, "maximal clock, sysfs"),
    )
    for value, per_ghz, source in candidates:
        if value:
            return value / per_ghz, source
    return None, ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> float | None:
    words = _words(path)
    return float(words[0]) if words and words[0].isdigit() else None

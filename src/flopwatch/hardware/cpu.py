"""The CPU of this machine and its peak: cores x clock x FLOP per cycle. Reads /proc and /sys; never loads torch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from flopwatch.hardware.peaks import Unknown, read_table
from flopwatch.records.flops import Peak

_IDENTITY = {"vendor_id": "vendor_id", "family": "cpu family", "model": "model", "arm_part": "CPU part"}


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The CPU that this process runs on; facts that cannot be read are None or empty.

    Attributes:
        identity: `vendor_id`, `family`, `model`, `arm_part`, as the kernel prints them.
        core_count: Number of physical cores that this process may use; fractional under a CPU quota.
        clock_ghz: The clock that all cores can sustain at once.
    """

    name: str = "cpu"
    flags: frozenset[str] = frozenset()
    identity: tuple[tuple[str, str], ...] = ()
    core_count: float | None = None
    clock_ghz: float | None = None
    clock_source: str = ""


def read_cpu(root: Path = Path("/"), usable_cpus: set[int] | None = None) -> CpuFacts:
    """Read the facts about this machine's CPU; all are unknown on systems without /proc.

    Tests pass another folder with `proc` and `sys`, and the logical CPUs to count in place of this process's affinity.
    """
    processors = []
    for block in _text(root / "proc/cpuinfo").split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        processors += [fields] if fields.get("processor", "").isdigit() else []
    if not processors:
        return CpuFacts()
    first = processors[0]
    clock_ghz, clock_source = _clock(root, first)
    return CpuFacts(
        name=first.get("model name", "cpu"),
        flags=frozenset((first.get("flags") or first.get("Features") or "").split()),
        identity=tuple((key, first.get(field, "")) for key, field in _IDENTITY.items()),
        core_count=_core_count(root, processors, os.sched_getaffinity(0) if usable_cpus is None else usable_cpus),
        clock_ghz=clock_ghz,
        clock_source=clock_source,
    )


def _core_count(root: Path, processors: list[dict[str, str]], usable: set[int]) -> float | None:
    cores = set()
    for fields in processors:
        number = int(fields["processor"])
        if number in usable:
            # Hyper-threads share a core id. Arm CPUs have no hyper-threads, and Linux prints no core id for them.
            cores.add((fields.get("physical id", ""), fields.get("core id", f"cpu{number}")))
    if not cores:
        return None
    quota = cpu_quota(root)
    return len(cores) if quota is None else min(float(len(cores)), quota)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The cores that the control groups of this process allow; None without a quota."""
    quotas = []
    for path in _cgroup_folders(root):
        quota_and_period = _text(path / "cpu.max").split()
        if not quota_and_period:
            quota_and_period = [*_text(path / "cpu.cfs_quota_us").split(), *_text(path / "cpu.cfs_period_us").split()]
        if len(quota_and_period) == 2 and all(word.isdigit() for word in quota_and_period):
            quotas.append(int(quota_and_period[0]) / int(quota_and_period[1]))
    return min(quotas, default=None)


def _cgroup_folders(root: Path) -> list[Path]:
    folders = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        own = mount / group.strip("/")
        # In a container, the control group's folder may be missing. Its limits are then in files at the mount point.
        folders += [folder for folder in (own, *own.parents) if folder == mount or mount in folder.parents]
    return folders


def _clock(root: Path, fields: dict[str, str]) -> tuple[float | None, str]:
    """The clock in GHz that all cores can sustain (less than the turbo clock of a single core), and its source."""
    cpu0 = root / "sys/devices/system/cpu/cpu0"
    in_name = re.search(r"@\s*([\d.]+)\s*GHz", fields.get("model name", ""))
    candidates = (
        (_number(cpu0 / "cpufreq/base_frequency"), 1e6, "base clock, sysfs"),
        (_number(cpu0 / "acpi_cppc/nominal_freq"), 1e3, "nominal clock, sysfs"),
        (float(in_name[1]) if in_name else None, 1, "base clock, in the model name"),
        (float(fields["cpu MHz"]) if "cpu MHz" in fields else None, 1e3, "current clock, /proc/cpuinfo"),
        # A CPU that reports none of the above is an Arm server, which runs all cores at their maximal clock.
        (_number(cpu0 / "cpufreq/cpuinfo_max_freq"), 1e6, "maximal clock, sysfs"),
    )
    for value, per_ghz, source in candidates:
        if value:
            return value / per_ghz, source
    return None, ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    words = _text(path).split()
    return float(words[0]) if words and words[0].isdigit() else None


def peak_of_cpu(cpu: CpuFacts, dtype: str) -> Peak | Unknown:
    """The peak of a CPU by formula, or why it is unknown.

    >>> cpu = CpuFacts("a CPU", frozenset({"avx2", "fma"}), core_count=8, clock_ghz=3.0, clock_source="given")
    >>> peak_of_cpu(cpu, "fp32").flops_per_s
    768000000000.0
    """
    if not cpu.flags or cpu.core_count is None:
        return Unknown("the instruction sets and cores of this CPU cannot be read, because only Linux reports them")
    if cpu.clock_ghz is None:
        return Unknown(f"the clock of {cpu.name} cannot be read")
    rate = _best_rate(cpu, dtype)
    if rate is None:
        return Unknown(f"{cpu.name} has no instruction for {dtype} matmuls whose rate flopwatch knows")
    flop_per_cycle, how = rate
    return Peak(
        flops_per_s=cpu.core_count * cpu.clock_ghz * 1e9 * flop_per_cycle,
        device=cpu.name,
        dtype=dtype,
        source=f"{cpu.core_count:g} cores x {cpu.clock_ghz:g} GHz ({cpu.clock_source}) "
        f"x {flop_per_cycle:g} FLOP per cycle ({how})",
        kind="derived",
        confidence="low",
    )


def _best_rate(cpu: CpuFacts, dtype: str) -> tuple[float, str] | None:
    identity = dict(cpu.identity)
    best: tuple[float, str] | None = None
    for row in read_table("cpu_rates.json")["rates"]:
        if "flags" in row and not cpu.flags.issuperset(row["flags"]):
            continue
        if "arm_part" in row and identity.get("arm_part") != row["arm_part"]:
            continue
        if dtype not in row["flop_per_cycle"]:
            continue
        reason = _why_half_rate(cpu, row.get("flags", ()))
        flop_per_cycle = row["flop_per_cycle"][dtype] / (2 if reason else 1)
        if best is None or flop_per_cycle > best[0]:
            best = (flop_per_cycle, f"{row['isa']}: {reason or row['source']}")
    return best


def _why_half_rate(cpu: CpuFacts, flags: list[str]) -> str | None:
    identity = dict(cpu.identity)
    for core in read_table("cpu_rates.json")["half_rate_cores"]:
        if "name_contains" in core:
            is_one = core["name_contains"] in cpu.name
        else:
            is_family = identity.get("vendor_id") == core["vendor_id"] and identity.get("family") == str(core["family"])
            is_one = is_family and core["models"][0] <= int(identity.get("model") or -1) <= core["models"][1]
        if is_one and core["flag"] in flags:
            return str(core["why"])
    return None

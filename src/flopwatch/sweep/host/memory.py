"""Measures and limits the host memory of a trial's process tree. Standard library only.

**Measuring.** The result is the proportional set size (PSS) that the tree would have if the trial were alone on its
machine. A page that several processes of the trial share counts once. A page of a file, such as libtorch's code, counts
in full even if processes outside of the trial map it too, because otherwise the memory of a trial would shrink when
another trial starts. The memory of a single process is therefore its resident memory, whose peak the kernel records
(VmHWM). For several processes, /proc/PID/smaps_rollup has the PSS. Reading it takes about 10 ms for each GiB of mapped
memory, so it is read seldom. In between, the resident sizes are read, which takes 30 us.

**Limiting.** The supervisor samples the tree and kills it if it is above the limit. For a tree that grows too fast for
that, there is also a hard limit. If a cgroup can be created, the kernel kills the tree and counts its kills, so the
cause is certain. Otherwise RLIMIT_DATA makes large allocations fail in each process. It is set well above the limit,
because it also counts memory that is reserved but not used, such as thread stacks.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopwatch.process import descendants, keyed_lines
from flopwatch.records.trial import HostMethod

# psutil 7.2 finds the same processes and the same PSS (tests/sweep/host/test_psutil.py), but it has no peak of a
# process, no part of files in the PSS, and no lists of children: a search takes 4 (200 processes) to 35 times (2) as
# long. Importing it takes 28 ms, 16 % of what a supervisor needs to start.

_SEARCH_SECONDS, _SEARCH_SHARE = 1.0, 100.0
"""How long to wait between two searches for new processes: so many seconds, unless there is a memory limit, but at
least so many times as long as a search takes, so that searching uses at most 1 % of a core.
"""

_USUAL, _URGENT = (1.0, 100.0), (0.2, 10.0)
"""How long to wait between two readings of smaps_rollup: so many seconds, but at least so many times as long as one
reading takes. The urgent values apply if the limit seems exceeded, or if large processes have started, such as the
data loaders of an epoch, which are counted only from the next reading on.
"""

_WORTH_A_READING = 0.05  # new processes are large if they hold more than this share of the memory


@dataclass(frozen=True, slots=True)
class Resident:
    """The resident memory of one process in bytes, from /proc/PID/status."""

    now: int
    peak: int  # since the process started, or since the peak was reset
    anonymous: int  # the part of `now` that belongs to no file and no shared memory
    file: int  # the part of `now` that is pages of mapped files
    parent: int = 0


@dataclass(frozen=True, slots=True)
class HostPeak:
    """Peak host memory in bytes, and how it was measured; None if it could not be read."""

    bytes: int | None = None
    method: HostMethod | None = None


@dataclass(frozen=True, slots=True)
class TreeReading:
    """The memory of several processes together, each page counted once, and the anonymous memory of each process."""

    total: int
    anonymous: Mapping[int, int]
    method: HostMethod  # `rss` if the system does not report PSS, so that shared pages count once per process
    taken_at: float = 0.0  # by the monotonic clock
    cost_seconds: float = 0.0  # processor time of reading it

    def later(self, found: Mapping[int, Resident]) -> int:
        """The total, corrected by what these processes have allocated or freed since.

        Only changes of anonymous memory are included, because other pages are often shared and counted already. For
        the same reason, a process that started after the reading is left out.
        """
        since = (found[pid].anonymous - before for pid, before in self.anonymous.items() if pid in found)
        return self.total + sum(since)


class TreeMemory:
    """Samples the memory of all descendants of this process, which takes about 1 % of a core.

    `peak` includes the peaks that single processes had between two samples, so it may be too high. Whether a limit was
    reached is decided by `lower_bound_bytes`, which the descendants certainly had, without pages of files.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self.pids: Sequence[int] = ()
        self._seen: Mapping[int, Resident] = {}
        self._next_search = 0.0
        self._reading: TreeReading | None = None
        self._now_bytes, self._is_measured = 0, True
        self.peak = HostPeak()
        self.lower_bound_bytes = 0

    def sample(self) -> None:
        if time.monotonic() >= self._next_search:
            began = time.process_time()
            self.pids = descendants_from_lists(os.getpid())
            least = _SEARCH_SECONDS if self._limit_bytes is None else 0.0
            self._next_search = time.monotonic() + max(least, _SEARCH_SHARE * (time.process_time() - began))
        found = distinct({pid: memory for pid in self.pids if (memory := resident(pid)) is not None})
        if not found:
            return
        method = self._count(found)
        # For each process with a new peak since the last sample: how far the peak is above the present size.
        before = {pid: one.peak for pid, one in self._seen.items()}
        spikes = [one.peak - one.now for pid, one in found.items() if one.peak > before.get(pid, 0)]
        self._seen = found
        self._note_peak(self._now_bytes + max([0, *spikes]), method)
        self.lower_bound_bytes = max([self.lower_bound_bytes, *(one.peak - one.file for one in found.values())])

    def _note_peak(self, size: int, method: HostMethod) -> None:
        if size > (self.peak.bytes or 0):
            self.peak = HostPeak(size, method)

    def _count(self, found: Mapping[int, Resident]) -> HostMethod:
        """Set the present memory of the tree: the resident size of a single process, or an estimate for several."""
        sizes = [one.now for one in found.values()]
        if len(found) == 1:
            self._now_bytes, self._is_measured = sizes[0], True
            return "high_water"
        reading = self._reading
        self._is_measured = reading is None or time.monotonic() >= reading.taken_at + self._pause(reading, found)
        if reading is None or self._is_measured:
            reading = self._reading = self._read(found)
        self._now_bytes = max([reading.total if self._is_measured else reading.later(found), *sizes])
        return reading.method

    def _pause(self, reading: TreeReading, found: Mapping[int, Resident]) -> float:
        size = reading.later(found)
        new = sum(one.now for pid, one in found.items() if pid not in reading.anonymous)
        is_urgent = new > _WORTH_A_READING * size or (self._limit_bytes is not None and size > self._limit_bytes)
        least, share = _URGENT if is_urgent else _USUAL
        return max(least, share * reading.cost_seconds)

    def _read(self, found: Mapping[int, Resident]) -> TreeReading:
        began = time.process_time()
        reading = read_together(found)
        if reading.total > (self.peak.bytes or 0):
            # The processes are read one after the other. If one ends after it was read, its share of common pages is
            # counted twice, because the PSS of later processes then includes it. A second reading shows such an error.
            reading = min(reading, read_together(found), key=lambda each: each.total)
        return replace(reading, taken_at=time.monotonic(), cost_seconds=time.process_time() - began)

    def over_limit_bytes(self) -> int | None:
        """The memory of all descendants if it is above the limit; None if it is not, or if it was only estimated.

        Pages of mapped data files do not count, because the kernel can drop them.
        """
        if self._limit_bytes is None or self._now_bytes <= self._limit_bytes or not self._is_measured:
            return None
        held = self._now_bytes - max((mapped_data_bytes(pid) for pid in self._seen), default=0)
        return held if held > self._limit_bytes else None

    def note_ended(self, largest_bytes: int) -> None:
        """Include the peak of the largest process that has ended, as getrusage returns it."""
        self._note_peak(largest_bytes, "high_water")
        certain = largest_bytes - max((one.file for one in self._seen.values()), default=0)
        self.lower_bound_bytes = max(self.lower_bound_bytes, certain)


def descendants_from_lists(pid: int) -> list[int]:
    """All descendants of a process, from the kernel's lists of children, which is fast if there are many processes.

    Kernels without CONFIG_PROC_CHILDREN have no such lists, so all of /proc is read there.
    """
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return descendants(pid)
    found = [pid]
    for parent in found:  # it grows meanwhile
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                found += map(int, _whole(f"/proc/{parent}/task/{task}/children").split())
    return found[1:]


def resident(pid: int | str) -> Resident | None:
    lines = keyed_lines(f"/proc/{pid}/status")
    if b"VmRSS" not in lines:
        return None
    now, peak, anonymous, file = (_kibibytes(lines.get(key)) for key in (b"VmRSS", b"VmHWM", b"RssAnon", b"RssFile"))
    # The kernel updates VmHWM only now and then, so it may be below the present size.
    return Resident(now, max(now, peak), anonymous, file, parent=int(lines.get(b"PPid", b"0")))


def distinct(found: Mapping[int, Resident]) -> dict[int, Resident]:
    """Leave out children of vfork() that have not called exec yet, because they use the memory of their parent.

    They have the same memory figures as their parent. A child of fork() has its own page tables, so its figures differ.
    Counting them, a trial of 31 MiB that starts programs all the time was measured with 56 MiB.
    """
    return {
        pid: one
        for pid, one in found.items()
        if one.parent not in found or replace(found[one.parent], parent=one.parent) != one
    }


def read_together(found: Mapping[int, Resident]) -> TreeReading:
    """Read the memory of these processes from smaps_rollup, or their resident sizes if one cannot be read."""
    parts = {pid: part for pid in found if (part := _rollup_of(pid))}
    if not parts or any(resident(pid) is not None for pid in found.keys() - parts.keys()):
        return TreeReading(
            sum(one.now for one in found.values()), {pid: one.anonymous for pid, one in found.items()}, "rss"
        )
    files = sum(part.get(b"Pss_File", 0) for part in parts.values())
    others = sum(part[b"Pss"] for part in parts.values()) - files
    # PSS divides the pages of a file among all processes that map it, even in other trials. Here they count in full.
    has_file_pss = any(b"Pss_File" in part for part in parts.values())
    whole = max(found[pid].file for pid in parts) if has_file_pss else 0
    anonymous = {pid: part.get(b"Anonymous", 0) for pid, part in parts.items()}
    return TreeReading(others + max(files, whole), anonymous, "samples")


def _rollup_of(pid: int) -> dict[bytes, int]:
    """PSS and anonymous memory of a process in bytes; empty if the process is gone or reading it is not allowed."""
    lines = keyed_lines(f"/proc/{pid}/smaps_rollup").items()
    found = {key: _kibibytes(rest) for key, rest in lines if key in (b"Pss", b"Pss_File", b"Anonymous")}
    return found if b"Pss" in found else {}


_SHARED_MEMORY = (b"/dev/shm/", b"/memfd:", b"/SYSV", b"/dev/zero")


def mapped_data_bytes(pid: int | str) -> int:
    """Resident bytes of mapped files that contain no code, such as a dataset. The call takes tens of ms."""
    by_file: dict[bytes, int] = {}
    programs: set[bytes] = set()
    file = b""
    for line in _whole(f"/proc/{pid}/smaps").splitlines():
        words = line.split()
        if b"-" in words[0] and not words[0].endswith(b":"):  # a mapping: address, rights, offset, device, inode, path
            is_file = len(words) > 5 and words[4] != b"0" and not words[5].startswith(_SHARED_MEMORY)
            file = words[5] if is_file else b""
            if b"x" in words[1]:
                programs.add(file)
        elif file and words[0] in (b"Rss:", b"Anonymous:"):
            sign = 1 if words[0] == b"Rss:" else -1
            by_file[file] = by_file.get(file, 0) + sign * int(words[1]) * 1024
    return sum(size for name, size in by_file.items() if name not in programs)


def _whole(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        return stream.read()
    return b""


def _kibibytes(rest: bytes | None) -> int:
    return int(rest.split()[0]) * 1024 if rest else 0


_V1_ROOT = Path("/sys/fs/cgroup/memory")
_V2_ROOT = Path("/sys/fs/cgroup")
_LEAST_SLACK_BYTES = 1 << 30  # RLIMIT_DATA is at least this far above the limit, because it counts unused memory too


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A hard limit of a worker's memory. `kind` is `cgroup`, `rlimit` or `none`."""

    kind: str
    limit_bytes: int | None = None
    folder: Path | None = None

    def join(self) -> None:
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text("0")
        if self.kind == "rlimit" and self.limit_bytes is not None:
            import resource  # Windows has no such module

            data_bytes = self.limit_bytes + max(self.limit_bytes // 2, _LEAST_SLACK_BYTES)
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))

    def oom_kills(self) -> int:
        return read_oom_kills(self.folder) if self.folder else 0

    def facts(self, life_peak: HostPeak) -> dict[str, Any]:
        """What a result says of the limit: how it was enforced, and the peaks by the samples and by the kernel."""
        if self.kind == "none":
            return {}
        charged_bytes = None
        for name in ("memory.peak", "memory.max_usage_in_bytes"):  # of cgroups version 2 and 1
            with contextlib.suppress(OSError, ValueError, TypeError):
                charged_bytes = int((self.folder / name).read_text())  # type: ignore[operator]
        facts = {"by": self.kind, "limit_bytes": self.limit_bytes, "life_bytes": life_peak.bytes}
        return {**facts, "charged_bytes": charged_bytes}

    def close(self) -> None:
        if self.folder:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def limit_memory(limit_bytes: int | None, name: str) -> MemoryLimit:
    """A cgroup with this limit if this process can create one, else a resource limit; neither if the limit is None."""
    if limit_bytes is None:
        return MemoryLimit("none")
    for parent in group_places():
        folder = parent / f"flopwatch-{os.getpid()}-{name}"
        if _make_group(folder, limit_bytes):
            return MemoryLimit("cgroup", limit_bytes, folder)
    return MemoryLimit("rlimit", limit_bytes)


def own_oom_kills() -> int:
    """How many processes the kernel has killed for memory in this process's cgroups (a container, a Slurm step)."""
    return sum(read_oom_kills(folder) for folder in own_groups())


def read_oom_kills(folder: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in (folder / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _make_group(folder: Path, limit_bytes: int) -> bool:
    try:
        folder.mkdir()
    except OSError:
        return False
    limits = ("memory.max", "memory.limit_in_bytes")
    file = next((folder / limit for limit in limits if (folder / limit).exists()), None)
    try:
        if file is None:
            raise OSError("the memory controller is not enabled in this cgroup")
        file.write_text(str(limit_bytes))
        # With swap, the kernel would swap instead of enforcing the limit. Not every kernel has these files.
        for swap, value in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", limit_bytes)):
            with contextlib.suppress(OSError):
                (folder / swap).write_text(str(value))
    except OSError:
        folder.rmdir()
        return False
    return True


def group_places() -> list[Path]:
    """Folders in which a trial's cgroup may be created: beside this process's cgroup, or inside it.

    cgroup version 2 forbids children of a cgroup that has processes, so the place beside it comes first.
    """
    return [place for own in own_groups() for place in ([own.parent, own] if own != _V2_ROOT else [own])]


def own_groups() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append(_V1_ROOT / path.lstrip("/"))
        elif not controllers and (_V2_ROOT / "cgroup.controllers").exists():
            found.append(_V2_ROOT / path.lstrip("/"))
    return [folder for folder in found if folder.is_dir()]

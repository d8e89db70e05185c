"""The devices of this host, read without loading torch. Light: supervisors tell where a command ran."""

import os
from functools import cache
from pathlib import Path
from typing import Any

OF_THIS_HOST = ("cpu", "gpus", "driver")


@cache
def host_facts() -> dict[str, Any]:
    """`cpu`, and `gpus` and `driver` where there are some."""
    found: dict[str, Any] = {"cpu": _cpu()}
    gpus = [_line(file, "Model") for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    if gpus:
        found["gpus"] = gpus
        found["driver"] = Path("/proc/driver/nvidia/version").read_text().split("Module")[-1].split()[0]
    return found


def _cpu() -> str:
    name = _line(Path("/proc/cpuinfo"), "model name")
    if not name:
        import platform  # 5 ms that supervisors do without

        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} threads"


def _line(file: Path, key: str) -> str:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(key)), "")

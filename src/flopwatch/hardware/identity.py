"""Which device of this machine a torch device is, in words that drivers understand."""

import os
from typing import Any

import torch

from flopwatch.hardware.counters.protocol import DeviceIdentity
from flopwatch.hardware.cpu import read_cpu
from flopwatch.hardware.device import find_device


def identify(device: torch.device | str | None = None, torch_module: Any = torch) -> DeviceIdentity:
    """What the sources of hardware counters need to find a device; None is the current accelerator, or the CPU.

    >>> identify("cpu").kind
    'cpu'

    Args:
        device: A device or its name, such as `cuda:1`.
        torch_module: The `torch` module to use; tests pass a fake one.
    """
    wanted = find_device(device, torch_module)
    if wanted.type == "cpu":
        return DeviceIdentity("cpu", read_cpu().name)
    if wanted.type != "cuda":
        return DeviceIdentity(wanted.type, wanted.type)
    properties = torch_module.cuda.get_device_properties(wanted)
    uuid = getattr(properties, "uuid", None)
    return DeviceIdentity(
        "cuda" if torch_module.version.hip is None else "rocm",
        properties.name,
        None if uuid is None else str(uuid),
        _pci_bus_id(properties),
        _visible_as(wanted.index if wanted.index is not None else torch_module.cuda.current_device()),
    )


def _pci_bus_id(properties: Any) -> str | None:
    """The PCI address; torch before 2.8 does not tell it."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _visible_as(index: int) -> str | None:
    entries = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return entries[index] or None if index < len(entries) else None

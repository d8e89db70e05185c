"""A stand-in for NVIDIA's driver library, compiled by gcc, which the real nvidia-ml-py talks to."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
FUNCTIONS = (
    *("init", "uuid", "pci", "mig_mode", "clock", "power", "energy"),
    *("gpm_support", "gpm_sample", "gpm_metrics"),
)
VALUES = (
    *("has_gpm", "tensor", "sm", "dram", "sm_clock", "milliwatts", "millijoules"),
    *("is_lost", "is_divided"),
)
LOADED_H100 = {
    "has_gpm": 1,
    "tensor": 42.5,
    "sm": 88,
    "dram": 55,
    "sm_clock": 1755,
    "milliwatts": 650_000,
    "millijoules": 5_000_000,
}
"""An H100 that trains: percent, MHz, mW and mJ, the units of NVML."""

has_compiler = shutil.which("gcc") is not None


def build(folder: Path, driver: int = 580) -> Path:
    """Compile the library of a driver version; returns its file, named as the driver's is."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-O2", f"-DDRIVER={driver}", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


class StandInNvml:
    """Sets up the GPUs of a loaded stand-in."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.fake_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
        self.library.fake_instance_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
        self.library.fake_reset()
        self._instances = 0

    def gpu(self, uuid: str, pci: str = "0000:3b:00.0", **values: float) -> int:
        """Add a GPU; returns its index."""
        index = int(self.library.fake_gpu(f"GPU-{uuid}".encode(), pci.encode()))
        self.set(index, **values)
        return index

    def instance(self, gpu: int, instance_id: int, uuid: str, **values: float) -> None:
        """Add a MIG instance of a GPU, which then is divided."""
        self.library.fake_instance(gpu, instance_id, f"MIG-{uuid}".encode())
        for name, value in values.items():
            self.library.fake_instance_set(self._instances, VALUES.index(name), value)
        self._instances += 1
        self.set(gpu, is_divided=1)

    def set(self, index: int, **values: float) -> None:
        for name, value in values.items():
            self.library.fake_set(index, VALUES.index(name), value)

    def fail(self, function: str, error: int) -> None:
        self.library.fake_fail(FUNCTIONS.index(function), error)

    def calls(self, function: str) -> int:
        return int(self.library.fake_calls(FUNCTIONS.index(function)))

    @property
    def inits(self) -> int:
        """How often it is initialised and not shut down."""
        return int(self.library.fake_inits())

    @property
    def samples(self) -> int:
        """Number of GPM samples that are allocated."""
        return int(self.library.fake_samples())


@contextmanager
def connected(library: Path) -> Iterator[StandInNvml]:
    """Make nvidia-ml-py use the stand-in within the block, without a change of the library path."""
    import pynvml

    nvml: Any = pynvml
    before = nvml.nvmlLib
    stand_in = StandInNvml(library)
    nvml.nvmlLib = stand_in.library
    nvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield stand_in
    finally:
        nvml.nvmlLib = before
        nvml._nvmlGetFunctionPointer_cache.clear()

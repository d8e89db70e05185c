"""torchvision, timm and diffusers, in a folder of their own and without their dependencies.

torchvision on PyPI is built for CUDA, and its compiled ops do not load beside a torch for CPUs. Its models are Python
and need none of them; only the two ops whose shapes it registers on import must have a schema.
"""

import subprocess
import sys
from pathlib import Path

import torch

CACHE = Path(__file__).resolve().parents[2] / ".cache"
FOLDER = CACHE / "zoo"
PINS = ("torchvision==0.28.0", "timm==1.0.30", "diffusers==0.42.1")
"""torchvision 0.28 is the release made with torch 2.13."""

_SCHEMAS = ("nms", "qnms")
_library: list[torch.library.Library] = []


def install() -> None:
    """Once: pip into the folder; later calls find it there."""
    if all((FOLDER / pin.split("==")[0]).is_dir() for pin in PINS):
        return
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), *PINS]
    subprocess.run(command, check=True)


def load() -> None:
    """Makes the packages importable in this process; those already installed elsewhere win."""
    if _library or not FOLDER.is_dir():
        return
    sys.path.append(str(FOLDER))
    library = torch.library.Library("torchvision", "DEF")
    for name in _SCHEMAS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.append(library)

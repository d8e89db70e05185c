"""A stand-in for a shared file system: late visibility, no flock; see `nfs_standin/sitecustomize.py`."""

import os
import sys
from pathlib import Path

import pytest

STANDIN = Path(__file__).parent / "nfs_standin"


def on_nfs(root, seconds):
    """The environment of processes that see `root` as an NFS client does, with so many seconds of attribute caching."""
    if sys.version_info < (3, 11) or sys.platform != "linux":
        pytest.skip("pathlib keeps functions of its own before Python 3.11")
    server = Path(root).with_name(f"{Path(root).name}-server")
    server.mkdir(exist_ok=True)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(STANDIN), os.environ.get("PYTHONPATH", "")])),
        "NFS_STANDIN_ROOT": str(root),
        "NFS_STANDIN_SECONDS": str(seconds),
        "NFS_STANDIN_SERVER": str(server),
        "NFS_STANDIN_HOST": "login",
        "FLOPWATCH_VISIBLE_SECONDS": str(1.5 * seconds),
    }

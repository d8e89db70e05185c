import os
import subprocess
import sys

import pytest

from testbeds.real_ray import need_ray


@pytest.mark.slow
def test_ray_is_imported_beside_an_amdsmi_without_rocm_here_and_in_child_processes(tmp_path):
    """As amdsmi 7.0.2 does: complains on stdout, then raises what Ray does not catch."""
    need_ray()
    (tmp_path / "amdsmi.py").write_text("print('Unable to find libamd_smi.so'); {}['libamd_smi.so']")
    code = (
        "import os, subprocess, sys\n"
        "from flopwatch.sweep.engines.ray_internals import import_ray, local_environment\n"
        "environment = {**os.environ, **local_environment()}\n"
        "import_ray()\n"
        "subprocess.run([sys.executable, '-c', 'import ray'], env=environment, check=True)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == ""

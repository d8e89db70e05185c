"""psutil, which reads /proc on its own, finds the same processes and the same memory as flopwatch's lines."""

import os
import subprocess
import sys

import psutil
import pytest

from flopwatch.process import descendants, read_stat
from flopwatch.sweep.host.memory import descendants_from_lists, read_together, resident

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="no PSS")]

MIB = 2**20

TREE = f"""
import os, sys, time
held = bytearray(os.urandom(1)) * (50 * {MIB})
for _ in range(int(sys.argv[1]) - 1):
    if not os.fork():
        mine = b"x" * {MIB}
        print(".", flush=True)
        time.sleep(600)
print(".", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=[2, 20, 200])
def root(request):
    process = subprocess.Popen([sys.executable, "-c", TREE, str(request.param)], stdout=subprocess.PIPE)
    for _ in range(request.param):
        process.stdout.readline()
    yield process.pid
    for pid in [*descendants(process.pid), process.pid]:
        os.kill(pid, 9)
    process.communicate()


def test_the_tree_and_its_memory(root):
    below = psutil.Process(root).children(recursive=True)
    pids = [process.pid for process in below]
    assert sorted(pids) == sorted(descendants(root)) == sorted(descendants_from_lists(root))
    found = {pid: resident(pid) for pid in pids}
    assert {process.pid: process.memory_info().rss for process in below} == pytest.approx(
        {pid: memory.now for pid, memory in found.items()}, abs=MIB
    )
    # flopwatch counts a page of a file in full, psutil divides it among all processes, also those outside of the tree
    most_of_files = max(memory.file for memory in found.values())
    proportional = sum(process.memory_full_info().pss for process in below)
    assert proportional - MIB < read_together(found).total < proportional + most_of_files + MIB


def test_a_process_began_when_psutil_says(root):
    boot = psutil.boot_time()
    ticks = read_stat(root).start_ticks / os.sysconf("SC_CLK_TCK")
    assert psutil.Process(root).create_time() - boot == pytest.approx(ticks, abs=1.5), (
        "psutil's boot is in whole seconds"
    )
    assert psutil.Process(root).ppid() == read_stat(root).parent == os.getpid()

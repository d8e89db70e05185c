"""Host memory of a trial is that of its whole tree, each page once, and the same figure in record, fit and limit."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from flopwatch.process import descendants
from flopwatch.records.sweep_results import read_result
from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.records.trial_files import trial_folder
from flopwatch.sweep.fit import probe_of
from flopwatch.sweep.folder import Trial, held_folder, prepare
from flopwatch.sweep.host import memory as tree_memory
from flopwatch.sweep.host.memory import (
    Resident,
    TreeMemory,
    descendants_from_lists,
    distinct,
    limit_memory,
    mapped_data_bytes,
)
from flopwatch.sweep.supervisor.supervise import supervise

pytestmark = pytest.mark.slow

MIB = 2**20

LOADERS = f"""
import os, sys, time
count, shared, own = (int(word) for word in sys.argv[1:4])
held = bytearray(os.urandom(1)) * (shared * {MIB})
for _ in range(count):
    if not os.fork():
        mine = b"x" * (own * {MIB})
        time.sleep(600)
time.sleep(float(sys.argv[4]))
os._exit(0)
"""


@pytest.fixture
def sweep(tmp_path):
    with held_folder(tmp_path / "sweep"):
        (tmp_path / "loaders.py").write_text(LOADERS)
        yield tmp_path / "sweep"


def ready(sweep, words, name="one", limit=None):
    command = f"exec {sys.executable} {sweep.parent / 'loaders.py'} {words}"
    spec = TrialSpec("command", "tiny", 3, 7, command=command, limits=Limits(60.0, None, limit))
    prepare(Trial(sweep, name, "key", spec))
    return name


def pss_bytes(mark):
    """By the kernel, asked by this test: PSS of every process that carries the trial's mark."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/smaps_rollup") as rollup:
                if mark.encode() in environ.read().split(b"\0"):
                    total += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) * 1024
        except (OSError, StopIteration):
            continue
    return total


def start(sweep, name):
    return subprocess.Popen([sys.executable, "-m", "flopwatch.sweep.supervisor", str(sweep), name])


def result_of(sweep, name):
    return read_result(trial_folder(sweep, name) / "result.json")


def supervised(sweep, name):
    child = os.fork()  # with what the test has patched, and without the test's own children below it
    if not child:
        try:
            supervise(sweep, name)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return result_of(sweep, name)


@pytest.fixture(params=["cgroup", "rlimit"])
def kind(request, monkeypatch):
    if request.param == "rlimit":
        monkeypatch.setattr("flopwatch.sweep.host.memory.group_places", list)
    else:
        probe = limit_memory(2**28, "probe")
        probe.close()
        if probe.kind != "cgroup":
            pytest.skip("no cgroup may be made here")
    return request.param


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="no smaps_rollup")
def test_what_eight_loaders_share_counts_once(sweep):
    name = ready(sweep, "8 500 5 3")
    supervisor = start(sweep, name)
    mark, truth = f"FLOPWATCH_TRIAL_DIR={trial_folder(sweep, name).resolve()}", 0
    before = 0
    while supervisor.poll() is None:
        now = pss_bytes(mark)  # one after the other: a fork in between would count what they share twice
        truth, before = max(truth, min(before, now)), now
        time.sleep(0.1)
    result = result_of(sweep, name)
    assert truth > 540 * MIB
    assert result.measured.memory.peak_bytes == pytest.approx(truth, rel=0.05)


def test_four_children_of_400_mib_are_over_a_limit_of_600(sweep, kind):
    # The kernel kills a child and leaves the parent; our own look ends the trial, however long it would have lived.
    seconds = 4 if kind == "cgroup" else 50
    result = supervised(sweep, ready(sweep, f"4 1 400 {seconds}", limit=600 * MIB))
    assert result.outcome == "oom_host", result.reason
    seen = result.evidence["memory_limit"]["life_bytes"]
    assert seen > 600 * MIB or "the kernel killed" in result.reason


def test_record_fit_and_limit_say_the_same(sweep, kind):
    free = supervised(sweep, ready(sweep, "4 200 40 2.5"))
    peak = free.measured.memory.peak_bytes
    assert 360 * MIB < peak < 450 * MIB
    above = supervised(sweep, ready(sweep, "4 200 40 2.5", name="above", limit=int(1.05 * peak)))
    below = supervised(sweep, ready(sweep, "4 200 40 2.5", name="below", limit=int(0.95 * peak)))
    assert (above.outcome, below.outcome) == ("ok", "oom_host"), (above.reason, below.reason)
    assert above.measured.memory.peak_bytes == pytest.approx(peak, rel=0.05)
    assert probe_of(above).peak_bytes == above.measured.memory.peak_bytes


MAPPER = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
    total = sum(mapped[at] for at in range(0, len(mapped), 4096))
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def child(monkeypatch):
    """Starts programs below a process that looks, and ends them."""
    started = []
    # Servers of other tests are children of this process too.
    monkeypatch.setattr(tree_memory, "descendants_from_lists", lambda pid: [process.pid for process in started])

    def start_child(*words):
        started.append(subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start_child
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_pages_of_a_mapped_dataset_are_told_and_are_no_reason_to_end_a_trial(child, tmp_path):
    data = tmp_path / "dataset"
    data.write_bytes(bytes(200 * MIB))
    process = child("-c", MAPPER, str(data))
    assert mapped_data_bytes(process.pid) == pytest.approx(200 * MIB, rel=0.02)
    memory = TreeMemory(limit_bytes=100 * MIB)
    memory.sample()
    assert memory.peak.bytes > 200 * MIB
    assert memory.over_limit_bytes() is None


HOLDER = f"""
import time
held = b"x" * (150 * {MIB})
print("ready", flush=True)
time.sleep(60)
"""


def test_what_a_process_itself_holds_is(child):
    child("-c", HOLDER)
    memory = TreeMemory(limit_bytes=100 * MIB)
    memory.sample()
    assert memory.over_limit_bytes() > 150 * MIB
    assert memory.peak.method == "high_water"


def test_where_the_kernel_does_not_tell_what_is_shared_the_record_says_so(child, monkeypatch):
    child("-c", HOLDER)
    child("-c", HOLDER)
    memory = TreeMemory()
    memory.sample()
    assert memory.peak.method == "samples"
    assert memory.peak.bytes > 300 * MIB
    monkeypatch.setattr(tree_memory, "_rollup_of", lambda pid: {})
    memory = TreeMemory()
    memory.sample()
    assert memory.peak.method == "rss"
    assert memory.peak.bytes > 300 * MIB


def test_a_process_that_ends_while_the_others_are_read_does_not_count_twice(child, monkeypatch):
    child("-c", HOLDER)
    child("-c", HOLDER)
    read, told = tree_memory.read_together, []

    def torn_at_first(found):
        reading = read(found)
        told.append(reading.total)
        return replace(reading, total=2 * reading.total) if len(told) == 1 else reading

    monkeypatch.setattr(tree_memory, "read_together", torn_at_first)
    memory = TreeMemory(limit_bytes=int(400 * MIB))
    memory.sample()
    assert memory.over_limit_bytes() is None
    assert 300 * MIB < memory.peak.bytes < 400 * MIB


def test_a_child_that_still_runs_in_its_parents_memory_is_not_counted():
    parent = Resident(100, 100, 90, 10, parent=1)
    same, copy = replace(parent, parent=5), replace(parent, parent=5, file=4)
    assert set(distinct({5: parent, 6: same, 7: copy})) == {5, 7}


def test_the_lists_of_children_name_the_same_processes_as_the_whole_of_proc(child):
    process = child("-c", "import subprocess as s; p = s.Popen(['sleep', '60']); print('ready', flush=True); p.wait()")
    (below,) = descendants(process.pid)
    assert descendants_from_lists(process.pid) == [below]
    assert {process.pid, below} <= set(descendants_from_lists(os.getpid()))
    os.kill(below, 9)

"""Kill runner, supervisor, guard, worker or all at once: nothing runs twice, nothing finished is lost or left.

    python benchmarks/reliability/never_twice.py --engine local --kills 20
    python benchmarks/reliability/never_twice.py --engine slurm --kills 20      # a real Slurm is started and taken down
    python benchmarks/reliability/never_twice.py --engine ray --kills 20

They are killed at random moments. Every trial takes a lock of its own, an exclusive file in a local folder with its
process in it, and notes it when somebody else has it: two at once are shown by the trials themselves. Shell trials
start children in sessions of their own; torch trials are the smallest model there is.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from flopwatch.process import read_stat
from flopwatch.records.sweep_results import read_result, read_results

WHOM = ("runner", "supervisor", "guard", "worker", "all")
"""`guard` is the process that would end the trial of a killed supervisor, every second time with that supervisor; `all`
is the runner with all supervisors, every second time with the guards and all processes of trials too."""
_PATIENCE_SECONDS = 10.0

_LOCKED = """
import os, sys
folder, number, me = sys.argv[1:]

def marks(pid):
    try:
        content = open(f"/proc/{pid}/environ", "rb").read().split(b"\\0")
    except OSError:
        return {}
    return dict(word.split(b"=", 1) for word in content if word.startswith(b"FLOPWATCH_TRIAL_"))

def twice(what):
    with open(folder + "/twice.txt", "a") as told:
        told.write(f"trial {number}: {what}\\n")

mine = marks(me)
lock = f"{folder}/lock.{number}"
try:
    handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
except FileExistsError:
    holder = open(lock).read()
    if holder and marks(holder).get(b"FLOPWATCH_TRIAL_DIR") == mine[b"FLOPWATCH_TRIAL_DIR"]:
        twice(f"{holder} has the lock and lives")
    handle = os.open(lock, os.O_TRUNC | os.O_WRONLY)
os.write(handle, me.encode())
for pid in filter(str.isdigit, os.listdir("/proc")):
    other = marks(pid)
    is_same_trial = other.get(b"FLOPWATCH_TRIAL_DIR") == mine[b"FLOPWATCH_TRIAL_DIR"]
    if is_same_trial and other.get(b"FLOPWATCH_TRIAL_ATTEMPT") != mine.get(b"FLOPWATCH_TRIAL_ATTEMPT"):
        twice(f"process {pid} of another attempt runs")
"""
# By a variable: files that a command names are part of the trial's identity, and these change.
_SHELL = (
    "F={folder}; {python} -I -S $F/locked.py $F {batch_size} $$; echo {batch_size} >> $F/starts.txt; "
    "setsid sleep 60 & sleep 60 & sleep $(( {batch_size} % 2 + 1 )); "
    "rm -f $F/lock.{batch_size}; echo {batch_size} >> $F/ends.txt"
)

TRAINER = '''
import os, subprocess, sys
from flopwatch.sweep.trainers.builtin import StandardTrainer

FOLDER = os.path.dirname(os.path.abspath(__file__))
NUMBER = os.environ["FLOPWATCH_BATCH_SIZE"]
subprocess.run([sys.executable, "-I", "-S", FOLDER + "/locked.py", FOLDER, NUMBER, str(os.getpid())], check=True)
with open(FOLDER + "/starts.txt", "a") as starts:
    starts.write(NUMBER + "\\n")
subprocess.Popen(["setsid", "sleep", "60"])


class Locked(StandardTrainer):
    """The standard trainer, behind the lock that was taken when this module was loaded."""
'''


@dataclass
class Tally:
    """What the kills did."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WHOM, 0))
    met_a_running_trial: int = 0
    trials: int = 0
    starts: int = 0
    runners: int = 0
    twice: list[str] = field(default_factory=list)
    finished_and_run_again: list[str] = field(default_factory=list)
    killed_between_last_line_and_result: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    slowest_clearing_seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.twice or self.finished_and_run_again or self.left or self.undone)


@dataclass(frozen=True)
class Campaign:
    """Attributes:
    folder: Of everything.
    engine: Words of the command line.
    kind: `shell` or `torch`.
    """

    folder: Path
    engine: list[str]
    kind: str
    trials: int

    @property
    def sweep(self) -> Path:
        return self.folder / "sweep"

    def start(self) -> "subprocess.Popen[bytes]":
        sizes = ",".join(map(str, range(1, self.trials + 1)))
        words = [f"--batch-size={sizes}", f"--seq-len={1 if self.kind == 'shell' else 8}", "--output", "sweep"]
        with (self.folder / "errors.txt").open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "flopwatch", "sweep", *words, *self._trainer(), *self.engine],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "FLOPWATCH_SLOT_DIR": str(self.folder / "slots"), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def _trainer(self) -> list[str]:
        if self.kind == "torch":
            settings = ["--steps=2", "warmup_steps=1", "device=cpu", "--model=tiny"]
            return ["--trainer", "locked_trainer:Locked", *settings]
        return ["--command", _SHELL.replace("{python}", sys.executable).replace("{folder}", str(self.folder))]


def running_trials(sweep: Path) -> dict[str, list[int]]:
    """Processes by trial, those of workers only: supervisors do not carry the mark."""
    found: dict[str, list[int]] = {}
    mark = f"FLOPWATCH_TRIAL_DIR={sweep.resolve()}/trials/".encode()
    for entry in Path("/proc").iterdir():
        try:
            values = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0] if values else "Z"
        except OSError:
            continue
        for value in values:
            if value.startswith(mark) and state != "Z":
                found.setdefault(value.removeprefix(mark).decode(), []).append(int(entry.name))
    return found


def supervisors(sweep: Path) -> list[int]:
    """Processes that watch a trial of this sweep, by their command line, without the guards that are their parents."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            # Engines name the folder as they were told it, or in full.
            named = any(word.startswith(str(sweep).encode()) for word in words)
            is_here = named or (b"sweep" in words and Path(os.readlink(entry / "cwd")) == sweep.parent)
            if is_here and _watches_a_trial(words):
                found.append(int(entry.name))
    guards = set(map(_parent, found))
    return [pid for pid in found if pid not in guards]


def _watches_a_trial(words: list[bytes]) -> bool:
    is_job = b"trial" in words and b"--attempt" in words  # of Slurm
    return is_job or b"flopwatch.sweep.supervisor" in words


def _guard_of(supervisor: int) -> list[int]:
    guard = _parent(supervisor) or 0
    with contextlib.suppress(OSError):
        return [guard] if _watches_a_trial(Path(f"/proc/{guard}/cmdline").read_bytes().split(b"\0")) else []
    return []


def _parent(pid: int) -> int | None:
    stat = read_stat(pid)
    return None if stat is None else stat.parent


def strike(campaign: Campaign, runner: "subprocess.Popen[bytes]", whom: str, draw: random.Random) -> set[int]:
    """SIGKILL; the processes of trials that were hit by it."""
    trials, watching, is_harder = running_trials(campaign.sweep), supervisors(campaign.sweep), draw.random() < 0.5
    victims: list[int] = []
    if whom in ("supervisor", "guard") and watching:
        victims = draw.sample(watching, 1)
        trials = {name: pids for name, pids in trials.items() if victims[0] in map(_parent, pids)}
        if whom == "guard":
            victims = [*_guard_of(victims[0]), *(victims if is_harder else [])]
    elif whom == "worker":
        victims = [min(pids) for pids in trials.values()][:1]
    elif whom == "all":
        guards = [guard for pid in watching for guard in _guard_of(pid)]
        below = [pid for pids in trials.values() for pid in pids]
        victims = [*watching, *guards, *below] if is_harder else watching
    if whom in ("runner", "all"):
        victims = [runner.pid, *victims]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none notices the end of another
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, number)
    return {pid for pids in trials.values() for pid in pids} if victims else set()


def clearing_seconds(campaign: Campaign, hit: set[int], tally: Tally) -> None:
    """After supervisors or guards were killed: nothing of it may be left, without anybody's resume."""
    began = time.monotonic()
    while left := hit & {pid for pids in running_trials(campaign.sweep).values() for pid in pids}:
        if time.monotonic() - began > _PATIENCE_SECONDS:
            tally.left += left
            return
        time.sleep(0.05)
    tally.slowest_clearing_seconds = max(tally.slowest_clearing_seconds, time.monotonic() - began)


def _until_a_trial_runs(campaign: Campaign, runner: "subprocess.Popen[bytes]") -> None:
    """Most kills would otherwise fall into the start of a runner."""
    deadline = time.monotonic() + 2 * _PATIENCE_SECONDS
    while not running_trials(campaign.sweep) and runner.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def run(campaign: Campaign, kills: int, seed: int, longest: float) -> Tally:
    draw, tally = random.Random(seed), Tally()
    wanted = [whom for whom in WHOM for _ in range(kills)]
    draw.shuffle(wanted)
    runner: subprocess.Popen[bytes] | None = None
    while wanted:
        if runner is None or runner.poll() is not None:
            if runner is not None and runner.returncode in (0, 1):  # all done before the last kill
                campaign = replace(campaign, trials=campaign.trials + 10)
            runner = campaign.start()
            tally.runners += 1
            _until_a_trial_runs(campaign, runner)
        with contextlib.suppress(subprocess.TimeoutExpired):
            runner.wait(draw.uniform(0.0, longest))
            continue
        whom = wanted.pop()
        hit = strike(campaign, runner, whom, draw)
        tally.met_a_running_trial += bool(hit)
        tally.kills[whom] += 1
        if whom in ("runner", "all"):
            runner.wait()
        if whom in ("supervisor", "guard", "all"):
            clearing_seconds(campaign, hit, tally)
        print(f"{sum(tally.kills.values())} kills, last {whom}, {_done(campaign)} ok", file=sys.stderr, flush=True)
    _finish(campaign, runner, tally)
    return tally


def _is_ok(file: Path) -> bool:
    result = read_result(file)
    return result is not None and result.outcome == "ok"


def _done(campaign: Campaign) -> int:
    with contextlib.suppress(Exception):
        return sum(result.outcome == "ok" for result in read_results(campaign.sweep).values())
    return 0


def _finish(campaign: Campaign, runner: "subprocess.Popen[bytes] | None", tally: Tally) -> None:
    """Resume until it is green: a killed worker is a `crash`, which is run again when asked for."""
    if runner is not None:
        runner.wait()
    for words in ([], ["--only", "failed"], []):
        last = replace(campaign, engine=[*campaign.engine, *words]).start()
        status = last.wait()
    if status != 0:
        tally.undone.append(f"the last run left with {status}: {(campaign.folder / 'errors.txt').read_text()[-1500:]}")
    results = read_results(campaign.sweep)
    tally.trials = campaign.trials
    tally.undone += [f"{name}: {result.outcome}" for name, result in results.items() if result.outcome != "ok"]
    if len(results) < campaign.trials:
        tally.undone.append(f"{campaign.trials - len(results)} trials have no result")
    tally.finished_and_run_again = [
        str(file.parent) for file in campaign.sweep.glob("earlier/*/result.json") if _is_ok(file)
    ]
    if campaign.kind == "shell":
        ends = (campaign.folder / "ends.txt").read_text().splitlines()
        tally.killed_between_last_line_and_result = sorted({size for size in ends if ends.count(size) > 1})
    tally.starts = len((campaign.folder / "starts.txt").read_text().splitlines())
    if (campaign.folder / "twice.txt").exists():
        tally.twice = (campaign.folder / "twice.txt").read_text().splitlines()
    tally.left += [pid for pids in running_trials(campaign.sweep).values() for pid in pids]
    tally.left += supervisors(campaign.sweep)


@contextlib.contextmanager
def cluster(engine: str) -> Iterator[list[str]]:
    """What the command line needs for this engine; a Slurm or Ray is up meanwhile."""
    if engine == "slurm":
        from testbeds.real_slurm import real_slurm

        with (
            tempfile.TemporaryDirectory(prefix="flopwatch-slurm-", ignore_cleanup_errors=True) as folder,
            real_slurm(Path(folder)) as environment,
        ):
            os.environ.update(environment)
            yield ["--engine", "slurm"]
    elif engine == "ray":
        from testbeds.real_ray import ray_cluster

        with ray_cluster(cpus=2) as head:
            yield ["--engine", "ray", "--engine-option", f"address={head.address}"]
    else:
        yield ["--engine", "local", "--jobs", "2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="local", choices=["local", "slurm", "ray"])
    parser.add_argument("--kills", type=int, default=20, help="Of each kind of victim.")
    parser.add_argument("--kinds", nargs="+", default=["shell", "torch"])
    parser.add_argument("--trials", type=int, default=None, help="Default: enough that the kills do not run out.")
    parser.add_argument("--longest", type=float, default=None, help="Most seconds between two kills.")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with cluster(asked.engine) as words:
        tallies = {kind: _one(asked, kind, words) for kind in asked.kinds}
    for kind, tally in tallies.items():
        print(kind, "clean" if tally.is_clean else "NOT CLEAN", tally)
    if not all(tally.is_clean for tally in tallies.values()):
        sys.exit(1)


def make_ready(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "locked.py").write_text(_LOCKED)
    (folder / "locked_trainer.py").write_text(TRAINER)


def _one(asked: argparse.Namespace, kind: str, words: list[str]) -> Tally:
    folder = Path(tempfile.mkdtemp(prefix=f"never-twice-{asked.engine}-{kind}-"))
    make_ready(folder)
    trials = asked.trials or max(4, asked.kills * (4 if kind == "shell" else 2))
    longest = asked.longest or (2.0 if kind == "shell" else 8.0)
    tally = run(Campaign(folder, words, kind, trials), asked.kills, asked.seed, longest)
    if tally.is_clean:
        shutil.rmtree(folder)
    else:
        print(f"see {folder}", file=sys.stderr)
    return tally


if __name__ == "__main__":
    main()

"""Starts the agents of a trial with several processes: the first node's as a child, the others' through the engine."""

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import trial_folder, write_json
from flopwatch.sweep.host.memory_limit import MemoryLimit
from flopwatch.sweep.host.processes import start_worker
from flopwatch.sweep.supervisor.classify import JobEnd
from flopwatch.sweep.supervisor.measurements import EXCEPTION

if TYPE_CHECKING:
    from flopwatch.sweep.supervisor.job_nodes import JobNodes

_SRUN_SECONDS = 5.0


@dataclass
class RunningNodes:
    """The nodes of a running trial.

    Attributes:
        trial_dir: Its folder.
        nodes: Their agents, as far as they have come.
        agent: The first node's agent.
        srun: What runs the agents of the other nodes under Slurm.
    """

    trial_dir: Path
    nodes: "JobNodes"
    agent: "subprocess.Popen[bytes]"
    srun: "subprocess.Popen[bytes] | None" = None

    def is_over(self) -> bool:
        """Looked at several times a second: also hears what the agents say."""
        self.nodes.attend()
        if self.srun is not None and self.srun.poll() and not self.nodes.has_begun:
            self.nodes.give_up(f"srun left with exit code {self.srun.returncode}; see the end of the log")
        return self.nodes.is_over

    def stacks(self) -> str:
        return self.nodes.stacks()

    def finish(self, *, at_once: bool) -> JobEnd:
        """Ends all of it. The exception that came first becomes the trial's, read like that of any worker."""
        end = self.nodes.finish(at_once=at_once)
        if end.first is not None and end.first.exception is not None:
            write_json(self.trial_dir / EXCEPTION, end.first.exception)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agent.wait(_SRUN_SECONDS)
        if self.srun is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.srun.wait(_SRUN_SECONDS)
        return end


def start_nodes(sweep: Path, name: str, spec: TrialSpec, limit: MemoryLimit, cwd: str | None) -> RunningNodes | None:
    """None for a trial of one process, and for a command, which starts its processes itself."""
    if spec.world_size == 1 or spec.trainer == "command":
        return None
    # Sockets cost a supervisor 10 ms, and most trials have one process.
    from flopwatch.sweep.supervisor.job_nodes import LISTENER, TOKEN, JobNodes

    nodes, folder = JobNodes(spec.nodes), trial_folder(sweep, name)
    secret = {TOKEN: nodes.token}
    agent = start_worker(sweep, name, spec, limit, cwd, nodes.agent_command(folder, 0), secret)
    if spec.nodes == 1 or os.environ.pop(LISTENER, ""):
        return RunningNodes(folder, nodes, agent)
    if "SLURM_JOB_ID" not in os.environ:
        nodes.give_up(f"a trial over {spec.nodes} nodes runs under --engine slurm or ray only")
        return RunningNodes(folder, nodes, agent)
    command = [*srun_command(spec), *nodes.agent_command(folder, "slurm", os.uname().nodename)]
    try:
        return RunningNodes(folder, nodes, agent, start_worker(sweep, name, spec, limit, cwd, command, secret))
    except OSError as error:
        nodes.give_up(f"srun cannot be started on the job's first node: {error}")
        return RunningNodes(folder, nodes, agent)


def srun_command(spec: TrialSpec) -> list[str]:
    """One agent on each node of the job but the first, where we are."""
    others = spec.nodes - 1
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    return [
        *("srun", f"--nodes={others}", f"--ntasks={others}", "--ntasks-per-node=1", "--relative=1"),
        *("--input=none", "--unbuffered", "--mpi=none", "--kill-on-bad-exit=0"),
        # srun takes no --cpus-per-task from its job since Slurm 22.05.
        *([f"--cpus-per-task={cpus}"] if cpus else []),
    ]

"""Sweeps whose Python processes are forks of one that has imported torch, not fresh ones.

    done = flopwatch_warm("sweep", "--quick", "-o", str(folder))      # as `python -m flopwatch sweep ...`
    results = run_sweep_warm(folder, specs)                           # as run_sweep(folder, specs, LocalEngine())

Runner, supervisor and worker are processes of their own as always: with their own pids, sessions, signals
and logs. But a worker starts in 20 ms, where a fresh one imports torch, Opacus and TensorBoard for 3 to 8 s. Use it
where a test is about what trials measure and how they end, not where it is about memory or the start of a process.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from support.warm_python import start_warm

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.profiler",
    "torch.utils.tensorboard",
    "opacus.accountants",
    "flopwatch.sweep.worker.measure",
    "flopwatch.sweep.trainers.builtin",
    "flopwatch.sweep.trainers.unsupported",
    "transformers.models.llama.modeling_llama",
    "flopwatch.cli",
)
WITHOUT_TORCH = (
    "flopwatch.cli.app",
    "flopwatch.sweep.spec.matrix",
    "flopwatch.sweep.runner.run",
    "flopwatch.sweep.engines.local",
    "flopwatch.sweep.supervisor.supervise",
    "rich.live",
    "rich.table",
)
"""For sweeps of commands, whose processes never import torch."""
_MOST_FILES = 1024
_DEFAULT_IS_IGNORE = {signal.SIGPIPE, signal.SIGXFSZ}  # Python ignores them from its start on


def flopwatch_warm(*words, timeout=300.0, modules=MODULES, **variables):
    """Run the command line with these environment variables; a `subprocess.CompletedProcess` with text."""
    code = "from support import warm_sweep; warm_sweep.fork_instead_of_exec(); from flopwatch.cli import main; main()"
    return _run(code, words, timeout, variables, modules)


def run_sweep_warm(folder, specs, *, listener=None, timeout=300.0, **choices):
    """Run them all by a local engine, made with these choices; the results by name."""
    from flopwatch.records.sweep_results import read_results

    code = "import sys; from support import warm_sweep; warm_sweep.fork_instead_of_exec()\n"
    code += "warm_sweep.run_given_sweep(*sys.argv[1:])"
    words = (str(folder), json.dumps([asdict(spec) for spec in specs]), json.dumps(choices))
    done = _run(code, words, timeout, {})
    assert done.returncode == 0, done.stdout + done.stderr
    results = read_results(folder)
    for name in json.loads(done.stdout) if listener is not None else ():
        listener.ended(results[name])
    return results


def run_given_sweep(folder, specs, choices):
    """In the forked process: the sweep that `run_sweep_warm` was asked for. Prints what its listener was told."""
    from flopwatch.decode import read_record
    from flopwatch.process import descendants
    from flopwatch.records.trial import TrialSpec
    from flopwatch.sweep.engines.local import LocalEngine
    from flopwatch.sweep.host.processes import adopt_orphans
    from support.sweeping import Listener, run_sweep

    adopt_orphans()
    listener = Listener()
    trials = [read_record(TrialSpec, spec) for spec in json.loads(specs)]
    run_sweep(Path(folder), trials, LocalEngine(**json.loads(choices)), listener=listener)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    # `left_behind` finds processes by the environment of their start, and a fork has that of the warm process.
    assert not descendants(os.getpid()), "a process of a trial still runs"
    sys.stdout.write(json.dumps([result.name for result in listener.results]))


def _run(code, words, timeout, variables, modules=MODULES):
    process = start_warm(code, *words, env={**os.environ, **variables}, modules=modules)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.end()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def fork_instead_of_exec():
    """From now on `subprocess` and torchrun start `python -m MODULE` in this process as a fork of it."""
    subprocess.Popen = ForkedPython
    if "torch" in sys.modules:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = ForkedPython


class ForkedPython(subprocess.Popen):
    """A fork that runs a module as `python -m` does; a command with a pipe, or any other, is started as always."""

    def __init__(self, args, **options):
        command = [] if isinstance(args, str | os.PathLike) else [word for word in args if word != "-u"]
        if command[:2] != [sys.executable, "-m"] or subprocess.PIPE in options.values():
            super().__init__(args, **options)
            return
        self.args, self.returncode, self.stdin, self.stdout, self.stderr = command, None, None, None, None
        self._waitpid_lock, self._child_created, self._sigint_wait_secs = threading.Lock(), True, 0.25
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the child would write what is left in them once more
        self.pid = os.fork()
        if self.pid == 0:
            _become(command[2], command[3:], **options)


def _become(
    module,
    arguments,
    *,
    env=None,
    stdin=None,
    stdout=None,
    stderr=None,
    cwd=None,
    start_new_session=False,
    preexec_fn=None,
):
    """Do what subprocess and a new interpreter do before the module runs, then run it and end this process."""
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        known = {subprocess.STDOUT: 1, subprocess.DEVNULL: nothing}
        for number, stream in ((0, stdin or subprocess.DEVNULL), (1, stdout), (2, stderr)):
            if stream is not None:
                os.dup2(known.get(stream, stream) if isinstance(stream, int) else stream.fileno(), number)
        if cwd is not None:
            os.chdir(cwd)
        if start_new_session:
            os.setsid()
        if preexec_fn is not None:
            preexec_fn()
        os.closerange(3, _MOST_FILES)
        _reset_signals()
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
        sys.argv = [module, *arguments]
        given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:] = [os.getcwd(), *given, *sys.path[1:]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def _reset_signals():
    """As exec does: what was handled has its default again."""
    for number in signal.valid_signals() - _DEFAULT_IS_IGNORE:
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""A virtual environment for the tools from PyPI, apart from ours, and the runs in it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from accuracy.outcomes import Outcome, Results

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENV = ROOT / "benchmarks" / ".rivals-venv"
PYTHON = str(VENV / "bin" / "python")

SECONDS_PER_TOOL = 300

RIVAL_PINS = {
    "fvcore": "0.1.5.post20221221",
    "calflops": "0.3.2",
    "ptflops": "0.7.5",
    "deepspeed": "0.19.8",
    "mfu-tracker": "0.3.0",
}
"""Tools that count; `accuracy.py`."""

MONITOR_PINS = {"lightning": "2.6.6", "mosaicml": "0.32.1", "traceml-ai": "0.5.0"}
"""Tools that watch a training; `overhead.py`, which also takes DeepSpeed and mfu-tracker from above."""

_COMPOSER_NEEDS = [
    "mosaicml-cli==0.7.5",
    "py-cpuinfo",
    "importlib_metadata<9",
    "backoff",
    "gql==3.5.3",
    "graphql-core<3.3",
    "websockets",
    "ruamel.yaml",
    "questionary",
    "prompt_toolkit",
    "wcwidth",
    "python-dateutil",
    "six",
    "validators",
    "coolname",
    "zipp",
    "tabulate",
    "termcolor",
]
"""What `import composer` asks for, torchvision apart."""


def _install_steps() -> list[list[str]]:
    torch_version = version("torch").partition("+")[0]
    pins = [f"{name}=={pin}" for name, pin in RIVAL_PINS.items() if name != "deepspeed"]
    return [
        [f"torch=={torch_version}"],  # first and alone: a plain `torch` pulls gigabytes of CUDA packages
        [f"transformers=={version('transformers')}"],
        pins,
        # Its profiler is plain Python; what its import needs is named here, its kernels are not built.
        ["--no-deps", f"deepspeed=={RIVAL_PINS['deepspeed']}"],
        ["einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo", "pydantic"],
        [f"lightning=={MONITOR_PINS['lightning']}", f"traceml-ai=={MONITOR_PINS['traceml-ai']}"],
        # It declares torch < 2.7.1; its callback has no such need.
        ["--no-deps", f"mosaicml=={MONITOR_PINS['mosaicml']}", *_COMPOSER_NEEDS],
        [f"tensorboard=={version('tensorboard')}", f"wandb=={version('wandb')}"],
        ["--editable", str(ROOT)],  # last: what is pinned above is there already
    ]


def prepare(say: Callable[[str], None]) -> None:
    """Make the environment, unless one with the same versions is there."""
    steps = _install_steps()
    stamp = VENV / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text()) == steps:
        return
    say(f"Installing the tools from PyPI into {VENV} (once, some minutes)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    (VENV / ".gitignore").write_text("*\n")
    for step in steps:
        say("pip install " + " ".join(step))
        command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *step]
        subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"}, stderr=subprocess.DEVNULL)
    stamp.write_text(json.dumps(steps))


def count_with(tool: str, names: list[str], size: tuple[int, int]) -> Results:
    """Let one tool count the architectures; whatever it does not answer for counts as failed."""
    command = [PYTHON, "-W", "ignore", str(HERE / "rival_counters.py"), tool, ",".join(names), *map(str, size)]
    modules = os.pathsep.join(str(ROOT / folder) for folder in ("benchmarks", "."))
    environment = {**os.environ, "PYTHONPATH": modules}
    output, why = _run(command, environment)
    results: Results = {tool: {name: Outcome(None, why) for name in names}}
    for line in output.splitlines():
        answer = json.loads(line)
        name = answer["architecture"]
        if "failure" in answer:
            results[tool][name] = Outcome(None, answer["failure"])
        for counted_as, flops in answer.get("flops", {}).items():
            results.setdefault(counted_as, {})[name] = Outcome(flops)
    return results


def _run(command: list[str], environment: dict[str, str]) -> tuple[bytes, str]:
    """What the process printed, and how it ended; with its forked children it has a session of its own to end."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=SECONDS_PER_TOOL)
        return output, f"its process ended with exit code {process.returncode}: {_last_line(errors)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], f"not reached within {SECONDS_PER_TOOL} s"


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"

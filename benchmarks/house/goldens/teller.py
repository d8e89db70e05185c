"""Runs commands of the flopwatch that PYTHONPATH names, each in a process of its own, and writes what they printed.

    python -m house.goldens.teller CASES.json ANSWERS.json

The processes are forks, because importing takes longer than most commands. The clock stands still, the terminal has a
fixed width, and nothing of this machine's settings is seen.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

UNIX_TIME = 1_800_000_000.0
_NOTEBOOK = "notebook"
_LIGHT = ("flopwatch.cli", "flopwatch.report", "flopwatch.runs", "flopwatch.present", "flopwatch.records")


def main() -> None:
    cases, answers = Path(sys.argv[1]), Path(sys.argv[2])
    _stand_still()
    _import_light_packages()
    told = {case["name"]: _in_a_fork(case) for case in json.loads(cases.read_text())}
    answers.write_text(json.dumps(told))


def _stand_still() -> None:
    time.time = lambda: UNIX_TIME
    for name in list(os.environ):
        if (name.startswith("FLOPWATCH_") and name != "FLOPWATCH_LANG") or name in ("NO_COLOR", "FORCE_COLOR"):
            del os.environ[name]
    os.environ |= {"TZ": "UTC", "LINES": "50", "TERM": "dumb", "XDG_CACHE_HOME": tempfile.mkdtemp()}


def _import_light_packages() -> None:
    """Once for all forks. What a tree does not have, or has moved, is imported by the commands as always."""
    for package in _LIGHT:
        with contextlib.suppress(Exception):
            found = importlib.import_module(package)
            for module in pkgutil.walk_packages(found.__path__, f"{package}.", onerror=lambda name: None):
                importlib.import_module(module.name)
    gc.freeze()


def _in_a_fork(case: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        child = os.fork()
        if child == 0:
            _tell(case, out.fileno(), err.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        seconds = time.perf_counter() - began
        printed = [_read(stream) for stream in (out, err)]
    return {"exit": status, "out": printed[0], "err": printed[1], "seconds": seconds}


def _tell(case: dict[str, Any], out: int, err: int) -> None:
    """Never returns."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    status = 70
    try:
        os.environ["COLUMNS"] = str(case["columns"])
        os.environ |= case.get("environment", {})
        sys.argv = ["flopwatch", *case["arguments"]]
        if case["arguments"][0] == _NOTEBOOK:
            _show_in_notebook(case["arguments"][1])
        else:
            runpy.run_module("flopwatch", run_name="__main__", alter_sys=False)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _show_in_notebook(folder: str) -> None:
    from flopwatch.runs import read_log

    print(read_log(Path(folder) / "training_log.jsonl")._repr_html_())


def _read(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read().decode("utf-8", "backslashreplace"))


if __name__ == "__main__":
    main()

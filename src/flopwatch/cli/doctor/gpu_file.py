"""The file of `flopwatch doctor --gpu`, which a user can send: without names of hosts and users, and without paths."""

import getpass
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flopwatch.cli import write_file
from flopwatch.cli.doctor.findings import CheckResult
from flopwatch.present.json_form import strict_json

ISSUES = "https://github.com/flopwatch/flopwatch/issues/new?template=gpu.yml"
_QUOTED_PATH = re.compile(r"(['\"])(?:/|~/|[A-Za-z]:\\)[^'\"\n]+\1")  # it may have spaces
_PATH = re.compile(r"(?:(?:(?<![\w./])|(?<=-[ILB]))/|~/|[A-Za-z]:\\)[^\s'\":;,()\]]+[/\\][^\s'\":;,()\]]*")
_URL = re.compile(r"\b[a-z][a-z+.-]*://\S+", re.IGNORECASE)
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b"
    r"|\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"  # UUID
    r"|(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{1,4}(?:\.\d)?(?![\w:])"  # IPv6 and PCI
    r"|\b[A-Za-z][\w.-]*(?<!\.py)(?<!\.cpp)(?<!\.cu)(?<!\.h):\d{4,5}\b"  # host and port, and no line of a source file
)
_SHORTEST_NAME = 2


def content(versions: Mapping[str, str], results: Sequence[CheckResult], *, is_complete: bool) -> dict[str, Any]:
    """What the file holds. `is_complete` is False if the checks were ended before the last one."""
    found = {
        "format": 1,
        "kind": "flopwatch doctor --gpu",
        "is_complete": is_complete,
        "versions": dict(versions),
        "seconds": sum(result.seconds for result in results),
        "checks": [asdict(result) for result in results],
    }
    return {name: nameless(value, private_names()) for name, value in found.items()}


def write(path: str, found: Mapping[str, Any]) -> None:
    write_file(path, f"{strict_json(found, indent=2)}\n")


def private_names() -> tuple[str, ...]:
    """The names of this host and of the user, the longest first. Very short ones are parts of other words."""
    host = socket.gethostname()
    names = {host, host.partition(".")[0], Path.home().name, os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    with suppress(OSError, KeyError, ImportError):
        names.add(getpass.getuser())
    return tuple(sorted((name for name in names if len(name) >= _SHORTEST_NAME), key=len, reverse=True))


def nameless(value: Any, names: Sequence[str]) -> Any:
    """The value, without paths, addresses and these names in its texts. Keys and results of checks stay.

    >>> nameless({"said": "ada cannot open /home/ada/x/libcuda.so on 10.0.0.7"}, ["ada"])
    {'said': '<name> cannot open <path> on <address>'}
    """
    if isinstance(value, Mapping):
        return {key: own if key in ("outcome", "name") else nameless(own, names) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [nameless(each, names) for each in value]
    if not isinstance(value, str):
        return value
    text = value
    for name in names:  # first, because a path may have a user's name with spaces
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "<name>", text, flags=re.IGNORECASE)
    text = _URL.sub("<address>", text)
    return _ADDRESS.sub("<address>", _PATH.sub("<path>", _QUOTED_PATH.sub("<path>", text)))

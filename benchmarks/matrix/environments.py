"""Makes the environment of a row with uv, and installs flopwatch into it with pip, as a user does."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from matrix.rows import TOOLS, Row

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
WORK = CACHE / "matrix"

EXTRAS = ("hf", "lightning", "dp")


class CannotBuildError(Exception):
    """An environment cannot be built; the message goes into the table."""


@dataclass
class Environment:
    """A virtual environment with the packages of one row."""

    folder: Path
    before: dict[str, str] = field(default_factory=dict)
    """Versions by package name before flopwatch was installed."""
    after: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        windows = self.folder / "Scripts" / "python.exe"
        return str(windows if windows.exists() else self.folder / "bin" / "python")

    def changes(self) -> list[str]:
        """Changes that `pip install flopwatch` made to installed packages: `numpy 1.26.4 -> 2.3.0`."""
        return [
            f"{name} {version} -> {self.after.get(name, 'removed')}"
            for name, version in self.before.items()
            if self.after.get(name) != version
        ]


def find_python(version: str, *, or_this: bool) -> str | None:
    """An interpreter of this version on this machine; None if there is none, or, with `or_this`, the running one."""
    for candidate in _candidates(version):
        asked = run([candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], check=False)
        if asked.returncode == 0 and asked.stdout.strip() == version:
            return candidate
    return sys.executable if or_this else None


def _candidates(version: str) -> Iterator[str]:
    yield sys.executable
    yield from filter(None, [shutil.which(f"python{version}")])
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from (str(folder / "bin" / "python") for folder in sorted(pyenv.glob(f"{version}.*"), reverse=True))
    found = run([uv(), "python", "find", "--no-python-downloads", version], check=False)
    if found.returncode == 0:
        yield found.stdout.strip()


def build(row: Row, python: str, wheel: Path, say: Callable[[str], None]) -> Environment:
    """Install the row's packages, then the wheel beside them."""
    made = Environment(WORK / row.name)
    run([uv(), "venv", "--quiet", "--clear", "--seed", "--python", python, str(made.folder)])
    say(f"installing torch {row.torch}")
    wanted = _lowest(made, row) if row.is_lowest else row.requirements()
    run([uv(), "pip", "install", "--quiet", "--python", made.python, *pip_sources(), *wanted, *TOOLS])
    made.before = packages(made.python)
    say("installing flopwatch with pip")
    extras = "all" if row.is_lowest else ",".join(EXTRAS)
    run([made.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[{extras}]"])
    made.after = packages(made.python)
    return made


def _lowest(made: Environment, row: Row) -> list[str]:
    """The lowest version of every package that pyproject.toml names, and the newest of what those need."""
    limit = made.folder / "limit.txt"
    limit.write_text(f"transformers{row.transformers}\n")
    command = [uv(), "pip", "compile", "--quiet", "--resolution=lowest-direct", "--extra=all", *pip_sources()]
    command += ["--no-header", "--no-annotate", f"--constraint={limit}", "--python", made.python]
    listed = run([*command, str(ROOT / "pyproject.toml")]).stdout
    return [line for line in listed.splitlines() if "==" in line]


def build_wheel() -> Path:
    """Build the wheel that a user would install."""
    folder = WORK / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    run([uv(), "build", "--quiet", "--wheel", "--out-dir", str(folder), *pip_sources(), str(ROOT)])
    return next(folder.glob("*.whl"))


def packages(python: str) -> dict[str, str]:
    """Versions of the installed packages by name."""
    lines = run([uv(), "pip", "list", "--quiet", "--format", "freeze", "--python", python]).stdout.splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line)


def uv() -> str:
    """The path of this machine's uv, or of one that pip installs into a separate environment."""
    own = WORK / "uv" / "bin" / "uv"
    if found := shutil.which("uv") or (str(own) if own.exists() else None):
        return found
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
    run([sys.executable, "-m", "venv", str(own.parents[1])])
    run([str(own.with_name("python")), "-m", "pip", "install", "--quiet", "uv"])
    return str(own)


def pip_sources() -> list[str]:
    """The indexes and folders of pip's configuration on this machine, as options for uv, which does not read it."""
    settings = pip_settings()
    names = ("find-links", "index-url", "extra-index-url")
    options = [f"--{name}={value}" for name in names for value in settings.get(name, {})]
    return [*options, "--index-strategy=unsafe-best-match"] if options else []


@cache
def pip_settings() -> dict[str, dict[str, None]]:
    """Every setting that pip takes from its files and from PIP_ variables, with its values."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    settings: dict[str, dict[str, None]] = {}
    for name, values in re.findall(r"^.*?([a-z-]+)='(.*)'$", listed, re.MULTILINE):
        # pip prints several values of a setting on one line; values from a file are separated by an escaped newline.
        settings.setdefault(name, {}).update(dict.fromkeys(values.replace("\\n", " ").split()))
    return settings


def _variables() -> dict[str, str]:
    """Variables for uv and pip, with pip's certificates for uv, and without those that add other packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for certificates in pip_settings().get("cert", {}):
        kept.setdefault("SSL_CERT_FILE", certificates)
    return {"UV_HTTP_TIMEOUT": "300", **kept}


def committed() -> str:
    """The commit of the source, in short; empty if there are changes beside it or there is no git."""
    asked = run(
        ["git", "-C", str(ROOT), "status", "--porcelain", "src", "tests", "testbeds", "pyproject.toml"], check=False
    )
    if asked.returncode != 0 or asked.stdout:
        return ""
    return run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).stdout.strip()


def run(command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, env=_variables(), check=False)
    if check and done.returncode != 0:
        words = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise CannotBuildError(f"{Path(command[0]).name} {command[1]} failed: {words[:400]}")
    return done

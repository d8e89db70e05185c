"""Builds wheel and sdist, and checks what is in them and that the versions agree."""

import re
import shutil
import tarfile
import zipfile
from pathlib import Path

from matrix.environments import ROOT, pip_sources, run, uv

TWINE = "twine==7.0.0"
_SDIST = {"src", "README.md", "README.zh-CN.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "pyproject.toml"}
_ADDED_BY_HATCH = {".gitignore", "PKG-INFO"}
_PACKAGE_FILES = {".py", ".json", ".css", ".js", ".typed", ".po", ".mo"}


def build(folder: Path) -> tuple[Path, Path]:
    """Build into an empty folder: the sdist, and the wheel from the sdist. Returns wheel and sdist."""
    shutil.rmtree(folder, ignore_errors=True)
    run([uv(), "build", "--quiet", "--out-dir", str(folder), *pip_sources(), str(ROOT)])
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def twine_check(*files: Path) -> None:
    """Raise CannotBuildError if PyPI would refuse a file or could not show its README."""
    command = [uv(), "tool", "run", "--quiet", *pip_sources(), "--from", TWINE, "twine", "check", "--strict"]
    run([*command, *map(str, files)])


def wheel_problems(wheel: Path) -> list[str]:
    """Files that the wheel lacks or should not have."""
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith("flopwatch/")}
    rest = {name for name in names - package if not re.match(r"flopwatch-[^/]+\.dist-info/", name)}
    source = ROOT / "src" / "flopwatch"
    wanted = {f"flopwatch/{path.relative_to(source)}" for path in source.rglob("*") if path.suffix in _PACKAGE_FILES}
    found = [f"the wheel should not have {name}" for name in sorted(rest | package - wanted)]
    found += [f"the wheel lacks {name}" for name in sorted(wanted - package)]
    return found if any(name.endswith("/licenses/LICENSE") for name in names) else [*found, "the wheel lacks LICENSE"]


def sdist_problems(sdist: Path) -> list[str]:
    with tarfile.open(sdist) as archive:
        names = [Path(name).parts[1:] for name in archive.getnames()]
    tops = {parts[0] for parts in names if parts} - _ADDED_BY_HATCH
    found = [f"the sdist should not have {name}" for name in sorted(tops - _SDIST)]
    found += [f"the sdist lacks {name}" for name in sorted(_SDIST - tops)]
    return found + ["the sdist has compiled files" for parts in names if "__pycache__" in parts][:1]


def version_problems(wheel: Path) -> list[str]:
    """Where the version differs from that of version.py, and which README is missing."""
    text = (ROOT / "src/flopwatch/version.py").read_text(encoding="utf-8")
    version = text.partition('__version__ = "')[2].partition('"')[0]
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    found = [f"{name} is missing" for name in ("README.md", "README.zh-CN.md") if not (ROOT / name).exists()]
    if newest is None or newest[1] != version:
        found.append(f"version.py says {version}, and the newest entry of CHANGELOG.md {newest and newest[1]}")
    return found if f"-{version}-" in wheel.name else [*found, f"{wheel.name} is not version {version}"]

"""One random corruption of a sweep's folder, as disks, people, other programs and other versions make them."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LATER_FIELDS = ("format", "earlier_attempts", "privacy", "nodes", "processes", "layout", "batch", "micro_batch_size")
"""What the first version did not write."""

_ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2.5,
    "text",
    "",
    [],
    {},
    [1, "a", None],
    {"a": {"b": []}},
    float("nan"),
    float("inf"),
    10**400,
    1e308,
    "\ud800 half a pair",
    "[/bold] \x1b[31m",
    "../../../etc/passwd",
    "nul \0",
)


def corrupt(folder: Path, chance: random.Random) -> str:
    """Do it; what was done, in words."""
    luck = chance.random()
    if luck < 0.08:
        return _whole_folder(folder, chance)
    if luck < 0.4:
        return _both_places(folder, chance)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    lists = [path for path in files if path.parent == folder]
    results = [path for path in files if path.name == "result.json"]
    file = chance.choice(chance.choice([few for few in (files, lists, results) if few]))
    kinds = {**_ON_BYTES, **(_ON_JSON if file.suffix in (".json", ".jsonl") else {})}
    kind = chance.choice(sorted(kinds))
    kinds[kind](file, chance)
    return f"{kind} {file.relative_to(folder)}"


def _both_places(folder: Path, chance: random.Random) -> str:
    """A trial's own result and its lines in the list: nothing of it is whole any more."""
    names = sorted(path.parent.name for path in (folder / "trials").glob("*/result.json") if path.is_file())
    if not names or not (folder / "results.jsonl").is_file():
        return "nothing left"
    name, kinds = chance.choice(names), {**_ON_BYTES, **_ON_JSON}
    kind = chance.choice(sorted(kinds))
    kinds[kind](folder / "trials" / name / "result.json", chance)
    lines = [
        _changed_line(line, chance) if f'"{name}"'.encode() in line else line
        for line in (folder / "results.jsonl").read_bytes().split(b"\n")
    ]
    (folder / "results.jsonl").write_bytes(b"\n".join(lines))
    return f"both({kind}) {name}"


def _changed_line(line: bytes, chance: random.Random) -> bytes:
    change = chance.choice((_fewer, _wrong, _wrong, _deep, _newer, _more, None))
    try:
        return (
            line[: chance.randrange(len(line))]
            if change is None
            else json.dumps(change(json.loads(line), chance)).encode()
        )
    except (ValueError, RecursionError):
        return line


def _whole_folder(folder: Path, chance: random.Random) -> str:
    places = [folder / name for name in ("trials", "logs", "runs", "earlier")]
    places += list((folder / "trials").iterdir()) if (folder / "trials").is_dir() else []
    place = chance.choice([path for path in places if path.is_dir() and not path.is_symlink()] or [folder / "trials"])
    kind = chance.choice(("deleted", "file", "fifo", "loop", "locked"))
    if kind == "locked":
        place.chmod(0)  # root does not mind
        return f"folder-locked {place.relative_to(folder)}"
    shutil.rmtree(place, ignore_errors=True)
    if kind != "deleted" and not os.path.lexists(place):
        _REPLACE[kind](place)
    return f"folder-{kind} {place.relative_to(folder)}"


_REPLACE: dict[str, Callable[[Path], object]] = {
    "file": lambda place: place.write_bytes(b"\xff\0"),
    "folder": lambda place: place.mkdir(),
    "fifo": lambda place: os.mkfifo(place),
    "loop": lambda place: place.symlink_to(place),
    "dangling": lambda place: place.symlink_to(place.parent / "nothing here"),
}


def _replaced(kind: str) -> Callable[[Path, random.Random], None]:
    def replace(file: Path, chance: random.Random) -> None:
        file.unlink()
        _REPLACE[kind](file)

    return replace


def _cut(file: Path, chance: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content) + 1)])


def _overwrite(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes() or b"x")
    start = chance.randrange(len(content))
    noise = chance.randbytes(chance.randrange(1, 40))
    content[start : start + len(noise)] = noise
    file.write_bytes(content)


def _insert(file: Path, chance: random.Random) -> None:
    content = file.read_bytes()
    start = chance.randrange(len(content) + 1)
    file.write_bytes(
        content[:start] + chance.choice((b"\0" * 9, b"\xff\xfe", b"\n\n{}\n", b"[" * 3000)) + content[start:]
    )


def _zeros(file: Path, chance: random.Random) -> None:
    """As after a power cut: the length is right, the blocks were never written."""
    size = file.stat().st_size
    keep = chance.choice((0, size // 2))
    file.write_bytes(file.read_bytes()[:keep] + b"\0" * (size - keep))


def _other(file: Path, chance: random.Random) -> None:
    """Another file of the sweep in its place."""
    others = [path for path in file.parents[1].rglob(file.name) if path.is_file() and path != file]
    if others:
        shutil.copyfile(chance.choice(sorted(others)), file)


_ON_BYTES: dict[str, Callable[[Path, random.Random], object]] = {
    "cut": _cut,
    "overwritten": _overwrite,
    "inserted": _insert,
    "zeros": _zeros,
    "empty": lambda file, chance: file.write_bytes(b""),
    "garbage": lambda file, chance: file.write_bytes(chance.randbytes(500)),
    "deleted": lambda file, chance: file.unlink(),
    "unreadable": lambda file, chance: file.chmod(0),
    "other": _other,
    "folder": _replaced("folder"),
    "fifo": _replaced("fifo"),
    "loop": _replaced("loop"),
    "dangling": _replaced("dangling"),
}


def _on_records(change: Callable[[Any, random.Random], Any]) -> Callable[[Path, random.Random], None]:
    """A change of one JSON record of the file."""

    def apply(file: Path, chance: random.Random) -> None:
        is_list = file.suffix == ".jsonl"
        try:
            parts = file.read_text().splitlines() if is_list else [file.read_text()]
            place = chance.randrange(len(parts))
            parts[place] = json.dumps(change(json.loads(parts[place]), chance))
        except (ValueError, RecursionError):
            return  # corrupted before
        file.write_text("".join(f"{part}\n" for part in parts))

    return apply


def _somewhere(record: Any, chance: random.Random) -> Any:
    """A random object of those inside the record, itself included."""
    found = []
    todo = [record]
    while todo:
        value = todo.pop()
        if isinstance(value, dict) and value:
            found.append(value)
            todo += list(value.values())
        elif isinstance(value, list):
            todo += value
    return chance.choice(found) if found else None


def _more(record: Any, chance: random.Random) -> Any:
    for _ in range(3):
        if (place := _somewhere(record, chance)) is not None:
            place[f"later_{chance.randrange(99)}"] = chance.choice(_ODD_VALUES[:12])
    return record


def _fewer(record: Any, chance: random.Random) -> Any:
    if (place := _somewhere(record, chance)) is not None:
        del place[chance.choice(sorted(place))]
    return record


def _wrong(record: Any, chance: random.Random) -> Any:
    for _ in range(chance.choice((1, 1, 3))):
        if (place := _somewhere(record, chance)) is not None:
            key = chance.choice(sorted(place))
            odd = [value for value in _ODD_VALUES if type(value) is not type(place[key])]
            place[key] = chance.choice(odd)
    return record


def _deep(record: Any, chance: random.Random) -> Any:
    if (place := _somewhere(record, chance)) is not None:
        nest: Any = 1
        for _ in range(chance.choice((80, 700))):
            nest = [nest] if chance.random() < 0.5 else {"a": nest}
        place[chance.choice(sorted(place))] = nest
    return record


def _old(record: Any, chance: random.Random) -> Any:
    """As the first version wrote it."""
    todo = [record]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            for name in _LATER_FIELDS:
                value.pop(name, None)
            todo += list(value.values())
        elif isinstance(value, list):
            todo += value
    return record


def _newer(record: Any, chance: random.Random) -> Any:
    if isinstance(record, dict):
        record["format"] = chance.choice((2, 99))
        record["later"] = {"a": 1}
        record.pop(chance.choice(sorted(record)))
    return record


_ON_JSON = {
    "more": _on_records(_more),
    "fewer": _on_records(_fewer),
    "wrong": _on_records(_wrong),
    "wrong-again": _on_records(_wrong),
    "deep": _on_records(_deep),
    "old": _on_records(_old),
    "newer": _on_records(_newer),
    "odd": _on_records(lambda record, chance: chance.choice(_ODD_VALUES)),
}

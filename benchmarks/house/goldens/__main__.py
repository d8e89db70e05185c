"""Records what a source tree says and measures, and compares another commit with it.

    PYTHONPATH=benchmarks:. python -m house.goldens compare                     # this checkout, texts only
    PYTHONPATH=benchmarks:. python -m house.goldens compare --match sweeps/240  # cases with these words in their names
    PYTHONPATH=benchmarks:. python -m house.goldens compare --only rows
    PYTHONPATH=benchmarks:. python -m house.goldens record --source /a/checkout # writes data/

Exit status 1 means that something differs that `data/intended.txt` does not name.
"""

import argparse
import difflib
import fnmatch
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from house.goldens import counts, endings, formulas, rows, texts
from house.goldens.forms import numbers_in, words_lost_and_new
from house.goldens.tree import Tree

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).parent / "data"
Recorded = dict[str, list[str]]
PARTS: dict[str, Callable[[Tree, str], Recorded]] = {
    "texts": texts.record,
    "large": texts.record_large,
    "rows": rows.record,
    "formulas": formulas.record,
    "endings": endings.record,
    "counts": counts.record,
}
_GROWTH = 1.05
"""A page may be larger by this factor."""
_MOST_WORDS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description="Record behaviour, or compare a checkout with what was recorded.")
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=["texts"])
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout whose code runs")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--match", default="", help="only cases with these words in their names")
    parser.add_argument("--lines", type=int, default=16, help="of each difference that is printed")
    parser.add_argument("--all", action="store_true", help="print the lines of intended differences too")
    options = parser.parse_args()
    tree, unexpected = Tree(options.source.resolve()), 0
    for part in options.only:
        found = PARTS[part](tree, options.match)
        path = options.data / f"{part}.json.xz"
        if options.action == "record":
            known = read(path) if options.match and path.exists() else {}
            write(path, {**known, **{name: lines for name, lines in found.items() if lines != endings.ABSENT}})
            print(f"{part}: {len(found)} cases, {path.stat().st_size:,} bytes in {path}")
        else:
            known = {name: lines for name, lines in read(path).items() if options.match in name}
            absent = {found.pop(name) and name for name in list(found) if found[name] == endings.ABSENT}
            print(*(f"{part}/{name}: not compared, {endings.ABSENT[0]}" for name in absent), sep="\n", end="")
            known = {name: lines for name, lines in known.items() if name.partition("/")[0] not in absent}
            unexpected += compare(part, known, found, options.lines, prints_all=options.all)
    sys.exit(1 if unexpected else 0)


def read(path: Path) -> Recorded:
    recorded: Recorded = json.loads(lzma.decompress(path.read_bytes()))
    return recorded


def write(path: Path, recorded: Recorded) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(recorded, indent=0, sort_keys=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9))


def compare(part: str, known: Recorded, found: Recorded, most_lines: int, *, prints_all: bool = False) -> int:
    """Print what differs. Returns the number of cases with a difference that nobody has announced."""
    unexpected = expected = without_numbers = 0
    printed: dict[tuple[str, ...], str] = {}
    for name in sorted(known.keys() | found.keys()):
        difference = list(_difference(known.get(name, []), found.get(name, [])))
        if not difference:
            continue
        reason = intended(f"{part}/{name}")
        expected, unexpected = expected + bool(reason), unexpected + (not reason)
        lost = numbers_lost(known.get(name, []), found.get(name, []))
        without_numbers += bool(reason and lost)
        print(f"\n{part}/{name}{f' (intended: {reason})' if reason else ''}")
        if (first := printed.setdefault(tuple(difference), name)) != name:
            print(f"  the same difference as {first}")
            continue
        if lost:
            print(f"  numbers that are nowhere any more: {' '.join(lost[:_MOST_WORDS])}, {len(lost)} in all")
        print(*(f"  {line}" for line in _summary(known.get(name, []), found.get(name, []))), sep="\n")
        if prints_all or not reason:
            print(*(f"    {line[:200]}" for line in difference[:most_lines]), sep="\n")
        if (prints_all or not reason) and len(difference) > most_lines:
            print(f"    … {len(difference) - most_lines} more lines")
    print(f"\n{part}: {len(known)} cases, {unexpected} differ, {expected} more as intended")
    if without_numbers:
        print(
            f"Of the intended ones {without_numbers} lost a number: read them with --all before you believe the reason."
        )
    return unexpected


def numbers_lost(known: list[str], found: list[str]) -> list[str]:
    """Numbers that occurred and do not occur at all now. A reason about words or layout does not explain these."""
    before, after = (set(numbers_in(_without_size(lines)[1])) for lines in (known, found))
    return sorted(before - after)


def intended(name: str) -> str | None:
    """The reason of the first line of `intended.txt`, `pattern: reason`, whose pattern this case has."""
    path = DATA / "intended.txt"
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        pattern, _, reason = line.partition(": ")
        if reason and not line.startswith("#") and fnmatch.fnmatch(name, pattern):
            return reason
    return None


def _difference(known: list[str], found: list[str]) -> Iterator[str]:
    (size, known), (now, found) = _without_size(known), _without_size(found)
    if size and now > size * _GROWTH:
        yield f"size of the page: {size:,} bytes before, {now:,} now, {now / size - 1:+.1%}"
    for line in difflib.unified_diff(known, found, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            yield line


def _without_size(lines: list[str]) -> tuple[int, list[str]]:
    sizes = [int(line.split()[1]) for line in lines[:2] if line.startswith("size ")]
    return (sizes[0] if sizes else 0), [line for line in lines if not line.startswith("size ")]


def _summary(known: list[str], found: list[str]) -> Iterator[str]:
    """Which words are gone or new, wherever they stand: a table that only moved shows none."""
    lost, new = words_lost_and_new(_without_size(known)[1], _without_size(found)[1])
    for title, words in (("words lost", lost), ("words new", new)):
        if words:
            more = f" … {len(words) - _MOST_WORDS} more" if len(words) > _MOST_WORDS else ""
            yield f"{title}: {' '.join(words[:_MOST_WORDS])}{more}"
    if not lost and not new:
        yield "the same words in another order or layout"


if __name__ == "__main__":
    main()

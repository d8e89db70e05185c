"""Hostile words through everything that shows or keeps a sweep: no sweep ends by them, and the numbers stay right.

python benchmarks/hostile/hostile_words.py [TEXTS] [SEED]

1. Texts in every field of results, through all renderers (`hostile_renders`).
2. Real sweeps of shell trials that print them, raise them and report numbers beside them, with the output on a
   terminal, a pipe, a pipe that closes after a line, a full disk, a terminal that goes away, nothing at all; in folders
   named like them. Each trial's end and number follow from its batch size alone: they are held against that.
3. Real sweeps of a trainer that raises them, one a message of 50 MB.
4. The report of each sweep as text, page, Markdown and JSON.
"""

import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flopwatch.records.sweep_results import read_results
from hostile.renders import check_renders
from hostile.texts import LARGE, hostile_texts

FLOPWATCH = [sys.executable, "-m", "flopwatch"]
TRIALS = 8
"""Of each real sweep of shell trials."""

_COMMAND = (
    "cat w/{batch_size}.bin; "
    'echo "{\\"samples_per_s\\": {batch_size}}" > $FLOPWATCH_TRIAL_DIR/metrics.json; '
    "test -e w/{batch_size}.json && cp w/{batch_size}.json $FLOPWATCH_TRIAL_DIR/exception.json; "
    "exit $(({batch_size} % 3))"
)
_TRAINER = """
from pathlib import Path

class Raises:
    def __init__(self, model, settings):
        text = Path(f"w/{settings.batch_size}.bin").read_bytes().decode("utf-8", "surrogatepass")
        kind = type(text[:50].replace("\\0", "") or "E", (RuntimeError,), {})
        raise kind(text)
    def forward(self, batch): ...
    def backward(self, loss): ...
    def update(self): ...
"""


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    texts = list(hostile_texts(count, seed))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        for first in range(0, count, 25):
            check_renders(texts[first : first + 25], Path(folder))
        print(f"{count} texts through the renderers: {time.perf_counter() - began:.0f} s", flush=True)
        chosen = texts[:: max(1, count // (TRIALS * len(OUTPUTS)))]
        for number, (name, start) in enumerate(OUTPUTS.items()):
            words = chosen[number * TRIALS : (number + 1) * TRIALS]
            check_real_sweep(Path(folder) / f"real {number}", words, start)
            print(f"{len(words)} shell trials, output to {name}: all ended as they must", flush=True)
        check_trainer(Path(folder) / "trainer", [*chosen[:3], "x" * LARGE])
        print(f"4 trials of a trainer that raises them, one {LARGE:,} characters: told, kept cut", flush=True)
    print(f"no sweep ended by them; {time.perf_counter() - began:.0f} s")


def check_real_sweep(place: Path, texts: list[str], start: "Callable[[list[str], Path], int]") -> None:
    """Run trials that print the texts and whose ends follow from their batch size."""
    _write_words(place, texts)
    sizes = range(1, len(texts) + 1)
    folder = f"s {_folder_name(texts[0])}"
    # The path in UTF-8 as it is: a name of a folder is any bytes but NUL and the slash.
    words = ["sweep", "--command", _COMMAND, "batch_size=" + ",".join(map(str, sizes)), "seq_len=8", "-o", folder]
    status = start([*FLOPWATCH, *words, "--in-order"], place)
    results = {result.spec.batch_size: result for result in read_results(place / folder).values()}
    assert sorted(results) == list(sizes), f"of {len(texts)} trials only {sorted(results)} ended"
    for size, result in results.items():
        expected = "ok" if size % 3 == 0 else "error"
        assert result.outcome == expected, f"{size}: {result.outcome} {result.reason!r}"
        assert result.evidence["exit_code"] == size % 3
        assert result.measured.samples_per_s == size
        assert len(json.dumps(result.to_json())) < 200_000
    assert status == int(any(size % 3 for size in sizes)), status
    _check_cli_reports(place, folder)


def check_trainer(place: Path, texts: list[str]) -> None:
    """Exceptions of the worker itself."""
    _write_words(place, texts)
    (place / "raises.py").write_text(_TRAINER)
    sizes = ",".join(str(number + 1) for number in range(len(texts)))
    words = [
        "sweep",
        "--trainers",
        "raises:Raises",
        "--model-size",
        "tiny",
        f"batch_size={sizes}",
        "seq_len=8",
        "-o",
        "s",
    ]
    assert _piped([*FLOPWATCH, *words, "--no-preflight"], place) == 1
    results = read_results(place / "s")
    assert [result.outcome for result in results.values()] == ["error"] * len(texts)
    for file in (place / "s").rglob("*"):
        assert not file.is_file() or file.stat().st_size < 2_000_000, f"{file.name} has {file.stat().st_size:,} bytes"
    _check_cli_reports(place, "s")


def _write_words(place: Path, texts: list[str]) -> None:
    (place / "w").mkdir(parents=True)
    for number, text in enumerate(texts, 1):
        (place / "w" / f"{number}.bin").write_bytes(text.encode("utf-8", "surrogatepass"))
        raised = {"type": text[:200], "message": text, "outcome": "error", "traceback": text}
        if number % 2:
            (place / "w" / f"{number}.json").write_text(json.dumps(raised))


def _folder_name(text: str) -> str:
    kept = text.replace("/", "").replace("\0", "").encode("utf-8", "surrogatepass")[:60]
    return kept.decode("utf-8", "surrogateescape")


def _check_cli_reports(place: Path, folder: str) -> None:
    for words in (["--html", "r.html"], ["--md", "r.md"], ["--json"], []):
        done = subprocess.run([*FLOPWATCH, "report", folder, *words], cwd=place, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
        done.stdout.decode("utf-8")
        assert b"\x1b" not in done.stdout, "an escape sequence reached a pipe"


def _piped(command: list[str], place: Path) -> int:
    done = subprocess.run(command, cwd=place, capture_output=True, check=False)
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")[-2000:]
    assert b"\x1b" not in done.stdout, "an escape sequence reached a pipe"
    return done.returncode


def _closed_after_a_line(command: list[str], place: Path) -> int:
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        return process.wait()


def _full_disk(command: list[str], place: Path) -> int:
    with open("/dev/full", "w") as full:
        return subprocess.run(command, cwd=place, stdout=full, stderr=full, check=False).returncode


def _nothing(command: list[str], place: Path) -> int:
    return subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], cwd=place, check=False).returncode


def _terminal(command: list[str], place: Path, most_bytes: float = float("inf")) -> int:
    child, main_end = pty.fork()
    if child == 0:
        os.chdir(place)
        os.execv(command[0], command)
    seen = b""
    while len(seen) < most_bytes:
        try:
            seen += os.read(main_end, 65536)
        except OSError:
            break
    os.close(main_end)
    # Of escape sequences only rich's own: colours, cursor, erasing.
    for sign in (b"\x1b]0;", b"\x1b[?1049h", b"\x1bP", b"\x9b31m"):
        assert sign not in seen, f"{sign!r} reached the terminal"
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _terminal_that_goes_away(command: list[str], place: Path) -> int:
    return _terminal(command, place, most_bytes=10)


OUTPUTS: "dict[str, Callable[[list[str], Path], int]]" = {
    "a pipe": _piped,
    "a terminal": _terminal,
    "a pipe that closes after a line": _closed_after_a_line,
    "a full disk": _full_disk,
    "a terminal that goes away": _terminal_that_goes_away,
    "nothing, closed from the start": _nothing,
}


if __name__ == "__main__":
    main()

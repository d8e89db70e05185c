"""Runs every script of testbeds/unchanged in three ways and writes the table of docs/run.md.

python benchmarks/pages/run_table.py
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testbeds.unchanged.outcomes import WAYS, Outcome, run
from testbeds.unchanged.scripts import SCRIPTS, Script

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "run.md"

HEAD = """# Trainings that `flopwatch run` measures

Each row is a training script of
[`testbeds/unchanged`](https://github.com/flopwatch/flopwatch/tree/main/testbeds/unchanged) that ran three times from
the same seed, in new processes: with `python`, with `flopwatch run`, and with a `TrainingMonitor` or a callback of
flopwatch written into the script.

- **output**: stdout with `python` and with `flopwatch run` is equal byte by byte. It contains the loss, a hash of all
  parameters and, where code is compiled, the number of graphs.
- **FLOPs**, **tokens, samples**: each step that `flopwatch run` measures has the values of the monitor that is written
  in.
- **steps not measured**: their numbers, if there are any. Only the first step, number 0, can be missing: if the script
  has several optimizers, because which of them ends a step is known only when they step again; and if the step calls
  no module, because then nothing shows where it began. The callbacks of the frameworks measure all steps.
- **exact**: whether the log calls the FLOPs of all steps exact, the same in both ways of measuring unless noted.
- **what the log says**: the notice or the reason with which the log names what it could not see.

`flopwatch run` never knows the loss of a plain loop, nor its input wait if the batches of a step are fetched inside
of it; that is part of the time [between the passes](why.md), or of stalled steps if a batch comes far later than
usual. [Quick starts](quickstart.md) shows how to use it, and how to write a monitor into the script instead.

The page is written by `python benchmarks/pages/run_table.py`; the same comparison is a test
(`tests/automatic/test_unchanged_scripts.py`).

| training | output | FLOPs | tokens, samples | steps not measured | exact | what the log says |
| --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    lines = []
    for script in SCRIPTS:
        print(script.path, flush=True)
        outcomes = [
            run(script, way, Path(tempfile.mkdtemp()), start) for way in WAYS if script.edits or way != WAYS[-1]
        ]
        lines.append(f"| [{script.what}]({_address(script)}) | {' | '.join(_cells(script, *outcomes))} |")
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")


def start(command: Sequence[str], ranks: int) -> str:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run([sys.executable, *torchrun, *command], check=True, stdout=-1, text=True).stdout


def _cells(script: Script, bare: Outcome, seen: Outcome, written: Outcome | None = None) -> list[str]:
    output = "equal" if bare.printed == seen.printed else "**different**"
    if written is None or written.steps is None or seen.steps is None:
        return [output, "", "", "", "", "left to the monitor of the script, as a line on stderr says"]
    flops = _compared(seen, written, {"model_flops", "hardware_flops", "recompute_flops"})
    amounts = _compared(seen, written, {"tokens", "real_tokens", "samples"})
    missing = ", ".join(str(number) for number in sorted(written.steps) if number not in seen.steps)
    exact = {True: "yes", False: "no", None: "unknown"}[seen.is_exact]
    if seen.is_exact != written.is_exact:
        exact += f" (written in: {'yes' if written.is_exact else 'no'})"
    notice = seen.notices.get(script.notice or "not_exact") or (seen.why_not_exact if script.notice is None else "")
    return [output, flops, amounts, missing or "none", exact, notice.replace("|", "\\|")]


def _compared(seen: Outcome, written: Outcome, names: set[str]) -> str:
    assert seen.steps is not None
    assert written.steps is not None
    pairs = [
        (
            {n: v for n, v in values.items() if n in names and v is not None},
            {n: v for n, v in written.steps[number].items() if n in names},
        )
        for number, values in seen.steps.items()
    ]
    known = [(ours, theirs) for ours, theirs in pairs if ours]
    if not known:
        return "absent" if any(theirs for _, theirs in pairs) else "equal"
    equal = "equal" if len(known) == len(pairs) else "equal, not in the first step"
    return equal if all(ours == theirs for ours, theirs in known) else "**different**"


def _address(script: Script) -> str:
    return f"https://github.com/flopwatch/flopwatch/blob/main/testbeds/unchanged/{script.path}"


if __name__ == "__main__":
    main()

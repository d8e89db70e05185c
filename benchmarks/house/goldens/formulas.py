"""The FLOP formulas of the architectures of the testbeds, and the count of one batch of each, as text.

python -m house.goldens.formulas LINES.json [WORDS]    # in a process with the code of the tree
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from house.goldens.tree import Tree

_BATCH, _LENGTH = 2, 64
_OTHER_SHAPES = ((1, 40), (3, 96))


def record(tree: Tree, match: str = "") -> dict[str, list[str]]:
    """The lines of each architecture whose name has these words in it."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "lines.json"
        tree.run("house.goldens.formulas", str(path), match, cwd=Path(made))
        found: dict[str, list[str]] = json.loads(path.read_text())
        return found


def main() -> None:
    from testbeds.architectures import ARCHITECTURES

    warnings.filterwarnings("ignore")
    words = sys.argv[2] if len(sys.argv) > 2 else ""
    chosen = [architecture for architecture in ARCHITECTURES if words in architecture.name]
    Path(sys.argv[1]).write_text(json.dumps({each.name: list(_lines(each)) for each in chosen}))


def _lines(architecture: Any) -> Iterator[str]:
    import flopwatch

    if absence := architecture.absence():
        yield absence
        return
    model, batch = architecture.build(), architecture.batch(_BATCH, _LENGTH)
    count = flopwatch.count_flops(model, batch)
    for name in ("model", "hardware", "forward", "backward", "recompute", "padding"):
        yield f"{name} {getattr(count, f'{name}_flops'):,}"
    yield f"counted by {count.method}, attention {count.attention}, coverage {count.coverage}, notes {count.notes}"
    for op, flops in sorted(count.by_op.items()):
        yield f"op {op}: {flops.total:,}"
    law = flopwatch.fit_flops_law(model, batch)
    yield f"formula: exact {law.exact}, {law.seq_lens}, domain {dict(law.domain)}, per batch {law.per_batch}"
    yield f"doubts {law.doubts}, notes {law.notes}"
    for phase, terms in law.coefficients.items():
        yield f"{phase} = " + " + ".join(f"{number} {term}" for term, number in sorted(terms.items()) if number)
    for samples, length in _OTHER_SHAPES:
        yield f"at {samples} x {length}: {_flops_at(law, samples, length)}"


def _flops_at(law: Any, samples: int, length: int) -> str:
    try:
        return f"{law.model_flops(samples, None if law.seq_lens is None else length):,}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()

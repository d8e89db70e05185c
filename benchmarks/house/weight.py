"""The weight of the house: lines by package and by purpose, and what it has more than once; written into docs/house.md.

PYTHONPATH=benchmarks python benchmarks/house/weight.py               # writes the tables, as `make pages` does
PYTHONPATH=benchmarks python benchmarks/house/weight.py --no-page     # only prints them, and where each copy is
PYTHONPATH=benchmarks python benchmarks/house/weight.py --source /a/checkout/src --no-page
"""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from house.one_of_each import (
    Module,
    attributes_of_classes,
    import_cycles,
    imports_in_functions,
    places,
    read_modules,
    short_single_callers,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "house.md"
BEGIN, END = "<!-- weight: begin -->", "<!-- weight: end -->"
BROAD = re.compile(r"except (Base)?Exception\b|except:|except \([^)]*\b(Base)?Exception\b")
KINDS = ("code", "docstring", "comment", "blank")
SLICES = {
    "saying it: words, tables, bars, pages, notices": (
        r"\.(report|present)\b|notebook|screens?$|panels|bars|words|texts|console|notices|numbers|\.text$|html"
    ),
    "`why`: waterfall, advice, traces": r"waterfall|advice|conclusion|[._]why|traces?\b|trace_|time_uses",
    "comparing A with B": r"compar|ratios",
    "leases, claims, heartbeats, guards": r"claim|heartbeat|guard|attempts",
    "reading files that may be damaged or hostile": (
        r"flopwatch\.(files|decode)$|reading|log_file|run_checks|trial_files|what_ran|runs\.log$"
    ),
    "private names of torch and others": r"_internals|torch_private",
    "several ranks of a training": r"monitor\.ranks",
    "Ray": r"\bray|_ray",
    "Slurm": r"slurm|sacct",
    "live counts and their evidence": r"tracing\.live|evidence",
}
"""Purposes that cross packages, each as a pattern of module names; a module may be in several."""


def kinds_of_lines(module: Module) -> Counter[str]:
    """Each line of a file is code, docstring, comment or blank; a blank line in a docstring belongs to it."""
    inside = {
        number
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found: Counter[str] = Counter()
    for number, line in enumerate(module.lines, 1):
        stripped = line.strip()
        kind = "comment" if stripped.startswith("#") else "code" if stripped else "blank"
        found["docstring" if number in inside else kind] += 1
    return found


def packages_table(modules: list[Module]) -> Iterator[str]:
    yield from _head(("package", "files", "lines", *KINDS, "functions"))
    found: dict[str, Counter[str]] = {}
    folders = {module.name.split(".")[1] for module in modules if module.name.count(".") > 1}
    for module in modules:
        first = module.name.partition(".")[2].partition(".")[0]
        counted = kinds_of_lines(module)
        more = {"files": 1, "lines": len(module.lines), "functions": len(module.functions)}
        found.setdefault(f"`{first}`" if first in folders else "files of the root", Counter()).update(
            counted + Counter(more)
        )
    for name, counts in sorted(found.items(), key=lambda item: -item[1]["lines"]):
        yield _row(name, counts)
    yield _row("**total**", sum(found.values(), Counter()))


def _row(name: str, counts: Counter[str]) -> str:
    return f"| {name} | {' | '.join(f'{counts[key]:,}' for key in ('files', 'lines', *KINDS, 'functions'))} |"


def slices_table(modules: list[Module]) -> Iterator[str]:
    yield from _head(("what it is for", "files", "lines"))
    for what, pattern in SLICES.items():
        chosen = [module for module in modules if re.search(pattern, module.name)]
        yield f"| {what} | {len(chosen)} | {sum(len(module.lines) for module in chosen):,} |"


def copies_table(modules: list[Module]) -> Iterator[str]:
    yield from _head(("what", "number"))
    cycles = import_cycles(modules)
    heavy = sorted(attributes_of_classes(modules).items(), key=lambda item: -item[1])[:5]
    for what, found in places(modules).items():
        yield f"| {what} | {len(found)} |"
    yield f"| import cycles | {len(cycles)} |"
    yield f"| imports inside functions | {imports_in_functions(modules)} |"
    yield f"| private functions of at most 6 lines with one caller | {short_single_callers(modules)} |"
    yield f"| `except Exception` and broader | {sum(len(BROAD.findall(module.text)) for module in modules)} |"
    names = Counter(node.name for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))
    yield f"| names that more than one class has | {sum(number > 1 for number in names.values())} |"
    yield f"| files that know `micro_batch_size` | {sum('micro_batch_size' in module.text for module in modules)} |"
    yield f"| files above 500 lines | {sum(len(module.lines) > 500 for module in modules)} |"
    named = ", ".join(f"`{name.rpartition('.')[2]}` {count}" for name, count in heavy)
    yield f"| classes with most attributes | {named} |"


def _head(cells: Iterable[str]) -> tuple[str, str]:
    cells = tuple(cells)
    return f"| {' | '.join(cells)} |", "| --- |" + " --: |" * (len(cells) - 1)


def tables(modules: list[Module]) -> str:
    titled = {
        "Lines by package": packages_table(modules),
        "Lines by purpose (a file may have several)": slices_table(modules),
        "One of each": copies_table(modules),
    }
    return "\n\n".join(f"{title}:\n\n" + "\n".join(lines) for title, lines in titled.items())


def page_with_tables(page: str, content: str) -> str:
    block = f"{BEGIN}\nWritten by `benchmarks/house/weight.py`, which `make pages` runs.\n\n{content}\n{END}"
    if BEGIN not in page:
        return f"{page.rstrip()}\n\n## Weight\n\n{block}\n"
    return re.sub(f"{BEGIN}.*{END}", lambda _: block, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-page", action="store_true", help="print the tables and where each copy is; write nothing")
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    options = parser.parse_args()
    modules = read_modules(options.source)
    content = tables(modules)
    print(content)
    if options.no_page:
        for what, found in places(modules).items():
            print(f"\n{what}:", *found, sep="\n  ")
        for cycle in import_cycles(modules):
            print(f"\ncycle of {len(cycle)}: {' '.join(cycle)}")
    else:
        PAGE.write_text(page_with_tables(PAGE.read_text("utf-8"), content), encoding="utf-8")
    print(f"\n{sum(len(module.lines) for module in modules):,} lines in {len(modules)} files of {options.source}")


if __name__ == "__main__":
    main()

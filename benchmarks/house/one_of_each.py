"""What the house should have once: finds every place in `src` that does one of these things, by how it looks.

Each rule was checked against the five parsers, three validators and seven drawings that the review of f953919 found by
reading. A rule that looks for a name misses a copy with another name; the places it prints are there to be read.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_USES_OF_TIME = {"input_wait", "eval", "checkpoint", "restart", "start_up", "pause", "compile", "rerun", "warm_up"}
_LEAST_USES = 4
_LEAST_CHECKS = 3
_SHORT_FUNCTION_LINES = 6
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    name: str
    text: str
    tree: ast.Module
    lines: list[str]

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    def source(self, node: ast.stmt) -> str:
        """Its lines; `ast.get_source_segment` would divide the whole file again for each of them."""
        return "\n".join(self.lines[node.lineno - 1 : node.end_lineno])


def read_modules(source: Path) -> list[Module]:
    modules = []
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        modules.append(Module(name, text, ast.parse(text), text.splitlines()))
    return modules


def _parses_stat(module: Module) -> Iterator[str]:
    if re.search(r"/proc/[^/\s]+/stat[\"']", module.text):
        yield module.name


def _validates_json(module: Module) -> Iterator[str]:
    """Reads values by the types of any class, or has several checks of a value's type."""
    checks = re.findall(r"def _(?:is|are)_\w+\(value: Any\) -> bool", module.text)
    if re.search(r"get_type_hints\([a-z]", module.text) or len(checks) >= _LEAST_CHECKS:
        yield module.name


def _follows_lines(module: Module) -> Iterator[str]:
    """Goes to where it has read to before, and reads on."""
    if re.search(r"\.seek\((?:self\.)?_?offset\)", module.text):
        yield module.name


def _thins_a_curve(module: Module) -> Iterator[str]:
    """Takes every so many neighbours of a list together."""
    if re.search(r"range\(0, len\([\w.]+\), (?:2|size)\)", module.text):
        yield module.name


def _draws_a_waterfall(module: Module) -> Iterator[str]:
    """Goes through the losses of a waterfall, whatever its name, and returns lines, cells or markup."""
    for function in module.functions:
        returned = ast.unparse(function.returns) if function.returns else ""
        losses = re.search(r"\b(?:waterfall|self)\.(?:losses|largest\()", module.source(function))
        if losses and "aterfall" in module.text and re.search(r"Bars|Text|Renderable|str\]", returned):
            yield f"{module.name}.{function.name}"


def _names_uses_of_time(module: Module) -> Iterator[str]:
    """A literal with at least four of the uses; one inside another counts once."""
    for statement in module.tree.body:
        if sum(use in module.source(statement) for use in _USES_OF_TIME) < _LEAST_USES:
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Dict | ast.Tuple | ast.List | ast.Set | ast.Call):
                words = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                if len(words & _USES_OF_TIME) >= _LEAST_USES and isinstance(statement, ast.Assign | ast.AnnAssign):
                    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                    yield f"{module.name}.{ast.unparse(target)}"
                    break


def _tells_a_difference(module: Module) -> Iterator[str]:
    """Decides by the ends of an interval: compares them with another interval's, or with zero or a least amount."""
    ends = r"\blow > |\bhigh < |\bhigh\b[^\n=]*[<>] [^\n=]*\blow\b|\b(?:low|high)\.?\w* [<>] 0"
    for function in module.functions:
        ends_taken = {
            each.arg for each in function.args.args if each.annotation and "float" in ast.unparse(each.annotation)
        }
        answer = ast.unparse(function.returns) if function.returns else ""
        source = module.source(function)
        of_ends = {"low", "high"} <= ends_taken and re.search(ends, source)
        of_pairs = re.search(r"\w\[[01]\][^\n=]* [<>]=? [^\n=]*\w\[[01]\]", source)
        if answer in ("bool", "str") and (of_ends or of_pairs):
            yield f"{module.name}.{function.name}"


RULES: dict[str, Callable[[Module], Iterator[str]]] = {
    "parsers of `/proc/PID/stat`": _parses_stat,
    "validators of JSON, besides pydantic": _validates_json,
    "followers of JSON lines": _follows_lines,
    "thinners of curves": _thins_a_curve,
    "drawings of a waterfall": _draws_a_waterfall,
    "vocabularies of time": _names_uses_of_time,
    "statistics of a difference": _tells_a_difference,
}


def places(modules: list[Module]) -> dict[str, list[str]]:
    """By what should be there once, where it is."""
    return {what: [place for module in modules for place in rule(module)] for what, rule in RULES.items()}


def import_cycles(modules: list[Module]) -> list[list[str]]:
    """Groups of modules that import each other, imports inside functions included, those for type checking not."""
    names = {module.name for module in modules}
    edges: dict[str, set[str]] = {}
    for module in modules:
        found = {name if name in names else name.rpartition(".")[0] for name in _imported(module.tree)}
        edges[module.name] = (found & names) - {module.name}
    return [sorted(group) for group in _groups(edges) if len(group) > 1]


def _imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from _imported(child)


def _groups(edges: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components: what reaches each other."""
    reached = {name: _reach(edges, name) for name in edges}
    groups: list[set[str]] = []
    for name in edges:
        if not any(name in group for group in groups):
            groups.append({name} | {other for other in reached[name] if name in reached[other]})
    return groups


def _reach(edges: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        waiting += (new := edges[waiting.pop()] - found)
        found |= new
    return found


def imports_in_functions(modules: list[Module]) -> int:
    found = set()
    for module in modules:
        for function in module.functions:  # one inside another is walked twice
            found |= {node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)}
    return len(found)


def short_single_callers(modules: list[Module]) -> int:
    """Private functions of at most six lines whose name stands once in their module besides the definition."""
    count = 0
    for module in modules:
        words = Counter(re.findall(r"\w+", module.text))
        for function in module.functions:
            lines = (function.end_lineno or 0) - function.lineno + 1
            if function.name.startswith("_") and not function.name.startswith("__") and lines <= _SHORT_FUNCTION_LINES:
                count += words[function.name] == 2
    return count


def attributes_of_classes(modules: list[Module]) -> dict[str, int]:
    """By class, the names that its methods assign to `self`."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
                found[f"{module.name}.{node.name}"] |= {
                    each.attr
                    for each in stored
                    if isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name) and each.value.id == "self"
                }
    return {name: len(attributes) for name, attributes in found.items()}

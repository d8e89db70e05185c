"""Brings the Chinese sentences up to date with the source: extracts the templates, updates `.po`, compiles `.mo`.

python benchmarks/pages/translations.py

New templates come into the `.po` without a translation, and those that are gone leave it. `test_translations.py`
fails until every template has its Chinese.
"""

import ast
import io
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from babel.messages import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

SOURCE = Path(__file__).parents[2] / "src" / "flopwatch"
PO = SOURCE / "locale" / "zh" / "LC_MESSAGES" / "flopwatch.po"
MO = PO.with_suffix(".mo")


def templates(source: Path = SOURCE) -> Catalog:
    """All that the source says. Babel's own reader of Python looks into calls only, and there are tables too."""
    found = Catalog()
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for message in _messages(node):
                found.add(message)
    return found


def _messages(node: ast.AST) -> Iterator[str | tuple[str, ...]]:
    """The templates of a node; singular and plural of `counted` are one message."""
    texts: list[ast.expr] = []
    match node:
        case ast.Call(func=ast.Name(id="Said"), args=[template, *_]):
            texts = [template]
        case ast.Call(func=ast.Name(id="Use"), args=[_key, *rest], keywords=named):
            texts = [*rest, *(each.value for each in named if each.arg != "of_trace")]
        case ast.Call(func=ast.Attribute(attr="numbers") | ast.Name(id="numbers" | "_number"), args=heads):
            texts = heads
        case ast.AnnAssign(annotation=ast.Name(id="Templates"), value=ast.Dict(values=values)):
            texts = values
        case ast.Call(func=ast.Name(id="counted"), args=[_amount, one, many]):
            yield tuple(filter(None, map(_text, (one, many))))
    yield from filter(None, map(_text, texts))


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def stored() -> Catalog:
    return read_po(io.BytesIO(PO.read_bytes()), locale="zh")


def compiled(catalog: Catalog) -> bytes:
    """What gettext reads; it holds no date, so that the same sentences are always the same bytes."""
    catalog.creation_date = catalog.revision_date = datetime.fromtimestamp(0, UTC)
    file = io.BytesIO()
    write_mo(file, catalog)
    return file.getvalue()


def main() -> None:
    catalog = stored() if PO.exists() else Catalog(locale="zh")
    catalog.update(templates(), no_fuzzy_matching=True)
    for message in catalog:
        message.flags.clear()  # Babel marks templates as those of Python
    with PO.open("wb") as file:
        write_po(file, catalog, width=0, no_location=True, omit_header=True, sort_output=True, ignore_obsolete=True)
    MO.write_bytes(compiled(stored()))
    missing = [message.id for message in catalog if message.id and not message.string]
    print(f"wrote {PO}: {len(catalog)} templates, {len(missing)} without Chinese")


if __name__ == "__main__":
    main()

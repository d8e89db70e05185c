"""What a terminal shows of a document."""

from io import BytesIO, TextIOWrapper

from rich.console import Console

from flopwatch.present.document import Document
from flopwatch.present.terminal import print_document


def document_text(document: Document, width: int = 80, encoding: str = "utf-8") -> str:
    """The document without colours, as a terminal of this width and encoding shows it."""
    shown = BytesIO()
    stream = TextIOWrapper(shown, encoding=encoding, newline="")
    print_document(document, Console(file=stream, width=width, highlight=False, color_system=None))
    stream.flush()
    return shown.getvalue().decode(encoding)

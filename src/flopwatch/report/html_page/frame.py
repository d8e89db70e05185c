"""The frame of every HTML page: style, tooltips, and a policy that lets the page load nothing."""

import hashlib
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path

from flopwatch.present.svg import esc
from flopwatch.version import __version__


def whole_page(
    title: str, header: Iterable[str], sections: Iterable[str], source: str, *, style: str = "", script: str = ""
) -> str:
    """Return a page that loads no other files.

    Args:
        title: Title of the page, not escaped yet.
        header: HTML of the header.
        sections: HTML of the sections below it.
        source: The folder or file from which the page was made, not escaped yet.
        style: CSS that is added to that of all pages.
        script: JavaScript that is added to that of all pages.
    """
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text(encoding="utf-8") + style
    script = (folder / "tips.js").read_text(encoding="utf-8") + script
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{esc(title)}</title><style>{style}</style></head><body>",
            *header,
            "<main>",
            *sections,
            "</main>",
            f"<footer>flopwatch {esc(__version__)}, from {esc(source)}. The page loads no files.</footer>",
            f"<script>{script}</script></body></html>\n",
        ]
    )


def _policy(script: str) -> str:
    """Return a Content-Security-Policy that forbids loading other files and running any script but this one."""
    own = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'; base-uri 'none'; form-action 'none'"
    )

"""Which pages have a Chinese one, and which state of the English page it was translated from.

python -m support.chinese_pages sweep.md      # in tests/, after docs/zh/sweep.md was brought up to date; --all for all
"""

import hashlib
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
CHINESE = DOCS / "zh"
STATE = Path(__file__).parents[1] / "data" / "translated_pages.json"
ENGLISH_ONLY = {"campaigns.md", "design.md", "glossary.md", "house.md", "requirements.md"}
"""For contributors; the glossary is in both languages."""
PAGES = sorted(
    name
    for page in DOCS.glob("**/*.md")
    if not (name := str(page.relative_to(DOCS))).startswith("zh/") and name not in ENGLISH_ONLY
)
_PARTS = re.compile(r"^(#+) |^```(\w*)\n(.*?)^```$|\]\((?:\.\./)*(pictures/[^)]*)\)|^(\|)", re.DOTALL | re.MULTILINE)


def outline(page: Path) -> list[str]:
    """In their order: the levels of headings, code without comments, pictures, and rows of tables."""
    found = _PARTS.findall(page.read_text("utf-8"))
    return [
        level or picture or row or language + re.sub(r"\s*# .*", "", code)
        for level, language, code, picture, row in found
    ]


def fingerprint(page: Path) -> str:
    """Of the words; numbers may change, because commands write them into both pages."""
    return hashlib.sha256(re.sub(r"\d[\d,.]*", "0", page.read_text("utf-8")).encode()).hexdigest()[:16]


if __name__ == "__main__":
    state = json.loads(STATE.read_text("utf-8")) if STATE.exists() else {}
    named = PAGES if sys.argv[1:] == ["--all"] else sys.argv[1:]
    state |= {page: fingerprint(DOCS / page) for page in named}
    STATE.write_text(json.dumps({page: state[page] for page in sorted(state)}, indent=1) + "\n", "utf-8")

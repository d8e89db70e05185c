"""Outcomes in colour, the same everywhere; the word is always there, so nobody needs the colour."""

from rich.text import Text

from flopwatch.plain_text import one_line

_STYLES = {
    "ok": "green",
    "oom_device": "yellow",
    "oom_host": "yellow",
    "oom_inferred": "yellow dim",
    "unsupported": "blue",
    "skipped": "dim",
    "cancelled": "dim",
}


def outcome_text(outcome: str) -> Text:
    """Red for what went wrong by itself."""
    return Text(one_line(outcome, 40), style=_STYLES.get(outcome, "red"))

"""Outcomes in colour on the screens of `sweep`, `trial` and `fit`. The word is always shown, so colour is optional."""

from rich.text import Text

from flopwatch.records.reading import one_line

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

"""The report of a run: its page, `why`, `explain` and what a notebook shows."""

"""The line of `flopwatch watch` that tells how the ranks of a training get along."""

from rich.text import Text

from flopwatch.cli.quantities import percent
from flopwatch.cli.screen_lines import line
from flopwatch.cli.watch_state import WatchedRun

_LABEL_WIDTH = 7
_CAUSES = {"input": "waiting for input", "compute": "computing", "host": "standing still"}


def ranks_lines(run: WatchedRun, width: int) -> list[Text]:
    """Nothing for a single process."""
    world_size = 1 if run.start is None else run.start.world_size
    if world_size == 1 or run.row is None:
        return []
    text = line((f"{'ranks':<{_LABEL_WIDTH}}", "dim"))
    for part, style in _parts(run, world_size):
        if text.cell_len + len(part) <= width:
            text.append(part, style)
    return [text]


def _parts(run: WatchedRun, world_size: int) -> list[tuple[str, str]]:
    reporting = run.value("ranks/reporting")
    if reporting is not None and reporting < world_size:
        return [(f"{reporting} of {world_size} report: the numbers are the logging rank's own", "yellow")]
    parts = [(f"{world_size}", "bold")]
    values = {} if run.row is None else run.row.values
    rank, excess = values.get("ranks/straggler"), values.get("ranks/straggler_excess_percent")
    if rank is not None and excess is not None:
        shares = {cause: values.get(f"ranks/straggler_{cause}_percent", 0.0) for cause in _CAUSES}
        cause = max(shares, key=lambda name: shares[name])
        parts.append((f", rank {rank} holds the others back by {percent(excess)} of the step: {_CAUSES[cause]}", "red"))
    waiting = run.value("ranks/waiting_percent")
    if waiting is not None:
        parts.append((f", {percent(waiting)} of the time is waiting for each other", "dim"))
    return parts

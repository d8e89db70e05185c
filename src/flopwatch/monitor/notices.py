"""Every notice of the monitor: level, code, and a message with the value and what to do next."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from flopwatch.records.flops import Peak
from flopwatch.records.run import Level

Tell = Callable[[Level, str, str], None]
"""Takes a level, a code and a message."""


class NoticeText(NamedTuple):
    """A notice without its step. A suffix after a colon in the code makes notices of one kind distinct."""

    level: Level
    code: str
    message: str


def mfu_above_peak(mfu: float, peak: Peak) -> NoticeText:
    return NoticeText(
        "warning",
        "mfu_above_peak",
        f"MFU is {100 * mfu:.1f} %, more than the device can do: the peak of {peak.flops_per_s:.4g} FLOP/s "
        f"({peak.device}, {peak.dtype}, {peak.source}) is not that of this training; pass dtype= or "
        "peak_flops_per_s=",
    )


def nothing_to_count(*, has_model: bool, has_batch: bool) -> NoticeText:
    """One notice, whatever of the two is missing."""
    of_model = "model= to TrainingMonitor (or call set_model)"
    of_batch = "batch= to step() or log_step(), or each one to micro_batch()"
    missing = [*([] if has_model else [of_model]), *([] if has_batch else [of_batch])]
    what = " and no ".join([*([] if has_model else ["model"]), *([] if has_batch else ["batch"])])
    tokens = "" if has_batch else "no tokens per second, "
    return NoticeText(
        "warning",
        "no_batch" if has_model else "no_model",
        f"no {what} was given, so there will be {tokens}no FLOPs and no MFU; pass {', and '.join(missing)}",
    )


def not_readable(name: str) -> NoticeText:
    if name == "batch":
        return NoticeText(
            "warning",
            "batch_reused",
            "the batch's tensors were written into after log_step, so steps of one window have no tokens and "
            "FLOPs; from here on batches are read at once",
        )
    return NoticeText(
        "warning",
        f"not_readable:{name}",
        f"{name} was written into after log_step, is not a single number, or is spread over ranks, so it is "
        f"left out; pass {name}.detach().clone(), a number, or {name}.full_tensor()",
    )


def input_wait_unknown() -> NoticeText:
    return NoticeText(
        "info",
        "input_wait_unknown",
        "input wait is not known: micro-batches are fetched inside the step; write `for batch in "
        "monitor.batches(loader)` to have it",
    )


def time_outside_steps(seconds: float) -> NoticeText:
    return NoticeText(
        "warning",
        "time_outside_steps",
        f"{seconds:.3g} s passed between two steps, far longer than usual: counted as time outside steps "
        '(time/outside_seconds), not as input wait. Put evaluation and saving into `with monitor.phase("eval")`; if it '
        "was the loader, write `for batch in monitor.batches(loader)`",
    )


def stalled(seconds: float) -> NoticeText:
    return NoticeText(
        "info",
        "stalled",
        f"some steps took {seconds:.3g} s longer than typical ones, which counts as stalled "
        '(time/stall_seconds); if that was evaluation or saving, put it into `with monitor.phase("eval")`',
    )


def log_not_resumed(log: Path, error: BaseException) -> NoticeText:
    return NoticeText("warning", "log_not_resumed", f"the totals start at 0, because {log} cannot be used: {error}")


def steps_lost(last_step: int, first_step: int) -> NoticeText:
    return NoticeText(
        "warning",
        "steps_lost",
        f"the log ends at step {last_step} and the run continues at {first_step}: the totals lack the steps "
        "in between; save monitor.state_dict() with your checkpoint and load it",
    )


def totals_estimated(first_step: int) -> NoticeText:
    return NoticeText(
        "info",
        "totals_estimated",
        f"the run continues at step {first_step}, inside a logged window of several ranks: tokens and FLOPs of its "
        "first steps are divided as on this rank; call monitor.state_dict() on every rank when you save, and they are "
        "exact",
    )


def state_is_behind() -> NoticeText:
    return NoticeText(
        "warning",
        "state_is_behind",
        "state_dict() was not called on all ranks, or some are late: the totals in it end with the last window "
        "of all ranks. Call it on every rank to have them up to this step",
    )


def ranks_unknown(rank: int, world_size: int) -> NoticeText:
    return NoticeText(
        "warning",
        "ranks_unknown",
        f"{world_size} ranks, but torch.distributed is not initialised before the first step: all numbers are those "
        f"of rank {rank}",
    )


def ranks_lost(rank: int, why: str) -> NoticeText:
    return NoticeText("warning", "ranks_lost", f"from here on all numbers are those of rank {rank}: {why}")


def ranks_missing(missing: int, world_size: int) -> NoticeText:
    return NoticeText(
        "warning",
        "ranks_missing",
        f"{missing} of {world_size} ranks did not report this window: its numbers are those of the logging rank, and "
        "the totals lack the missing ranks' part (ranks/reporting says in which rows)",
    )


def device_late(steps: int, seconds: float) -> NoticeText:
    return NoticeText(
        "warning",
        "device_late",
        f"the device had not finished the last {steps} steps {seconds:g} s after the end: they are in no number",
    )


def ranks_absent(ranks: Sequence[int]) -> NoticeText:
    return NoticeText(
        "warning",
        "ranks_absent",
        f"no monitor of {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} joined this run before "
        "it ended, so its totals lack those ranks; create the same monitors on every rank, in the same order and with "
        "the same logging_rank",
    )


def ranks_late(seconds: float) -> NoticeText:
    return NoticeText(
        "warning",
        "ranks_late",
        f"other ranks had not closed their monitor {seconds:.0f} s after this one: the last window lacks them",
    )


def not_exact(reasons: Sequence[str]) -> NoticeText:
    return NoticeText("info", "not_exact", f"the FLOPs of these steps are not exact: {'; '.join(reasons)}")


def rows_in_doubt(step: int, counted_at: int | None) -> NoticeText:
    since = "earlier rows" if counted_at is None else f"rows after step {counted_at}, when one was last counted,"
    return NoticeText(
        "warning",
        f"rows_in_doubt:{counted_at}",
        f"step {step} was counted as it ran and did not cost what steps like it had cost: {since} may be wrong "
        "although they say exact",
    )


def optimizer_products(flops: int) -> NoticeText:
    return NoticeText(
        "info",
        "optimizer_products",
        f"the optimizer itself computes matrix products, {flops:,} FLOPs in a counted step; neither the model's FLOPs "
        "nor the executed FLOPs include them",
    )


def flops_unknown(error: BaseException) -> NoticeText:
    return NoticeText(
        "warning",
        "flops_unknown",
        f"there will be no FLOPs and no MFU but of steps that were counted as they ran: {error}. Pass "
        "batch= as the model takes it, loss_fn=..., or flops_fn=... with a number of your own",
    )


def peak_unknown(dtype: str, why: str) -> NoticeText:
    return NoticeText("warning", "peak_unknown", f"there will be no MFU: the peak for {dtype} is not known. {why}")


def shapes_not_counted() -> NoticeText:
    return NoticeText(
        "info",
        "shapes_not_counted",
        "batches keep coming in shapes that were never counted, and counting has had its share of the time: "
        "their steps have no FLOPs (perf/counted_steps_percent); pass flops_fn=... to have them all",
    )


def coverage_below_1(coverage: float, notes: Sequence[str]) -> NoticeText:
    return NoticeText(
        "warning",
        "coverage_below_1",
        f"{100 * (1 - coverage):.3g} % of the matmul-like op calls have no formula, so MFU is a lower bound: "
        f"{'; '.join(notes)}. Add one with flopwatch.register_formula",
    )


def counting() -> NoticeText:
    return NoticeText(
        "info",
        "counting",
        "counting the FLOPs of this model once, with fake tensors on the CPU: some seconds, in no step's time",
    )

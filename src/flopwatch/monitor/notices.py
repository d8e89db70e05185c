"""What the monitor tells the user: a notice has a level, a code, and a text with what happened and what to do next."""

from collections.abc import Callable, Sequence
from typing import Any

from flopwatch.language import Said, Templates
from flopwatch.records.run import Level
from flopwatch.text import first_line, listed

Notify = Callable[[Level, str, str], None]
"""A function that takes a level, a code and a message, and sends only the first message of each code."""
NoticeText = tuple[Level, str, str]
"""What `Notify` takes. A suffix of the code, as in `sink_failed:csv`, allows one message per sink."""

_INFOS: Templates = {
    "input_wait_unknown": "the input wait is not known, because micro-batches are fetched inside the step; a "
    "TrainingMonitor measures it: `for batch in monitor.batches(loader)`, or `with monitor.input_wait():` around your "
    "own function that fetches",
    "work_between_steps": "the model was called without gradients between two steps. The {seconds:.3g} s between them "
    "are part of the step time, and their input wait is unknown. If this is evaluation, put it into "
    '`with monitor.phase("eval")`',
    "stalled": "some steps took {seconds:.3g} s longer than typical ones; this time is counted as stalled "
    "(time/stall_seconds). If these steps fetch batches, it may be input wait that was not measured. If the loop has a "
    'TrainingMonitor and evaluates or saves inside of steps, put that into `with monitor.phase("eval")`. Other work on '
    "the machine is a frequent cause too",
    "totals_estimated": "the run continues at step {first_step}, in the middle of a logged window of several ranks. "
    "The tokens and FLOPs of the window's earlier steps are estimated from this rank's share; to make them exact, call "
    "monitor.state_dict() on every rank when you save",
    "not_exact": "the FLOPs of these steps are not exact: {reasons}",
    "counting_time_unknown": "the time in steps includes an unknown time for counting FLOPs, because all {steps} timed "
    "steps were counted as they ran. In a longer run most steps are not counted, and show how long a step takes alone",
    "measured_peak_not_used": "`flopwatch peak --measure` has measured {rate} on this device, but with low confidence, "
    "because its repetitions differ by 20 % or more. So it does not show how much of the peak can be reached; measure "
    "again while nothing else runs, with `flopwatch peak --measure --measure-again`",
    "not_causal": "attention causal was asked for, but the model ran no fused attention. Plain matrix products show no "
    "mask, so all pairs of positions are counted, and the FLOPs are those of attention full",
    "hybrid_without_counters": "mode hybrid counts FLOPs as mode {mode} does: {why}; `flopwatch doctor` shows what "
    "is missing",
    "every_step_counted": "count: every slows down every step, so step times, rates and MFU are those of slower steps; "
    "leave it out to see what the training does alone",
    "optimizer_products": "the optimizer itself computes matrix products, {flops:,} FLOPs in a counted step; neither "
    "the model's FLOPs nor the executed FLOPs include them",
}
_WARNINGS: Templates = {
    "mfu_above_peak": "MFU is {percent:.1f} %, more than the device can do, so the peak of {peak:.4g} "
    "FLOP/s ({device}, {dtype}, {source}) is wrong for this training; pass dtype=, or the dense peak as "
    "peak_flops_per_s=312e12 (--peak-tflops 312) if it is 312 TFLOP/s",
    "counters_absent": "hardware counters were asked for: {why}; `flopwatch doctor` shows what is missing",
    "counters_disagree": "hardware counters and count disagree: {counters} of the device by its counters ({source}), "
    "{counted} by the FLOPs of the steps on tensor cores. Likely reasons are a kernel that is not counted (tell its "
    "FLOPs with flopwatch.register_formula), another process on this device, or products in another type than {dtype}, "
    "on whose peak MFU and the counters' figure rely (pass dtype=)",
    "step_logged_twice": "step {step} was logged twice, and both count as optimizer steps. With gradient "
    "accumulation, pass each batch to micro_batch() and log the step once, after optimizer.step()",
    "folder_in_use": "process {pid} is writing the log of another run in {output_dir}, so the rows of both runs are "
    "mixed there; give each run an output_dir of its own, or close the first monitor before the second starts",
    "time_outside_steps": "{seconds:.3g} s passed between two steps, far longer than usual. This is counted as time "
    "outside steps (time/outside_seconds), not as input wait. To name it, mark it with a TrainingMonitor: "
    '`with monitor.phase("checkpoint")` around saving, `for batch in monitor.batches(loader)` for the data',
    "log_not_resumed": "the totals start at 0, because those in {log} cannot be read: {why}",
    "steps_lost": "the log ends at step {last_step} and the run continues at step {first_step}, so the totals lack the "
    "steps in between; save monitor.state_dict() with your checkpoint and load it",
    "state_is_behind": "state_dict() was not called on all ranks, or some ranks are late, so the saved totals end with "
    "the last window that all ranks have sent; call state_dict() on every rank to save them up to this step",
    "ranks_unknown": "there are {world_size} ranks, but torch.distributed was not initialised before the first step, "
    "so all numbers are those of rank {rank} only; call torch.distributed.init_process_group before the first step",
    "ranks_lost": "from now on all numbers are those of rank {rank} only: {why}",
    "ranks_missing": "{missing} of {world_size} ranks sent no numbers for this window, so the row has those of the "
    "logging rank only, and the totals lack the missing ranks; ranks/reporting shows the number of ranks in each row",
    "ranks_late": "other ranks had not closed their monitor {seconds:.0f} s after this one, so the last window lacks "
    "their numbers; close the monitor on every rank when the training ends",
    "device_late": "the device had not finished the last {steps} steps {seconds:g} s after the end of the run, so no "
    "number includes them",
    "flops_unknown": "the FLOPs of this model could not be counted: {why}. Pass as batch= what the model is called "
    "with, or pass flops_fn=..., which returns the FLOPs of a batch",
    "batch_reused": "the training wrote into a batch's tensors after log_step, so some steps of one window have no "
    "tokens and no FLOPs; later batches are read during log_step",
    "not_readable": "{name} was written into after log_step, is not a single number, or is spread over ranks, so it is "
    "left out; pass {name}.detach().clone(), a number, or {name}.full_tensor()",
    "ranks_absent": "no monitor of rank {ranks} joined this run before it ended, so the totals lack them; create the "
    "same monitors on every rank, in the same order and with the same logging_rank",
    "rows_in_doubt": "the FLOPs of steps {steps} may be wrong, and their rows are not called exact any longer: {shown}",
    "peak_unknown": "there will be no MFU for {dtype}: {why}",
    "coverage_below_1": "{percent:.3g} % of the matmul-like op calls have no formula, so MFU is a lower bound: "
    "{notes}. Add a formula with flopwatch.register_formula",
}


def notice(code: str, **facts: Any) -> NoticeText:
    """The notice of a code whose text is in the tables above, with these facts in it; an exception in one line."""
    said = {name: first_line(fact) if isinstance(fact, BaseException) else fact for name, fact in facts.items()}
    name = code.partition(":")[0]
    if name in _INFOS:
        return "info", code, Said(_INFOS[name], **said)
    return "warning", code, Said(_WARNINGS[name], **said)


def not_a_model(model: object) -> Said:
    got = Said("the class {name}", name=model.__name__) if isinstance(model, type) else type(model).__name__
    return Said(
        "model= must be the torch.nn.Module that is trained, got {got}, so there will be no FLOPs and no MFU", got=got
    )


def nothing_to_count(*, has_model: bool, has_batch: bool, is_counted: bool = False) -> NoticeText:
    """Make one notice about a missing model, a missing batch, or both. A live count needs no batch."""
    if has_batch:
        text = Said(
            "no model was given, so there will be no FLOPs and no MFU; pass model= to TrainingMonitor (or call "
            "set_model)"
        )
    elif not has_model:
        text = Said(
            "no model and no batch was given, so there will be no tokens per second, no FLOPs and no MFU; pass model= "
            "to TrainingMonitor (or call set_model), and batch= to step() or log_step(), or each one to micro_batch()"
        )
    else:
        text = Said(
            "no batch was given, so there will be {effects}; pass batch= to step() or log_step(), or each one to "
            "micro_batch()",
            effects=Said("no tokens per second") if is_counted else Said("no tokens per second, no FLOPs and no MFU"),
        )
    return "warning", "no_batch" if has_model else "no_model", text


def not_readable(name: str) -> NoticeText:
    return notice("batch_reused") if name == "batch" else notice(f"not_readable:{name}", name=name)


def ranks_absent(ranks: Sequence[int]) -> NoticeText:
    return notice("ranks_absent", ranks=", ".join(map(str, ranks)))


def rows_in_doubt(steps: Sequence[tuple[int, int]], shown: str) -> NoticeText:
    ranges = [f"{first}" if first == last else f"{first} to {last}" for first, last in steps]
    begins, ends = steps[0][0], steps[-1][1]
    return notice(f"rows_in_doubt:{begins}:{ends}", steps=listed(ranges, 8), shown=shown)


def repeated_weights(names: Sequence[str]) -> Said:
    return Said(
        "the model is tensor parallel, but {names} is not divided, so that its products, which every rank may run "
        "alike, are counted on each; divide it too, or read MFU as an upper bound",
        names=listed(names, 3),
    )


def doubt_of_rank(rank: int) -> Said:
    return Said("on rank {rank}, a counted step ran other FLOPs than equal calls had run until then", rank=rank)


def peak_unknown(dtype: str, why: str) -> NoticeText:
    # Texts about unknown peaks use the argument name of `peak_flops`; the monitor's argument has another name.
    why = why.replace("override_flops_per_s=...", "peak_flops_per_s=... (`flopwatch run --peak-tflops ...`)")
    why = " ".join(why.replace("override_flops_per_s", "peak_flops_per_s").split()).rstrip(".")
    if why.startswith("The peak"):  # otherwise the user must correct dtype= or the peak
        why += "; or give it afterwards, such as `flopwatch why --peak-tflops 312`"
    return notice("peak_unknown", dtype=dtype, why=why[0].lower() + why[1:])

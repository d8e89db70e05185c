"""Problems of a sweep: failures grouped by cause, with advice, and reasons why comparisons may mislead.

Sources of the advice: `man 7 signal` for signals; the message of torch's DataLoader ("insufficient shared memory") for
SIGBUS; the table of trainers in docs/sweep.md for the memory of the clipping trainers.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flopwatch.language import Said, Templates, counted
from flopwatch.numbers import byte_size, percent
from flopwatch.records.trial import StepCost, TrialResult
from flopwatch.report.cells import place_key, privacy_of, trainer_name
from flopwatch.report.records import Environment, Failure
from flopwatch.text import first_line, listed

_LOG_LINES = 15
# Failures that a person must look into come first. Running out of memory is an expected result of a sweep.
_URGENCY = (
    *("crash", "hang", "timeout", "error", "lost", "invalid", "cancelled"),
    *("oom_host", "oom_device", "unsupported"),
)


def group_failures(results: Sequence[TrialResult]) -> tuple[Failure, ...]:
    """Group failed trials by outcome and cause, the most urgent outcome first, then the most frequent cause."""
    alike: dict[tuple[str, str], list[TrialResult]] = defaultdict(list)
    largest_ok: Counter[tuple[Any, ...]] = Counter()
    for result in results:
        if result.outcome == "ok":
            place = place_key(result.spec)
            largest_ok[place] = max(largest_ok[place], result.spec.batch_size)
        elif result.outcome in _URGENCY:
            # Failures whose log mentions memory get a cause and advice of their own.
            cause = _cause(result)
            if result.evidence.get("hint"):
                cause = Said("{cause}; its log mentions memory", cause=cause)
            alike[str(result.outcome), cause].append(result)
    failures = [_failure(cause, members, largest_ok) for (_, cause), members in alike.items()]
    return tuple(sorted(failures, key=lambda one: (_URGENCY.index(one.outcome), -one.count, one.cause)))


def _cause(result: TrialResult) -> str:
    evidence = result.evidence
    exception = evidence.get("exception")
    if result.outcome in ("timeout", "hang", "cancelled"):  # flopwatch killed the trial; the signal is not the cause.
        return Said("in phase {phase}", phase=result.phase)
    if isinstance(exception, Mapping) and exception.get("type"):
        return normalised(f"{exception['type']}: {exception.get('message') or ''}").rstrip(": ")
    if isinstance(exception, str) and exception:
        return normalised(exception)
    if result.outcome == "oom_host" and result.reason:  # The reason says more than the signal.
        return normalised(result.reason)
    if evidence.get("signal"):
        return str(evidence["signal"])
    if result.outcome in ("error", "oom_host") and evidence.get("exit_code") is not None:
        return Said("exit code {code}", code=str(evidence["exit_code"]))
    return normalised(str(evidence.get("state") or result.reason)) or Said("no reason given")


def normalised(message: str) -> str:
    """Return the first line of a message, with numbers, addresses and paths replaced, because they vary by trial.

    >>> normalised("tried to allocate 2.50 GiB at 0x7f3a in /home/me/a.py, line 3")
    'tried to allocate N GiB at ADDRESS in PATH, line N'
    """
    line = first_line(message, 300)
    line = re.sub(r"\b0x[0-9a-fA-F]+\b", "ADDRESS", line)
    line = re.sub(r"(?<![\w.])(?:~|\.{1,2})?/[^\s'\",;:)]+|\b[A-Za-z]:\\[^\s'\",;)]+", "PATH", line)
    return re.sub(r"(?<![A-Za-z_0-9])\d+(?:[.,]\d+)*", "N", line)


def _failure(cause: str, members: Sequence[TrialResult], largest_ok: Mapping[tuple[Any, ...], int]) -> Failure:
    # A trial with a log or stack traces is the most useful example.
    example = next((member for member in members if member.log_tail or member.stacks), members[0])
    return Failure(
        **{name: getattr(example, name) for name in ("reason", "phase", "step", "evidence", "command", "stacks")},
        outcome=str(example.outcome),
        cause=cause,
        count=len(members),
        trials=tuple(member.name for member in members),
        by_trainer=dict(Counter(trainer_name(member.spec) for member in members).most_common()),
        example=example.name,
        log_tail="\n".join(example.log_tail.rstrip().splitlines()[-_LOG_LINES:]),
        advice=tuple(_advice(example, cause, largest_ok.get(place_key(example.spec)))),
    )


# By outcome and the beginning of the cause; the first row that fits is the advice.
_INSTALL = Said("Install the missing package in the environment of the trials.")
_ADVICE: Templates = {
    "crash SIGKILL": "flopwatch did not send it. See if the kernel did, to free memory: "
    "dmesg | grep -i 'killed process'",
    "crash SIGSEGV": "Native code crashed. Run the command below with PYTHONFAULTHANDLER=1 to see the line of Python.",
    "crash SIGABRT": "Native code called abort(); its message is at the end of the log.",
    "crash SIGBUS": "Often /dev/shm is full. Check it with df -h /dev/shm, or use no data loader workers.",
    "crash SIGTERM": "Another program ended the trial, such as a scheduler (time limit or preemption) or a shutdown.",
    "crash SIGILL": "The CPU does not support an instruction, because a package was built for another CPU.",
    "crash SIGFPE": "Native code divided by zero, often because a batch or dimension is empty.",
    "crash": "Run the command below to see the crash, and read the log.",
    "error ModuleNotFoundError": _INSTALL,
    "error ImportError": _INSTALL,
    "error exit code": "The program exited by itself. Look at the end of its log, and for exit() in its code.",
    "error": "Run the command below to see the error. Once it works, run: flopwatch sweep ... --only failed",
    "invalid": "Change the configuration of the trial: it is not valid.",
    "cancelled": "Run the same sweep command again: the sweep resumes where it stopped.",
    "lost": "The machine or its job disappeared. Run the trial again: flopwatch sweep ... --only failed",
}


def _advice(result: TrialResult, cause: str, largest_ok: int | None) -> Iterator[str]:
    """Yield what the user can do about a failure, the most useful advice first.

    `largest_ok` is the largest batch that ran with the same settings otherwise.
    """
    spec, outcome = result.spec, result.outcome
    if hint := result.evidence.get("hint"):
        yield Said(
            "The log says: {hint}. flopwatch does not derive outcomes from log messages, so the trial does not count "
            "as out of memory, and larger trials ran too.",
            hint=str(hint),
        )
        if spec.trainer == "command":
            told = '{"outcome": "oom_device"}'
            yield Said(
                "If memory ran out, let the command write {json} to $FLOPWATCH_TRIAL_DIR/metrics.json.", json=told
            )
        else:
            yield Said("If memory ran out, use a batch below {size}.", size=spec.batch_size)
    if outcome in ("oom_host", "oom_device"):
        yield from _out_of_memory(result, largest_ok)
    elif outcome in ("hang", "timeout"):
        yield from _too_slow(result)
    elif outcome == "unsupported" and "no method accumulate()" in result.reason:
        yield Said("Leave `micro_batch_size` out of the matrix, or add the method accumulate() to the trainer.")
    elif outcome == "unsupported" and spec.checkpointing:
        yield Said("Remove this trainer and model from the matrix, or run them without gradient checkpointing.")
    elif outcome == "unsupported":
        yield Said("Remove this trainer and model from the matrix, or choose another trainer for the model.")
    else:
        yield Said(next(advice for start, advice in _ADVICE.items() if f"{outcome} {cause}".startswith(start)))


def _too_slow(result: TrialResult) -> Iterator[str]:
    silent, longest = result.spec.limits.no_progress_seconds, result.spec.limits.wall_seconds
    is_command = result.spec.trainer == "command"
    after = Said("its limit") if longest is None else f"{longest:g} s"
    if result.outcome == "timeout" and is_command:
        yield Said("The command was still running after {limit}: raise --timeout, or let it do less.", limit=after)
    elif result.outcome == "timeout":
        progress = Said(
            "The trial still made progress in phase {phase} after {limit}: raise --timeout, or measure fewer steps."
        )
        yield progress.filled(phase=result.phase, limit=after)
    elif is_command and silent:
        yield Said("If the command may print nothing for {seconds:g} s, raise no_progress.", seconds=silent)
    elif not is_command:
        if result.stacks:
            yield Said("The stack traces below show where each thread was waiting.")
        else:
            yield Said("There are no stack traces, because native code held the GIL.")
        if silent:
            yield Said("If a step may take longer than {seconds:g} s, raise no_progress.", seconds=silent)


def _out_of_memory(result: TrialResult, largest_ok: int | None) -> Iterator[str]:
    spec, is_private = result.spec, privacy_of(result.spec, result) == "private"
    batch, limit, parts = spec.batch_size, spec.limits.memory_bytes, spec.micro_batch_size or spec.batch_size
    if result.outcome == "oom_host" and limit:
        small = Said("The memory limit of the trial was {limit}; raise --memory if the host has more.")
        yield small.filled(limit=byte_size(limit))
    if is_private and parts > 1:
        keep = Said("Keep the batch, because epsilon depends on it, and add micro_batch_size={size} to the sweep.")
        yield keep.filled(size=parts // 2)
    if batch == 1:
        yield Said("Even batch 1 is too large.")
    elif largest_ok and largest_ok < batch:
        below = Said("Use a batch below {size}: {largest} ran at sequence {length}.")
        yield below.filled(size=batch, largest=largest_ok, length=spec.seq_len)
    else:
        yield Said("Use a batch below {size}.", size=batch)
    if not spec.checkpointing and not is_private:
        yield Said("Use gradient checkpointing: it stores fewer activations, for about a third more compute.")
    if spec.trainer in ("dpsgd", "fast"):
        yield Said("Try ghost: it stores no per-sample gradients and needs less memory at short sequences.")
    if spec.trainer == "ghost":
        yield Said("Try dpsgd: it may need less memory, because ghost stores a sequence x sequence matrix per sample.")
    if spec.layout == "ddp":
        yield Said("Use `layout: fsdp`: each process holds a part of the model; with `ddp` each holds all of it.")
    if spec.trainer != "command" and spec.layout is None:  # `flopwatch fit` supports only a single process.
        yield Said("`flopwatch fit` finds the largest batch of this trainer and model.")


_SHOWN = (
    *("torch", "device", "device_name", "threads", "host", "driver", "cuda", "python", "flopwatch", "opacus", "git"),
    *("cpu", "platform", "os"),
)
# If one of these differs between trials, their time or memory may differ for that reason.
_DECISIVE = ("torch", "device", "device_name", "threads", "driver", "cuda", "opacus", "cpu", "flopwatch", "git")
_CODE = "code of "


def distinct_environments(results: Iterable[TrialResult]) -> tuple[Environment, ...]:
    seen: Counter[tuple[tuple[str, str], ...]] = Counter()
    for result in results:
        seen[tuple((name, value) for name, value in _facts_of(result).items() if not name.startswith(_CODE))] += 1
    return tuple(Environment(dict(settings), count) for settings, count in seen.most_common() if settings)


def _facts_of(result: TrialResult) -> dict[str, str]:
    known = {name: str(value) for name in _SHOWN if (value := result.environment.get(name)) not in (None, "")}
    sources = result.environment.get("sources")
    digests = sources.items() if isinstance(sources, Mapping) else ()
    return known | {f"{_CODE}{name}": str(digest)[:12] for name, digest in digests}


def group_warnings(results: Iterable[TrialResult]) -> Iterator[str]:
    ran = [result for result in results if result.outcome == "ok"]
    facts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, value in (fact for result in ran for fact in _facts_of(result).items()):
        facts[name][value] += 1
    mixed = [name for name, counts in facts.items() if len(counts) > 1]
    decisive = [name for name in mixed if name in _DECISIVE or name.startswith(_CODE)]
    for name in decisive:
        values = listed([f"{value} ({count:,})" for value, count in facts[name].most_common()], 3)
        mixed_facts = Said("the compared trials ran with different {name}: {values}")
        yield mixed_facts.filled(name=name, values=values)
    if "host" in mixed and not decisive:
        on_hosts = Said("the trials ran on {hosts} hosts, and even equal hosts may differ by a few percent")
        yield on_hosts.filled(hosts=len(facts["host"]))
    yield from _peak_warnings(ran)
    if shared := sum(result.measured.memory.host_method == "rss" for result in ran):
        yield Said(
            "host memory of {trials} counts shared pages once per process, because their systems do not report "
            "proportional memory (PSS)",
            trials=counted(shared, "{n} trial", "{n} trials"),
        )


def denominators(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Return the peak FLOP/s of which MFU and HFU are shares, as text, the most common first."""
    costs = [result.measured.cost for result in results if result.outcome == "ok"]
    peaks = [cost.peak for cost in costs if cost and cost.peak]
    found = Counter(
        f"{peak['flops_per_s'] / 1e12:.4g} TFLOP/s ({peak.get('device')}, {peak.get('dtype')}, {peak.get('kind')})"
        for peak in peaks
    )
    return tuple(words for words, _ in found.most_common())


def above_peak(cost: StepCost) -> tuple[float, str] | None:
    """The larger one of MFU and HFU, and a sentence about it, if it is above 100 %. Others report without a peak."""
    shares = [(share, name) for name, share in (("MFU", cost.mfu), ("HFU", cost.hfu)) if share is not None]
    share, name = max(shares, default=(0.0, ""))
    if not cost.peak or share <= 1:
        return None
    said = Said("{name} is {share}, which cannot be: the peak is too low, or the FLOPs are wrong")
    return share, said.filled(name=name, share=percent(share))


def _peak_warnings(ran: Sequence[TrialResult]) -> Iterator[str]:
    if len(different := denominators(ran)) > 1:
        peaks = Said("MFU and HFU of these trials are shares of different peaks: {peaks}")
        yield peaks.filled(peaks="; ".join(different))
    costs = [(result.name, result.measured.cost or StepCost()) for result in ran]
    if above := [(*found, trial) for trial, cost in costs if (found := above_peak(cost))]:
        _, said, trial = max(above)
        yield Said("{what}: {facts}", what=trial, facts=said)
    # Notes without a peak are about values that commands reported and that cannot be right.
    of_trial = Said("{what}: {facts}")
    notes = [of_trial.filled(what=trial, facts=note) for trial, cost in costs if not cost.peak for note in cost.notes]
    yield from notes[:1]
    if len(notes) > 1:
        yield Said("{n:,} more trials reported such values", n=len(notes) - 1)


def sweep_warnings(results: Sequence[TrialResult]) -> Iterator[str]:
    failed: dict[tuple[str, str], list[str]] = defaultdict(list)
    for result in results:
        for phase, why in result.measured.not_measured.items() if result.outcome == "ok" else ():
            failed[phase, why].append(result.name)  # The times and the memory of these trials are valid.
    unmeasured = Said("{phase} could not be measured in {names}: {why}")
    for (phase, why), names in failed.items():
        yield unmeasured.filled(phase=phase, names=listed(names, 3), why=why)
    lost = {one.name: len(one.earlier_attempts) for one in results}
    if retried := [name for name, attempts in lost.items() if attempts]:
        yield Said(
            "{trials} needed more than one attempt: {names}; files of the earlier attempts ({attempts:,}) are in "
            "earlier/",
            trials=counted(len(retried), "{n} trial", "{n} trials"),
            names=listed(retried),
            attempts=sum(lost.values()),
        )

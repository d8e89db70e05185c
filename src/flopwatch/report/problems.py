"""Problems of a sweep: failures grouped by cause, with advice, and reasons why comparisons may mislead.

Sources of the advice: `man 7 signal` for signals; the message of torch's DataLoader ("insufficient shared memory") for
SIGBUS; the table of trainers in docs/sweep.md for the memory of the clipping trainers.
"""

import re
import shlex
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flopwatch.numbers import byte_size, percent
from flopwatch.records.trial import StepCost, TrialResult, TrialSpec
from flopwatch.report.cells import place_key, privacy_of, trainer_name
from flopwatch.report.records import Environment, Failure
from flopwatch.text import first_line, listed, plural

LOG_LINES = 15
# Failures that a person must look into come first. Running out of memory is an expected result of a sweep.
_URGENCY = (
    "crash",
    "hang",
    "timeout",
    "error",
    "lost",
    "invalid",
    "cancelled",
    "oom_host",
    "oom_device",
    "unsupported",
)
_NOT_A_FAILURE = ("ok", "oom_inferred", "skipped")


def group_failures(results: Iterable[TrialResult], largest_ok: Mapping[tuple[Any, ...], int]) -> tuple[Failure, ...]:
    """Group failed trials by outcome and cause, the most urgent outcome first, then the most frequent cause.

    Args:
        results: All results of the sweep.
        largest_ok: The largest batch that ran, by `place_key` (all settings but the batch size). The advice names it.
    """
    alike: dict[tuple[str, str], list[TrialResult]] = defaultdict(list)
    for result in results:
        if result.outcome not in _NOT_A_FAILURE:
            alike[str(result.outcome), cause_of(result)].append(result)
    failures = [_failure(cause, members, largest_ok) for (_, cause), members in alike.items()]
    return tuple(sorted(failures, key=lambda failure: (_urgency(failure.outcome), -failure.count, failure.cause)))


def cause_of(result: TrialResult) -> str:
    """Return the cause of a failure. Failures whose log mentions memory get a cause and advice of their own."""
    hint = "; its log mentions memory" if result.evidence.get("hint") else ""
    return _cause(result) + hint


def _cause(result: TrialResult) -> str:
    evidence = result.evidence
    exception = evidence.get("exception")
    if result.outcome in ("timeout", "hang", "cancelled"):  # flopwatch killed the trial; the signal is not the cause.
        return f"in phase {result.phase}"
    if isinstance(exception, Mapping) and exception.get("type"):
        return normalised(f"{exception['type']}: {exception.get('message') or ''}").rstrip(": ")
    if isinstance(exception, str) and exception:
        return normalised(exception)
    if result.outcome == "oom_host" and result.reason:  # The reason says more than the signal.
        return normalised(result.reason)
    if evidence.get("signal"):
        return signal_name(evidence["signal"])
    if result.outcome in ("error", "oom_host") and evidence.get("exit_code") is not None:
        return f"exit code {evidence['exit_code']}"
    if evidence.get("state"):
        return normalised(str(evidence["state"]))
    return normalised(result.reason) or "no reason given"


def normalised(message: str) -> str:
    """Return the first line of a message, with numbers, addresses and paths replaced, because they vary by trial.

    >>> normalised("tried to allocate 2.50 GiB at 0x7f3a in /home/me/a.py, line 3")
    'tried to allocate N GiB at ADDRESS in PATH, line N'
    """
    line = first_line(message, 300)
    line = re.sub(r"\b0x[0-9a-fA-F]+\b", "ADDRESS", line)
    line = re.sub(r"(?<![\w.])(?:~|\.{1,2})?/[^\s'\",;:)]+|\b[A-Za-z]:\\[^\s'\",;)]+", "PATH", line)
    return re.sub(r"(?<![A-Za-z_0-9])\d+(?:[.,]\d+)*", "N", line)


def signal_name(value: Any) -> str:
    """Return the name of a signal that is given by number or by name.

    >>> signal_name(9), signal_name("SIGSEGV")
    ('SIGKILL', 'SIGSEGV')
    """
    if isinstance(value, int) and value in {int(known) for known in signal.Signals}:
        return signal.Signals(value).name
    return value if isinstance(value, str) else f"signal {value}"


def last_lines(text: str, count: int = LOG_LINES) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])


def _failure(cause: str, members: Sequence[TrialResult], largest_ok: Mapping[tuple[Any, ...], int]) -> Failure:
    # A trial with a log or stack traces is the most useful example.
    example = next((member for member in members if member.log_tail or member.stacks), members[0])
    return Failure(
        outcome=str(example.outcome),
        cause=cause,
        count=len(members),
        trials=tuple(member.name for member in members),
        by_trainer=dict(Counter(trainer_name(member.spec) for member in members).most_common()),
        example=example.name,
        reason=example.reason,
        phase=example.phase,
        step=example.step,
        evidence=dict(example.evidence),
        command=example.command,
        log_tail=last_lines(example.log_tail),
        stacks=example.stacks,
        advice=advice_for(example, _cause(example), largest_ok.get(place_key(example.spec))),
    )


def _urgency(outcome: str) -> int:
    return _URGENCY.index(outcome) if outcome in _URGENCY else len(_URGENCY)


_BY_SIGNAL = {
    "SIGKILL": "flopwatch did not send it. See if the kernel did, to free memory: dmesg | grep -i 'killed process'",
    "SIGSEGV": "Native code crashed. Run the command below with PYTHONFAULTHANDLER=1 to see the line of Python.",
    "SIGABRT": "Native code called abort(); its message is at the end of the log.",
    "SIGBUS": "Often /dev/shm is full. Check it with df -h /dev/shm, or use no data loader workers.",
    "SIGTERM": "Another program ended the trial, such as a scheduler (time limit or preemption) or a shutdown.",
    "SIGILL": "The CPU does not support an instruction, because a package was built for another CPU.",
    "SIGFPE": "Native code divided by zero, often because a batch or dimension is empty.",
}


def advice_for(result: TrialResult, cause: str, largest_ok: int | None) -> tuple[str, ...]:
    """Return what the user can do about a failure, the most useful advice first.

    Args:
        result: Result of a trial that failed.
        cause: Cause of the failure.
        largest_ok: The largest batch that ran with the same trainer and sequence length; None if none ran.
    """
    by_outcome: Mapping[str, Callable[[], tuple[str, ...]]] = {
        "oom_device": lambda: _out_of_memory(result, largest_ok),
        "oom_host": lambda: (*_host_limit(result), *_out_of_memory(result, largest_ok)),
        "crash": lambda: (_BY_SIGNAL.get(cause, "Run the command below to see the crash, and read the log."),),
        "hang": lambda: _hang(result),
        "timeout": lambda: _timeout(result),
        "error": lambda: _error(cause),
        "unsupported": lambda: _unsupported(result),
        "invalid": lambda: ("Change the configuration of the trial: it is not valid.",),
        "cancelled": lambda: ("Run the same sweep command again: the sweep resumes where it stopped.",),
        "lost": lambda: ("The machine or its job disappeared. Run the trial again: flopwatch sweep ... --only failed",),
    }
    return (*_hint(result), *by_outcome.get(result.outcome, lambda: ())())


def _hint(result: TrialResult) -> tuple[str, ...]:
    """Return advice for a trial whose log mentions memory but whose outcome is not out of memory."""
    hint = result.evidence.get("hint")
    if not hint:
        return ()
    said = (
        f"The log says: {hint}. flopwatch does not derive outcomes from log messages, so the trial does not count as "
        "out of memory, and larger trials ran too. If memory did run out, "
    )
    if result.spec.trainer == "command":
        return (said + 'let the command write {"outcome": "oom_device"} to $FLOPWATCH_TRIAL_DIR/metrics.json.',)
    return (said + f"use a batch below {result.spec.batch_size}.",)


def _out_of_memory(result: TrialResult, largest_ok: int | None) -> tuple[str, ...]:
    spec = result.spec
    ran = f": {largest_ok} ran at sequence {spec.seq_len}" if largest_ok and largest_ok < spec.batch_size else ""
    advice = [f"Use a batch below {spec.batch_size}{ran}." if spec.batch_size > 1 else "Even batch 1 is too large."]
    is_private = privacy_of(spec, result) == "private"
    if not spec.checkpointing and not is_private:
        advice.append("Use gradient checkpointing: it stores fewer activations, for about a third more compute.")
    if spec.trainer in ("dpsgd", "fast"):
        advice.append("Try ghost: it stores no per-sample gradients and needs less memory at short sequences.")
    if spec.trainer == "ghost":
        advice.append(
            "Try dpsgd: it may need less memory, because ghost stores a sequence x sequence matrix per sample."
        )
    if spec.layout == "ddp":
        advice.append("Use `layout: fsdp`: each process holds a part of the model; with `ddp` each holds all of it.")
    if spec.trainer != "command" and spec.layout is None:  # `flopwatch fit` supports only a single process.
        advice.append(f"Find the largest batch: {_fit_command(spec)}")
    return tuple(advice)


def _fit_command(spec: TrialSpec) -> str:
    words = ["flopwatch", "fit", "--trainer", spec.trainer, "--model", spec.model, "--seq-len", str(spec.seq_len)]
    words += ["--dtype", spec.dtype] if spec.dtype != "fp32" else []
    words += ["--checkpoint"] if spec.checkpointing else []
    words += ["--device", spec.device] if spec.device != "auto" else []
    words += ["--memory", str(spec.limits.memory_bytes)] if spec.limits.memory_bytes else []
    words += [f"options.{name}={value}" for name, value in spec.options.items()]
    return shlex.join(words)


def _host_limit(result: TrialResult) -> tuple[str, ...]:
    limit = result.spec.limits.memory_bytes
    return (
        (f"The memory limit of the trial was {byte_size(limit)}; raise --memory if the host has more.",)
        if limit
        else ()
    )


def _hang(result: TrialResult) -> tuple[str, ...]:
    limit = result.spec.limits.no_progress_seconds
    slow = f"If a step may take longer than {limit:g} s, raise --no-progress." if limit else ""
    shown = (
        "The stack traces below show where each thread was waiting."
        if result.stacks
        else "There are no stack traces, because native code held the GIL."
    )
    return tuple(line for line in (shown, slow) if line)


def _timeout(result: TrialResult) -> tuple[str, ...]:
    limit = result.spec.limits.wall_seconds
    reached = f"The trial still made progress in phase {result.phase}" + (f" after {limit:g} s" if limit else "")
    return (f"{reached}: raise --timeout, or measure fewer steps.",)


def _error(cause: str) -> tuple[str, ...]:
    if cause.startswith(("ModuleNotFoundError", "ImportError")):
        return ("Install the missing package in the environment of the trials.",)
    if cause.startswith("exit code"):
        return ("The program exited by itself. Look at the end of its log, and for exit() in its code.",)
    return ("Run the command below to see the error. Once it works, run: flopwatch sweep ... --only failed",)


def _unsupported(result: TrialResult) -> tuple[str, ...]:
    if "no method accumulate()" in result.reason:
        return ("Leave `micro_batch_sizes` out of the matrix, or add the method accumulate() to the trainer.",)
    if result.spec.checkpointing:
        return ("Remove this trainer and model from the matrix, or run them without gradient checkpointing.",)
    return ("Remove this trainer and model from the matrix, or choose another trainer for the model.",)


_SHOWN = (
    *("torch", "device", "device_name", "threads", "host", "driver", "cuda", "python", "flopwatch", "opacus", "git"),
    *("cpu", "platform", "os"),
)
# If one of these differs between trials, their time or memory may differ for that reason.
_DECISIVE = ("torch", "device", "device_name", "threads", "driver", "cuda", "opacus", "cpu", "flopwatch", "git")


def distinct_environments(results: Iterable[TrialResult]) -> tuple[Environment, ...]:
    """Return the environments in which trials ran, the most common first."""
    seen: Counter[tuple[tuple[str, str], ...]] = Counter()
    for environment, count in counted_environments(results, _SHOWN):
        if settings := shown_settings(environment):
            seen[tuple(settings.items())] += count
    return tuple(Environment(dict(settings), count) for settings, count in seen.most_common())


def counted_environments(
    results: Iterable[TrialResult], names: Sequence[str] = ()
) -> list[tuple[Mapping[str, Any], int]]:
    """Return the distinct environments with their number of trials, so that each is formatted only once.

    Args:
        results: The results of the trials.
        names: If given, environments that agree in these entries count as equal.
    """
    counts: Counter[str] = Counter()
    examples: dict[str, Mapping[str, Any]] = {}
    for result in results:
        key = repr([result.environment.get(name) for name in names] if names else result.environment)
        counts[key] += 1
        examples[key] = result.environment
    return [(examples[key], count) for key, count in counts.items()]


def shown_settings(environment: Mapping[str, Any]) -> dict[str, str]:
    return {name: _as_text(environment[name]) for name in _SHOWN if environment.get(name) not in (None, "", {})}


def mixed_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Return a warning for each version, device or file of the user that differs between compared trials."""
    results = list(results)
    values: dict[str, Counter[str]] = {name: Counter() for name in (*_DECISIVE, "host")}
    ran = [result for result in results if result.outcome == "ok"]
    for environment, count in counted_environments(ran, _SHOWN):
        settings = shown_settings(environment)
        for name in settings.keys() & values.keys():
            values[name][settings[name]] += count
    mixed = [
        f"the compared trials ran with different {name}: {_values(values[name])}"
        for name in _DECISIVE
        if len(values[name]) > 1
    ]
    if not mixed and len(values["host"]) > 1:
        mixed = [f"the trials ran on {len(values['host'])} hosts, and even equal hosts may differ by a few percent"]
    return (*mixed, *_mixed_code(results))


def _mixed_code(results: Iterable[TrialResult]) -> list[str]:
    versions: dict[str, Counter[str]] = {}
    for result in results:
        sources = result.environment.get("sources")
        if result.outcome == "ok" and isinstance(sources, Mapping):
            for name, digest in sources.items():
                versions.setdefault(str(name), Counter())[str(digest)] += 1
    return [
        f"the compared trials ran different versions of {name}: {_values(digests)}"
        for name, digests in versions.items()
        if len(digests) > 1
    ]


def _values(counts: Counter[str]) -> str:
    return listed([f"{value} ({count:,})" for value, count in counts.most_common()], 3)


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        named = value.get("name") or value.get("model") or value.get("commit")
        return str(named) if named else ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(dict.fromkeys(_as_text(item) for item in value))
    return str(value)


_MOST_OF_PEAK = 1.05
"""A larger MFU or HFU is not measurement noise: the peak or the FLOPs must be wrong."""


def denominators(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Return the peak FLOP/s of which MFU and HFU are shares, as text, the most common first."""
    found = Counter(_words(cost.peak or {}) for _, cost in _with_peak(results))
    return tuple(words for words, _ in found.most_common())


def peak_warnings(results: Sequence[TrialResult]) -> tuple[str, ...]:
    different = denominators(results)
    mixed = (
        [f"MFU and HFU of these trials are shares of different peaks: {'; '.join(different)}"]
        if len(different) > 1
        else []
    )
    above = [
        (trial, name, value)
        for trial, cost in _with_peak(results)
        for name, value in (("MFU", cost.mfu), ("HFU", cost.hfu))
        if value is not None and value > _MOST_OF_PEAK
    ]
    if above:
        trial, name, value = max(above, key=lambda one: one[2])
        mixed.append(
            f"{name} of {trial} is {percent(value, decimals=0)}, which is impossible: the peak or the FLOPs are wrong"
        )
    return (*mixed, *_command_notes(results))


def _command_notes(results: Iterable[TrialResult]) -> list[str]:
    """Return warnings about MFU or HFU values that commands reported and that cannot be right."""
    costs = [(result.name, result.measured.cost) for result in results if result.outcome == "ok"]
    notes = [f"{trial}: {note}" for trial, cost in costs if cost is not None and not cost.peak for note in cost.notes]
    return [*notes[:1], f"{len(notes) - 1:,} more trials reported such values"] if len(notes) > 1 else notes


def _with_peak(results: Iterable[TrialResult]) -> list[tuple[str, StepCost]]:
    costs = [(result.name, result.measured.cost) for result in results if result.outcome == "ok"]
    return [(trial, cost) for trial, cost in costs if cost is not None and cost.peak]


def _words(peak: Mapping[str, Any]) -> str:
    return f"{peak['flops_per_s'] / 1e12:.4g} TFLOP/s ({peak.get('device')}, {peak.get('dtype')}, {peak.get('kind')})"


def incomplete_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Return a warning for each measurement that failed after the steps, such as counting FLOPs.

    The times and the memory of these trials are valid.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.outcome == "ok":
            for phase, why in result.measured.not_measured.items():
                alike.setdefault((phase, why), []).append(result.name)
    return tuple(f"{phase} could not be measured in {listed(names, 3)}: {why}" for (phase, why), names in alike.items())


def host_memory_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Return a warning about trials whose host memory is RSS, which cannot be compared with the PSS of other trials."""
    counts = Counter(result.measured.memory.host_method for result in results if result.outcome == "ok")
    if not counts["rss"]:
        return ()
    return (
        f"host memory of {plural(counts['rss'], 'trial')} counts shared pages once per process, because "
        "their systems do not report proportional memory (PSS)",
    )


def retried_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Return one warning for all trials that were retried, and one for each trial whose files stayed on its node."""
    results = list(results)
    lost = {
        result.name: sum(attempt.get("outcome") != "ok" for attempt in result.earlier_attempts) for result in results
    }
    retried = [result for result in results if lost[result.name]]
    attempts = sum(lost.values())
    attempted = [
        f"{plural(len(retried), 'trial')} needed more than one attempt: {listed([result.name for result in retried])}; "
        f"files of the lost attempts ({attempts:,}) are in earlier/"
    ]
    left = [(result.name, files) for result in results if (files := _left_on_the_node(result))]
    stayed = [
        f"files of {name} are still on their node, because they were too large to copy: {listed(files)}"
        for name, files in left
    ]
    return (*(attempted if retried else ()), *_repeated(results), *stayed)


def _repeated(results: Iterable[TrialResult]) -> Iterator[str]:
    repeated = [result for result in results if result.measured.run_medians]
    if repeated:
        runs = sum(len(result.measured.run_medians) for result in repeated)
        yield (
            f"{plural(len(repeated), 'trial')} ran {runs:,} times in all to narrow the interval: "
            f"{listed([result.name for result in repeated])}; their step times are means over these runs, and such "
            "intervals contain the truth in about 92 % of cases, not 95 %"
        )
    # A sweep's folder does not store --until and --max-repeats, so which of them ended the repeats is not known here.
    wide = [
        f"{result.name} ±{percent((steps.high - steps.low) / 2 / steps.median, decimals=0)} "
        f"after {len(result.measured.run_medians)} runs"
        for result in repeated
        if (steps := result.measured.steps) and steps.unstable
    ]
    if wide:
        yield f"repeats stopped at a wide interval: {listed(wide)}; to narrow it, raise --max-repeats or lower --until"


def _left_on_the_node(result: TrialResult) -> list[str]:
    found = result.evidence.get("left_on_the_node")
    return [str(path) for path in found] if isinstance(found, list) else []

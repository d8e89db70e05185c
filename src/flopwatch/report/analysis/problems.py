"""What went wrong in a sweep: failures by cause with advice, and why comparisons may mislead. Pure.

Sources of the advice: man 7 signal for signals; the message of torch's DataLoader ("insufficient shared memory") for
SIGBUS; the table of trainers in docs/sweep.md for what the clipping trainers hold in memory.
"""

import re
import shlex
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flopwatch.number_format import byte_size, percent, plural
from flopwatch.records.reading import first_line, listed
from flopwatch.records.trial import StepCost, TrialResult, TrialSpec
from flopwatch.report.analysis.cells import place_key, privacy_of, trainer_name
from flopwatch.report.records import Environment, Failure

LOG_LINES = 15
# What needs a person comes first. Running out of memory is a result, and what was not tried comes last.
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
    """One failure per cause, the most urgent first, then the most frequent.

    Args:
        results: All results of the sweep.
        largest_ok: The largest batch that ran by `place_key`, for the advice.
    """
    alike: dict[tuple[str, str], list[TrialResult]] = defaultdict(list)
    for result in results:
        if result.outcome not in _NOT_A_FAILURE:
            alike[str(result.outcome), cause_of(result)].append(result)
    failures = [_failure(cause, members, largest_ok) for (_, cause), members in alike.items()]
    return tuple(sorted(failures, key=lambda failure: (_urgency(failure.outcome), -failure.count, failure.cause)))


def cause_of(result: TrialResult) -> str:
    """The cause by the strongest evidence. A hint in the log makes a group of its own, because its advice differs."""
    hint = "; its log mentions memory" if result.evidence.get("hint") else ""
    return _cause(result) + hint


def _cause(result: TrialResult) -> str:
    """The exception, else the signal, the exit code, the scheduler's state, or the reason in words."""
    evidence = result.evidence
    exception = evidence.get("exception")
    if result.outcome in ("timeout", "hang", "cancelled"):  # flopwatch ended it, so its signal says nothing
        return f"in phase {result.phase}"
    if isinstance(exception, Mapping) and exception.get("type"):
        return normalised(f"{exception['type']}: {exception.get('message') or ''}").rstrip(": ")
    if isinstance(exception, str) and exception:
        return normalised(exception)
    if result.outcome == "oom_host" and result.reason:  # the SIGKILL is the kernel's, and the reason says so
        return normalised(result.reason)
    if evidence.get("signal"):
        return signal_name(evidence["signal"])
    if result.outcome in ("error", "oom_host") and evidence.get("exit_code") is not None:
        return f"exit code {evidence['exit_code']}"
    if evidence.get("state"):
        return normalised(str(evidence["state"]))
    return normalised(result.reason) or "no reason given"


def normalised(message: str) -> str:
    """The first line of a message without the numbers, addresses and paths that differ from trial to trial.

    >>> normalised("tried to allocate 2.50 GiB at 0x7f3a in /home/me/a.py, line 3")
    'tried to allocate N GiB at ADDRESS in PATH, line N'
    """
    line = first_line(message, 300)
    line = re.sub(r"\b0x[0-9a-fA-F]+\b", "ADDRESS", line)
    line = re.sub(r"(?<![\w.])(?:~|\.{1,2})?/[^\s'\",;:)]+|\b[A-Za-z]:\\[^\s'\",;)]+", "PATH", line)
    return re.sub(r"(?<![A-Za-z_0-9])\d+(?:[.,]\d+)*", "N", line)


def signal_name(value: Any) -> str:
    """The name of a signal that is given by number or by name.

    >>> signal_name(9), signal_name("SIGSEGV")
    ('SIGKILL', 'SIGSEGV')
    """
    if isinstance(value, int) and value in {int(known) for known in signal.Signals}:
        return signal.Signals(value).name
    return value if isinstance(value, str) else f"signal {value}"


def last_lines(text: str, count: int = LOG_LINES) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])


def _failure(cause: str, members: Sequence[TrialResult], largest_ok: Mapping[tuple[Any, ...], int]) -> Failure:
    # A member with a log is the more useful example.
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
    "SIGKILL": "Not sent by flopwatch; often the kernel, for lack of memory. Check: dmesg | grep -i 'killed process'",
    "SIGSEGV": "A fault in native code. Run the command below with PYTHONFAULTHANDLER=1 to see the line of Python.",
    "SIGABRT": "Native code called abort(); its message is at the end of the log.",
    "SIGBUS": "Often a full /dev/shm. Check df -h /dev/shm, or use no data loader workers.",
    "SIGTERM": "Something outside ended it: a scheduler's time limit, a preemption, a shutdown.",
    "SIGILL": "An instruction that this CPU lacks: a package was built for another CPU.",
    "SIGFPE": "A division by zero in native code, often an empty batch or dimension.",
}


def advice_for(result: TrialResult, cause: str, largest_ok: int | None) -> tuple[str, ...]:
    """What to do about a failure, the most useful first.

    Args:
        result: One of its trials.
        cause: Their common cause.
        largest_ok: The largest batch that ran with this trainer at this sequence length.
    """
    by_outcome: Mapping[str, Callable[[], tuple[str, ...]]] = {
        "oom_device": lambda: _out_of_memory(result, largest_ok),
        "oom_host": lambda: (*_host_limit(result), *_out_of_memory(result, largest_ok)),
        "crash": lambda: (
            _BY_SIGNAL.get(cause, "Run the command below alone; the end of the log shows where it crashed."),
        ),
        "hang": lambda: _hang(result),
        "timeout": lambda: _timeout(result),
        "error": lambda: _error(cause),
        "unsupported": lambda: _unsupported(result),
        "invalid": lambda: ("Change the configuration: it cannot run as it is.",),
        "cancelled": lambda: ("Run the same sweep command again: it resumes where it stopped.",),
        "lost": lambda: ("The machine or its job disappeared. Run again: flopwatch sweep ... --only failed",),
    }
    return (*_hint(result), *by_outcome.get(result.outcome, lambda: ())())


def _hint(result: TrialResult) -> tuple[str, ...]:
    """Advice on a log that mentions memory. A log's words never decide the outcome."""
    hint = result.evidence.get("hint")
    if not hint:
        return ()
    said = (
        f"Its log says: {hint}. Log messages do not decide an outcome, so larger trials ran too. If memory ended it, "
    )
    if result.spec.trainer == "command":
        return (said + 'let the command write {"outcome": "oom_device"} to $FLOPWATCH_TRIAL_DIR/metrics.json.',)
    return (said + f"use a batch below {result.spec.batch_size}.",)


def _out_of_memory(result: TrialResult, largest_ok: int | None) -> tuple[str, ...]:
    spec = result.spec
    ran = f": {largest_ok} ran at sequence {spec.seq_len}" if largest_ok and largest_ok < spec.batch_size else ""
    advice = [f"Use a batch below {spec.batch_size}{ran}." if spec.batch_size > 1 else "Even batch 1 is too large."]
    is_private = privacy_of(spec) == "private"
    if not spec.checkpointing and not is_private:
        advice.append("Gradient checkpointing stores fewer activations, for about a third more compute.")
    if spec.trainer in ("dpsgd", "fast"):
        advice.append("Ghost clipping stores no per-sample gradients and needs less memory at short sequences.")
    if spec.trainer == "ghost":
        advice.append("Ghost clipping stores a sequence x sequence matrix per sample; dpsgd may need less memory here.")
    if spec.layout == "ddp":
        advice.append("With ddp every process holds the whole model; with layout: fsdp each holds a part of it.")
    if spec.trainer != "command" and spec.layout is None:  # `flopwatch fit` runs one process
        advice.append(f"Find the largest batch: {_fit_command(spec)}")
    return tuple(advice)


def _fit_command(spec: TrialSpec) -> str:
    """The command that searches the largest batch of this configuration."""
    words = ["flopwatch", "fit", "--trainer", spec.trainer, "--model", spec.model, "--seq-len", str(spec.seq_len)]
    words += ["--dtype", spec.dtype] if spec.dtype != "fp32" else []
    words += ["--checkpoint"] if spec.checkpointing else []
    words += ["--device", spec.device] if spec.device != "auto" else []
    words += ["--memory", str(spec.limits.memory_bytes)] if spec.limits.memory_bytes else []
    words += [f"options.{name}={value}" for name, value in spec.options.items()]
    return shlex.join(words)


def _host_limit(result: TrialResult) -> tuple[str, ...]:
    limit = result.spec.limits.memory_bytes
    return (f"The trial's limit was {byte_size(limit)}; raise --memory if the host has more.",) if limit else ()


def _hang(result: TrialResult) -> tuple[str, ...]:
    limit = result.spec.limits.no_progress_seconds
    slow = f"If a step may take longer than {limit:g} s, raise --no-progress." if limit else ""
    shown = (
        "The stacks below show where each thread was waiting."
        if result.stacks
        else "There are no stacks: native code held the GIL."
    )
    return tuple(line for line in (shown, slow) if line)


def _timeout(result: TrialResult) -> tuple[str, ...]:
    limit = result.spec.limits.wall_seconds
    reached = f"It still made progress in phase {result.phase}" + (f" after {limit:g} s" if limit else "")
    return (f"{reached}: raise --timeout, or measure fewer steps.",)


def _error(cause: str) -> tuple[str, ...]:
    if cause.startswith(("ModuleNotFoundError", "ImportError")):
        return ("Install the missing package in the environment of the trials.",)
    if cause.startswith("exit code"):
        return ("The program exited by itself; look for exit() in it, and at the end of the log.",)
    return ("Run the command below alone. Once it works: flopwatch sweep ... --only failed",)


def _unsupported(result: TrialResult) -> tuple[str, ...]:
    if result.spec.checkpointing:
        return ("Take the pair out of the matrix, or run it without gradient checkpointing.",)
    return ("Take the pair out of the matrix, or choose another trainer for this model.",)


# Why comparisons may mislead: mixed environments, doubtful peaks, missing parts, retries.


_SHOWN = (
    *("torch", "device", "device_name", "threads", "host", "driver", "cuda", "python", "flopwatch", "opacus", "git"),
    *("cpu", "platform", "os"),
)
# Facts that change time or memory.
_DECISIVE = ("torch", "device", "device_name", "threads", "driver", "cuda", "opacus", "cpu", "flopwatch", "git")


def distinct_environments(results: Iterable[TrialResult]) -> tuple[Environment, ...]:
    """The environments trials ran in, the most common first."""
    seen: Counter[tuple[tuple[str, str], ...]] = Counter()
    for settings, count in _counted(results):
        if settings:
            seen[tuple(settings.items())] += count
    return tuple(Environment(dict(settings), count) for settings, count in seen.most_common())


def _counted(results: Iterable[TrialResult]) -> list[tuple[dict[str, str], int]]:
    """The distinct environments with their number of trials; 10,000 trials usually share one, formatted once."""
    counts: Counter[str] = Counter()
    examples: dict[str, Mapping[str, Any]] = {}
    for result in results:
        key = repr([result.environment.get(name) for name in _SHOWN])
        counts[key] += 1
        examples[key] = result.environment
    return [(shown_settings(examples[key]), count) for key, count in counts.items()]


def shown_settings(environment: Mapping[str, Any]) -> dict[str, str]:
    return {name: _as_text(environment[name]) for name in _SHOWN if environment.get(name) not in (None, "", {})}


def mixed_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Environment facts in which trials that are compared with each other differ."""
    results = list(results)
    values: dict[str, Counter[str]] = {name: Counter() for name in (*_DECISIVE, "host")}
    for settings, count in _counted(result for result in results if result.outcome == "ok"):
        for name in settings.keys() & values.keys():
            values[name][settings[name]] += count
    mixed = [
        f"compares results of different {name}: {_values(values[name])}" for name in _DECISIVE if len(values[name]) > 1
    ]
    if not mixed and len(values["host"]) > 1:
        mixed = [f"ran on {len(values['host'])} hosts, and even equal hosts may differ by a few percent"]
    return (*mixed, *_mixed_code(results))


def _mixed_code(results: Iterable[TrialResult]) -> list[str]:
    """Trainers, models or scripts of the user that changed during the sweep."""
    versions: dict[str, Counter[str]] = {}
    for result in results:
        sources = result.environment.get("sources")
        if result.outcome == "ok" and isinstance(sources, Mapping):
            for name, digest in sources.items():
                versions.setdefault(str(name), Counter())[str(digest)] += 1
    return [
        f"compares results of different versions of {name}: {_values(digests)}"
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
"""A utilisation above this is not noise: the peak does not belong to the device, or the FLOPs not to the step."""


def denominators(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """The peaks that MFU and HFU are shares of, the most common first."""
    found = Counter(_words(cost.peak or {}) for _, cost in _with_peak(results))
    return tuple(words for words, _ in found.most_common())


def peak_warnings(results: Sequence[TrialResult]) -> tuple[str, ...]:
    different = denominators(results)
    mixed = [f"MFU and HFU are shares of different peaks: {'; '.join(different)}"] if len(different) > 1 else []
    above = [
        (trial, name, value)
        for trial, cost in _with_peak(results)
        for name, value in (("MFU", cost.mfu), ("HFU", cost.hfu))
        if value is not None and value > _MOST_OF_PEAK
    ]
    if above:
        trial, name, value = max(above, key=lambda one: one[2])
        mixed.append(
            f"{name} of {trial} is {percent(value, decimals=0)}, more than any device can do: its peak is wrong"
        )
    return (*mixed, *_command_notes(results))


def _command_notes(results: Iterable[TrialResult]) -> list[str]:
    """Figures that commands reported and that cannot be right."""
    costs = [(result.name, result.measured.cost) for result in results if result.outcome == "ok"]
    notes = [f"{trial}: {note}" for trial, cost in costs if cost is not None and not cost.peak for note in cost.notes]
    return [*notes[:1], f"{len(notes) - 1:,} more trials reported such figures"] if len(notes) > 1 else notes


def _with_peak(results: Iterable[TrialResult]) -> list[tuple[str, StepCost]]:
    costs = [(result.name, result.measured.cost) for result in results if result.outcome == "ok"]
    return [(trial, cost) for trial, cost in costs if cost is not None and cost.peak]


def _words(peak: Mapping[str, Any]) -> str:
    return f"{peak['flops_per_s'] / 1e12:.4g} TFLOP/s ({peak.get('device')}, {peak.get('dtype')}, {peak.get('kind')})"


def incomplete_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Phases after the steps that could not be measured, by phase and reason. Times and memory are valid."""
    alike: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.outcome == "ok":
            for phase, why in result.measured.not_measured.items():
                alike.setdefault((phase, why), []).append(result.name)
    return tuple(f"{phase} not measured in {listed(names, 3)}: {why}" for (phase, why), names in alike.items())


def host_memory_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Trials whose host memory is resident memory, which is not comparable with proportional memory."""
    counts = Counter(result.measured.memory.host_method for result in results if result.outcome == "ok")
    if not counts["rss"]:
        return ()
    return (
        f"host memory of {plural(counts['rss'], 'trial')} counts shared pages once per process, because "
        "their systems do not report proportional memory (PSS)",
    )


def retried_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """One warning for all trials that were retried, and one for each trial whose files stayed on its node."""
    results = list(results)
    retried = [result for result in results if result.earlier_attempts]
    attempts = sum(len(result.earlier_attempts) for result in retried)
    attempted = [
        f"trials that took more than one attempt ({len(retried):,}, {attempts:,} lost; their files are in earlier/): "
        + listed([result.name for result in retried])
    ]
    left = [(result.name, files) for result in results if (files := _left_on_the_node(result))]
    stayed = [f"files of {name} stayed on their node, too large to be copied: {listed(files)}" for name, files in left]
    return (*(attempted if retried else ()), *stayed)


def _left_on_the_node(result: TrialResult) -> list[str]:
    found = result.evidence.get("left_on_the_node")
    return [str(path) for path in found] if isinstance(found, list) else []

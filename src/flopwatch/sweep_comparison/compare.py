"""From what lies in two folders to one comparison. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from flopwatch.plain_text import one_line
from flopwatch.report.capture import Capture
from flopwatch.report.cells import make_cell
from flopwatch.report.columns import trainer_name
from flopwatch.sweep_comparison.pairing import Entry, Pairing, disjoint_settings, entries, paired, setting_differences
from flopwatch.sweep_comparison.ratios import overall, ratios
from flopwatch.sweep_comparison.records import Difference, Overall, Pair, Quantity, Ratio, Side, SweepComparison
from flopwatch.sweep_comparison.surroundings import environment_differences
from flopwatch.trial_records import MemoryUse


def compare_sweeps(a: Capture, b: Capture) -> SweepComparison:
    """B against A: pairs of the same configuration with ratios, and everything that is not the same."""
    in_a, in_b = entries(a), entries(b)
    pairing = paired(in_a, in_b)
    told = [difference.what for difference in pairing.differences]
    pairs = tuple(_pair(one, other, told) for one, other in pairing.pairs)
    environment = environment_differences(list(a.results.values()), list(b.results.values()))
    return SweepComparison(
        a=_side(a, in_a),
        b=_side(b, in_b),
        settings=pairing.differences,
        environment=environment,
        pairs=pairs,
        overall=overall(pairs),
        by_trainer=_by_trainer(pairs),
        only_a=tuple(entry.name for entry in pairing.only_a),
        only_b=tuple(entry.name for entry in pairing.only_b),
        notes=(*_troubles(a, b), *_memory_notes(pairing), *_notes(in_a, in_b, pairs, environment)),
    )


def _side(capture: Capture, members: Sequence[Entry]) -> Side:
    return Side(str(capture.folder), len(members), Counter(map(_outcome, members)))


def _pair(one: Entry, other: Entry, told: Sequence[str]) -> Pair:
    return Pair(
        one.name,
        other.name,
        trainer_name(one.spec),
        _outcome(one),
        _outcome(other),
        one.result.reason if one.result else "",
        other.result.reason if other.result else "",
        _ratios(one, other),
        setting_differences(one, other, told),
        is_unstable=any(_is_unstable(entry) for entry in (one, other)),
    )


def _is_unstable(entry: Entry) -> bool:
    steps = entry.result.measured.steps if entry.result and _outcome(entry) == "ok" else None
    return steps is not None and steps.unstable


def _ratios(one: Entry, other: Entry) -> Mapping[Quantity, Ratio]:
    if one.result is None or other.result is None or not _outcome(one) == _outcome(other) == "ok":
        return {}
    found = ratios(make_cell(one.result, ""), make_cell(other.result, ""))
    if not _is_memory_alike(one, other):
        found.pop("memory", None)
    return found


def _is_memory_alike(one: Entry, other: Entry) -> bool:
    kinds = [memory_kind(entry.result.measured.memory) for entry in (one, other) if entry.result]
    return len(set(kinds)) <= 1


def memory_kind(memory: MemoryUse) -> str:
    """What its peak is of: an accelerator's memory, or a host's with shared pages counted once or for each process.

    >>> memory_kind(MemoryUse(reserved_bytes=1)), memory_kind(MemoryUse(rss_bytes=1))
    ('reserved on the accelerator', 'resident')
    """
    if memory.reserved_bytes is not None:
        return "reserved on the accelerator"
    is_resident = memory.host_bytes is None or memory.host_method == "rss"
    return "resident" if is_resident else "host memory, each page once"


def _outcome(entry: Entry) -> str:
    return str(entry.result.outcome) if entry.result else "missing"


def _by_trainer(pairs: Sequence[Pair]) -> dict[str, dict[Quantity, Overall]]:
    members: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.ratios:
            members[pair.trainer].append(pair)
    return {trainer: overall(found) for trainer, found in members.items()}


def _troubles(a: Capture, b: Capture) -> tuple[str, ...]:
    return tuple(f"{side}: {one_line(trouble)}" for side, one in (("A", a), ("B", b)) for trouble in one.troubles)


def _memory_notes(pairing: Pairing) -> tuple[str, ...]:
    both = [pair for pair in pairing.pairs if _outcome(pair[0]) == _outcome(pair[1]) == "ok"]
    unlike = sum(not _is_memory_alike(*pair) for pair in both)
    return (
        (f"memory of {unlike:,} pairs is not compared: A and B did not measure the same kind of it",) if unlike else ()
    )


def _notes(
    a: Sequence[Entry],
    b: Sequence[Entry],
    pairs: Sequence[Pair],
    environment: Sequence[Difference],
) -> tuple[str, ...]:
    notes = [f"{side} has no trials" for side, members in (("A", a), ("B", b)) if not members]
    if a and b and not pairs:
        apart = ", ".join(one_line(name) for name in disjoint_settings(a, b)) or "no single setting"
        notes.append(f"no configuration is in both sweeps; they share no value of: {apart}")
    elif pairs and not any(pair.ratios for pair in pairs):
        notes.append("no configuration ran to its end in both, so there is nothing to divide")
    if unstable := sum(pair.is_unstable and "time" in pair.ratios for pair in pairs):
        notes.append(
            f"the times of {unstable:,} pairs are unstable (~): the machine was busy with something else, and then "
            "even what the intervals decide may be its doing; measure these again on a quiet machine"
        )
    by_name = sum(bool(pair.differences) for pair in pairs)
    if by_name:
        notes.append(f"{by_name:,} pairs have the same name and size, but other settings differ")
    if any(difference.what == "peak of MFU" for difference in environment):
        notes.append("MFU is a share of different peaks in A and B")
    return tuple(notes)

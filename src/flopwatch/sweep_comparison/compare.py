"""From what lies in two folders to one comparison. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from flopwatch.plain_text import one_line
from flopwatch.report.capture import Capture
from flopwatch.report.cells import make_cell
from flopwatch.report.columns import trainer_name
from flopwatch.sweep_comparison.pairing import Entry, disjoint_settings, entries, paired, setting_differences
from flopwatch.sweep_comparison.ratios import overall, ratios
from flopwatch.sweep_comparison.records import Difference, Overall, Pair, Quantity, Ratio, Side, SweepComparison
from flopwatch.sweep_comparison.surroundings import environment_differences


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
        notes=(*_troubles(a, b), *_notes(in_a, in_b, pairs, environment)),
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
    )


def _ratios(one: Entry, other: Entry) -> Mapping[Quantity, Ratio]:
    if one.result is None or other.result is None or not _outcome(one) == _outcome(other) == "ok":
        return {}
    return ratios(make_cell(one.result, ""), make_cell(other.result, ""))


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
    by_name = sum(bool(pair.differences) for pair in pairs)
    if by_name:
        notes.append(f"{by_name:,} pairs have the same name and size, but other settings differ")
    if any(difference.what == "peak of MFU" for difference in environment):
        notes.append("MFU is a share of different peaks in A and B")
    if any(difference.what == "flopwatch" for difference in environment):
        notes.append("measured by different versions of flopwatch, whose memory may be defined differently")
    return tuple(notes)

"""Adds up the windows of several ranks. Pure: streams in, one stream out."""

from collections.abc import Iterator, Sequence

from flopwatch.monitor.ranks.reports import RankReport, extend, merge


def aligned(streams: Sequence[Iterator[RankReport]]) -> Iterator[RankReport]:
    """One report for every step at which a window ends on all ranks.

    Ranks cut their windows by the same rule, but one of them may cut once more (a checkpoint that only it writes): its
    windows are joined until they end where those of the others do. A stream that ends is left out from there on, and
    so is a window that begins elsewhere than the first stream's: it tells of other steps.
    """
    live = list(streams)
    while live:
        heads: list[tuple[Iterator[RankReport], RankReport]] = []
        for stream in live:
            head = next(stream, None)
            if head is not None:
                heads.append((stream, head))
        ended: set[int] = set()
        while behind := _behind(heads, ended):
            for index in behind:
                stream, head = heads[index]
                later = next(stream, None)
                if later is None:
                    ended.add(index)
                else:
                    heads[index] = stream, extend(head, later)
        if heads:
            begins = heads[0][1].first_step
            yield merge([head for _, head in heads if head.first_step == begins])
        live = [stream for index, (stream, _) in enumerate(heads) if index not in ended]


def _behind(heads: Sequence[tuple[Iterator[RankReport], RankReport]], ended: set[int]) -> list[int]:
    furthest = max((head.last_step for _, head in heads), default=0)
    return [index for index, (_, head) in enumerate(heads) if head.last_step < furthest and index not in ended]

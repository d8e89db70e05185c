"""What a window costs as ranks are added: processor time per rank, latency to the logging rank, bytes.

    python benchmarks/scale/growth.py                # 2, 4, 8, 16, 32 ranks; writes nothing
    python benchmarks/scale/growth.py --write        # also puts the table and the fit into docs/scale.md

All ranks are processes on this machine, so the latency holds their processor time too: with more ranks than cores they
wait for a core, not for each other. The processor time per rank is what carries over to other machines.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

RANKS = (2, 4, 8, 16, 32)
WINDOWS = 200
PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
MARKERS = "<!-- growth -->", "<!-- /growth -->"


@dataclass(frozen=True)
class Point:
    """One number of ranks, measured.

    Attributes:
        ranks: How many.
        start_seconds: From the opening of the links until the last rank has the plan.
        latency_seconds: From the moment all ranks hand in their report until the logging rank has the sum; median.
        cpu_seconds: Of a rank's link thread per window, by how many ranks report to it; medians.
    """

    ranks: int
    start_seconds: float
    latency_seconds: float
    cpu_seconds: dict[int, float]


def work(folder: Path) -> None:
    import torch.distributed as dist

    from flopwatch.monitor.measured_step import MeasuredStep
    from flopwatch.monitor.ranks.exchange import RankLink
    from flopwatch.monitor.ranks.job_store import RunKey
    from flopwatch.monitor.ranks.layout import children
    from flopwatch.monitor.ranks.reports import report_of

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    began = time.perf_counter()
    link = RankLink(RunKey(logging_rank=0, number=1, log="growth"), rank, ranks)
    if rank == 0:
        link.announce(50)
    while link.window_steps is None:
        time.sleep(0.001)
    dist.barrier()
    started = time.perf_counter() - began
    latencies, before = [], link.cpu_seconds
    for window in range(WINDOWS):
        steps = [MeasuredStep(window, seconds=0.2, tokens=8192 + rank, model_flops=10**15, backward_seconds=0.1)]
        report = report_of(rank, steps, peak_flops_per_s=1e15)
        dist.barrier()
        handed_in = time.perf_counter()
        link.send(report)
        if rank == 0:
            assert link.wait_for(window, 60.0)
            latencies.append(time.perf_counter() - handed_in)
            total = link.merged.popleft()
            assert total.ranks == ranks
            assert total.total("tokens").total == sum(8192 + each for each in range(ranks))  # uneven on purpose
    link.finish(60.0)
    cpu = (link.cpu_seconds - before) / WINDOWS
    result = {
        "children": len(children(rank, 0, ranks)),
        "cpu": cpu,
        "start": started,
        "latency": median(latencies) if latencies else None,
    }
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


def measure(ranks: int, folder: Path) -> Point:
    folder.mkdir(parents=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, __file__, "--worker", str(folder)], check=True, env=environment)
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    by_children: dict[int, list[float]] = {}
    for result in results:
        by_children.setdefault(result["children"], []).append(result["cpu"])
    return Point(
        ranks,
        max(result["start"] for result in results),
        results[0]["latency"],
        {children: median(seconds) for children, seconds in sorted(by_children.items())},
    )


def fit_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: intercept and slope."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return mean_y - slope * mean_x, slope


def as_text(points: list[Point]) -> str:
    lines = [
        "| ranks | start of the links | latency, median | CPU of a rank per window, by ranks that report to it |",
        "| --- | --- | --- | --- |",
    ]
    for point in points:
        cpu = ", ".join(f"{children}: {1e6 * seconds:.0f} µs" for children, seconds in point.cpu_seconds.items())
        start, latency = 1e3 * point.start_seconds, 1e3 * point.latency_seconds
        lines.append(f"| {point.ranks} | {start:.0f} ms | {latency:.2f} ms | {cpu} |")
    base, slope = fit_line([(c, s) for point in points for c, s in point.cpu_seconds.items()])
    busiest = max(base + 16 * slope, *(seconds for point in points for seconds in point.cpu_seconds.values()))
    lines += [
        "",
        f"A line through these points is {1e6 * base:.0f} µs + {1e6 * slope:.0f} µs for each rank that reports to it, "
        "of which there are at most 16 (8 of the same host, 8 of others), in a training of any size. The most of line "
        "and points is "
        f"{1e6 * busiest:.0f} µs, {100 * busiest / 10:.4f} % of a core with a window of 10 s.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", type=Path)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
    import tempfile

    from rich.progress import track

    with tempfile.TemporaryDirectory() as folder:
        ranks = track(options.ranks, "ranks", disable=not sys.stdout.isatty())
        text = as_text([measure(count, Path(folder) / str(count)) for count in ranks])
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text().partition(MARKERS[0])
        _, _, after = rest.partition(MARKERS[1])
        PAGE.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}")


if __name__ == "__main__":
    main()

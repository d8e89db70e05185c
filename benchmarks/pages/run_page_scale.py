"""Measure the page of a run of ten days: seconds of `flopwatch report --html`, size of the page, and memory.

python benchmarks/pages/run_page_scale.py [STEPS]
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from testbeds.long_run_log import write_long_run


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        log = write_long_run(Path(folder), steps)
        page = Path(folder) / "run.html"
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-m", "flopwatch", "report", folder, "--html", str(page)], check=True)
        seconds = time.perf_counter() - begun
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{steps:,} steps, log of {log.stat().st_size / 1e6:.0f} MB")
        print(
            f"{seconds:.1f} s, of which {used.ru_utime + used.ru_stime:.1f} s on a processor; "
            f"page of {page.stat().st_size / 1e6:.2f} MB, {used.ru_maxrss / 1024:.0f} MiB of memory"
        )


if __name__ == "__main__":
    main()

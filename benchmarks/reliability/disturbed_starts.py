"""Starts trainings whose ops compute other last bits under a dispatch mode, with `flopwatch run`: how do they end?

python benchmarks/reliability/disturbed_starts.py --starts 100
"""

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from testbeds import disturbing_ops
from testbeds.disturbing_ops import FUNCTIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=100)
    names, ends = list(FUNCTIONS), Counter[int]()
    for index in range(parser.parse_args().starts):
        name = names[index % len(names)]
        with TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "flopwatch", "run", "--quiet", "--output-dir", folder]
            ended = subprocess.run(
                [*command, str(Path(disturbing_ops.__file__)), name], capture_output=True, text=True, check=False
            )
        ends[ended.returncode] += 1
        if ended.returncode:
            print(f"{name}: {ended.returncode}\n{ended.stderr[-2000:]}")
    print("exit status: starts", dict(ends))
    sys.exit(bool(set(ends) - {0}))


if __name__ == "__main__":
    main()

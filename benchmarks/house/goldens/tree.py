"""The source tree whose behaviour is recorded; its code runs in other processes."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2]


@dataclass(frozen=True)
class Tree:
    """A checkout of flopwatch with `src`, `testbeds` and `tests`."""

    root: Path

    def environment(self, **more: str) -> dict[str, str]:
        places = (BENCHMARKS, self.root / "src", self.root, self.root / "tests", self.root / "benchmarks")
        path = os.pathsep.join(map(str, places))
        fixed = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return {**os.environ, **fixed, **more}

    def run(self, module: str, *arguments: str, cwd: Path) -> None:
        """Run a module of this folder with the tree's code.

        Raises:
            CalledProcessError: It has failed.
        """
        subprocess.run([sys.executable, "-m", module, *arguments], check=True, cwd=cwd, env=self.environment())

"""The environment of a Python process that knows nothing of this one."""

import os
from pathlib import Path


def fresh_environment(**more):
    """Without the W&B service of this process: a child that finds it in the environment starts none of its own."""
    inherited = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    # What the parent imports comes first: in a second worktree, that is not what is installed.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), **more}

"""A trial of a `command` trainer that holds 8 MiB a sample: `python3 holding.py BATCH_SIZE`. Quick: it needs no torch.

Its throughput, as it reports it, grows up to 4 samples and then no more.
"""

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    samples = int(sys.argv[1])
    held = b"x" * (samples * 8 * 2**20)
    time.sleep(0.5)  # the supervisor looks at memory every 0.2 seconds
    seconds = 0.001 * max(samples, 4)
    metrics = {"step_seconds": [seconds] * 5, "samples_per_s": samples / seconds}
    Path(os.environ["FLOPWATCH_TRIAL_DIR"], "metrics.json").write_text(json.dumps(metrics))

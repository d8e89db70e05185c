"""Runs one trial of a sweep: `python -m flopwatch.sweep.supervisor SWEEP_FOLDER NAME [ATTEMPT]`."""

import sys

from flopwatch.sweep.supervisor.supervise import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

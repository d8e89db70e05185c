"""Two runs side by side, from their logs alone. Pure arithmetic; never loads torch.

>>> from flopwatch.run_comparison import compare
>>> from flopwatch.run_log import find_log, read_log
>>> comparison = compare(read_log(find_log("before")), read_log(find_log("after")))  # doctest: +SKIP
>>> comparison.line("tokens_per_second").verdict  # doctest: +SKIP
'faster'
"""

from flopwatch.run_comparison.compare import Comparison as Comparison
from flopwatch.run_comparison.compare import Line as Line
from flopwatch.run_comparison.compare import RunSteps as RunSteps
from flopwatch.run_comparison.compare import compare as compare
from flopwatch.run_comparison.compare import speed_line as speed_line
from flopwatch.run_comparison.differences import Difference as Difference

import io
import random

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from flopwatch.sinks import event_frame


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 35, 2047, 2048, 2049, 2051, 2052, 10_000])
def test_a_frame_is_the_one_tensorboard_itself_would_write(size):
    content = random.Random(size).randbytes(size)
    file = io.BytesIO()
    RecordWriter(file).write(content)
    assert event_frame.frame_event(content) == file.getvalue()

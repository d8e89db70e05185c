import threading
import time

import pytest

from flopwatch.records.run import Row, Summary
from flopwatch.sinks.thread import SinkThread
from flopwatch.testing import RecordingSink
from support.sinks.sample_run import START, WARNING, basic_row, records, rows
from support.sinks.servers import wait_until


@pytest.fixture
def start():
    """Starts sink threads and ends them after the test; `start.failures` is what they reported."""
    started = []

    def start_one(sink, **more):
        thread = SinkThread(sink, lambda name, error: start_one.failures.append((name, error)), **more)
        started.append((sink, thread))
        return thread

    start_one.failures = []
    yield start_one
    for sink, thread in started:
        sink.release()
        assert thread.close(10)


def test_a_thread_that_cannot_be_started_is_a_sink_that_failed(start, monkeypatch):
    def cannot(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    sink = RecordingSink()
    thread = start(sink)
    assert thread.failed == "RuntimeError: can't start new thread"
    assert [(name, str(error)) for name, error in start.failures] == [(sink.name, "can't start new thread")]
    assert not thread.put(START)
    assert not thread.flush(10)


def test_every_record_arrives_in_order_and_the_sink_is_flushed_and_closed_once(start):
    sink = RecordingSink()
    thread = start(sink)
    sent = records()
    assert all(thread.put(record) for record in sent)
    assert thread.close(10)
    assert sink.records == sent
    assert (sink.flushes > 0, sink.closed) == (True, 1)
    assert (thread.dropped_rows, thread.failed, start.failures) == (0, None, [])


def test_a_full_queue_turns_rows_away_and_counts_them(start):
    sink = RecordingSink(hangs=True)
    thread = start(sink, queue_size=5)
    thread.put(START)
    wait_until(lambda: thread._queue.qsize() == 0, "the sink hangs with the first record")
    taken = [thread.put(basic_row(10 * number)) for number in range(1, 9)]
    assert taken == [True] * 5 + [False] * 3
    assert thread.dropped_rows == 3
    sink.release()
    assert thread.close(10)
    assert [record.step for record in sink.records[1:]] == [10, 20, 30, 40, 50]


def test_a_queue_full_of_rows_still_takes_the_summary(start):
    sink = RecordingSink(hangs=True)
    thread = start(sink, queue_size=2)
    for row in rows():
        thread.put(row)
    assert thread.put(Summary(60, 1.0))
    sink.release()
    assert thread.close(10)
    assert isinstance(sink.records[-1], Summary)


def test_a_hanging_sink_holds_up_neither_put_nor_close_nor_another_sink(start):
    hanging, working = RecordingSink("hanging", hangs=True), RecordingSink("working")
    threads = [start(hanging), start(working)]
    for record in records():
        assert all(thread.put(record) for thread in threads)
    assert threads[1].close(10)
    assert working.records == records()
    assert not threads[0].close(0.05)
    assert hanging.records == []


@pytest.mark.parametrize("error", [ValueError("no more"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_the_first_exception_is_reported_once_and_switches_the_sink_off(start, error):
    sink = RecordingSink("broken", raises=error, fails_after=2)
    thread = start(sink)
    for row in rows():
        thread.put(row)
    wait_until(lambda: thread.failed is not None, "the sink is switched off")
    assert not thread.put(START)
    assert thread.close(10)
    assert start.failures == [("broken", error)]
    assert type(error).__name__ in thread.failed
    assert str(error) in thread.failed
    assert (len(sink.records), sink.closed, thread.dropped_rows) == (2, 1, 0)


def test_a_row_is_not_given_to_the_sinks_it_skips(start):
    sinks = [RecordingSink("wandb"), RecordingSink("other")]
    threads = [start(sink) for sink in sinks]
    row = Row(1, 0.0, {}, skip=("wandb",))
    assert all(thread.put(row) and thread.close(10) for thread in threads)
    assert [len(sink.records) for sink in sinks] == [0, 1]


def test_a_sink_is_flushed_when_all_is_written_and_then_left_alone(start):
    sink = RecordingSink()
    thread = start(sink, gather_seconds=0.01)
    thread.put(START)
    wait_until(lambda: sink.flushes == 1, "the sink is flushed")

    def is_asleep():
        before = thread.cpu_seconds
        time.sleep(0.1)  # ten times the wait: a thread that polls would have flushed or worked again
        return thread.cpu_seconds == before

    wait_until(is_asleep, "the thread sleeps")
    assert sink.flushes == 1
    thread.put(START)
    wait_until(lambda: sink.flushes == 2, "the sink is flushed again")


def test_rows_gather_until_something_else_comes(start):
    sink = RecordingSink()
    sink.gather_seconds = 3600.0
    thread = start(sink)
    thread.put(START)
    wait_until(lambda: sink.flushes == 1, "the start is written at once")
    thread.put(rows()[0])
    thread.put(rows()[1])
    time.sleep(0.1)  # nothing must happen, so there is nothing to poll for
    assert sink.records == [START]
    thread.put(WARNING)
    wait_until(lambda: sink.flushes == 2, "all of it is written and flushed once")
    assert [record.type for record in sink.records] == ["run", "row", "row", "notice"]


def test_rows_do_not_gather_longer_than_they_may(start):
    sink = RecordingSink()
    thread = start(sink, gather_seconds=0.05)
    thread.put(START)
    wait_until(lambda: sink.flushes == 1, "the start is written")
    thread.put(basic_row(10))
    wait_until(lambda: len(sink.records) == 2, "the row is written without anything else coming")


def test_flush_hands_on_what_waits_and_says_whether_it_did(start):
    sink = RecordingSink()
    thread = start(sink, gather_seconds=3600.0)
    thread.put(START)
    wait_until(lambda: sink.flushes == 1, "the start is written")
    thread.put(basic_row(10))
    assert thread.flush(10)
    assert len(sink.records) == 2
    hanging = RecordingSink(hangs=True)
    stuck = start(hanging)
    stuck.put(START)
    assert not stuck.flush(0.05)


def test_a_flush_under_way_ends_when_the_sink_fails(start):
    sink = RecordingSink(raises=ValueError("no"), seconds_per_record=0.0)
    thread = start(sink)
    thread.put(START)
    assert not thread.flush(3600)

"""Which time of the device belongs to the steps: by the launches of the kernels, and by what marks the steps."""

import random

import pytest

from flopwatch.errors import InputError
from flopwatch.runs.traces import read_trace
from support.make_trace import ALL_REDUCE, ELEMENTWISE, MATMUL, event, write_trace
from testbeds.trace_oracle import Trace

FIRST = 4_000_000_000_000.0


def step(number, start, end, name="ProfilerStep#{}"):
    return event("user_annotation", name.format(number), FIRST + start, end - start, stream=1)


def launched(number, at, start, end, name=MATMUL, stream=7):
    """A launch on the host, and its kernel on the device. Kineto may write them in any order."""
    kernel = event("kernel", name, FIRST + start, end - start, stream=stream, correlation=number)
    return [kernel, event("cuda_runtime", "cudaLaunchKernel", FIRST + at, 2, stream=1, correlation=number)]


def earlier(start, end, name=MATMUL, stream=7):
    """A kernel whose launch is not in the trace."""
    return event("kernel", name, FIRST + start, end - start, stream=stream, correlation=9_000_000 + start)


def read(tmp_path, *events, **about):
    flat = [each for group in events for each in (group if isinstance(group, list) else [group])]
    return read_trace(write_trace(tmp_path / "t.json", flat, **about))


def microseconds(seconds):
    return round(seconds * 1e6, 3)


def test_where_the_host_runs_ahead_the_steps_end_when_the_device_has_done_their_work(tmp_path):
    split = read(
        tmp_path,
        earlier(-50, 300),
        step(1, 0, 100),
        launched(1, 10, 300, 700),
        step(2, 100, 200),
        launched(2, 110, 700, 1100),
        launched(3, 250, 1100, 1500),  # of a step that is not marked
    )
    assert (split.steps, microseconds(split.seconds)) == (2, 800)
    assert microseconds(split.matmul_seconds) == 800
    assert split.idle_seconds == 0


def test_where_the_device_waits_for_the_host_the_steps_are_the_hosts(tmp_path):
    split = read(
        tmp_path,
        earlier(-50, -10),
        step(1, 0, 100),
        launched(1, 10, 15, 20),
        step(2, 100, 200),
        launched(2, 110, 115, 120),
    )
    assert (microseconds(split.seconds), microseconds(split.idle_seconds)) == (200, 190)


def test_idle_time_after_the_work_of_earlier_steps_belongs_to_the_first(tmp_path):
    """Work of before ends just after the mark; then the step waits for its batch."""
    split = read(tmp_path, earlier(-50, 5), step(1, 0, 100), launched(1, 80, 85, 130))
    assert (microseconds(split.seconds), microseconds(split.idle_seconds)) == (125, 80)


def test_all_kernels_of_a_graph_have_the_correlation_of_its_launch(tmp_path):
    graph = [event("cuda_runtime", "cudaGraphLaunch", FIRST + 10, 2, stream=1, correlation=5)]
    graph += [
        event("kernel", MATMUL, FIRST + 100 * place, 90, stream=7 + place % 2, correlation=5) for place in range(1, 9)
    ]
    split = read(tmp_path, step(1, 0, 50), graph)
    assert microseconds(split.seconds) == 890
    assert microseconds(split.matmul_seconds) == 720


def test_a_stream_that_runs_ahead_does_not_begin_the_step(tmp_path):
    """As in TorchRec, where the next batch is sent around while the device still works on the batch before."""
    split = read(
        tmp_path,
        earlier(-50, 300),
        step(1, 0, 100),
        launched(1, 5, 10, 60, name=ALL_REDUCE, stream=20),
        launched(2, 10, 300, 500),
    )
    assert microseconds(split.seconds) == 200
    assert split.exposed_communication_seconds == 0


def test_a_kernel_without_a_launch_amid_others_moves_no_step(tmp_path):
    """Older profilers do not record the launches of NCCL."""
    split = read(
        tmp_path, step(1, 0, 100), launched(1, 10, 20, 120), earlier(120, 150, name=ALL_REDUCE), earlier(500, 600)
    )
    assert microseconds(split.seconds) == 120


def test_the_optimizers_work_is_what_it_has_launched(tmp_path):
    """On ROCm the annotation on the device is 0.02 ms long, whatever the optimizer's kernels take."""
    split = read(
        tmp_path,
        step(1, 0, 100),
        launched(1, 10, 100, 200),
        step(1, 50, 60, "Optimizer.step#SGD.step"),
        launched(2, 52, 200, 300, name=ELEMENTWISE),
        launched(3, 55, 250, 400, name=ALL_REDUCE, stream=20),
        launched(4, 70, 350, 450),
        event("gpu_user_annotation", "Optimizer.step#SGD.step", FIRST + 100, 0.02),
    )
    assert microseconds(split.matmul_seconds) == 200
    assert microseconds(split.optimizer_seconds) == 100
    assert microseconds(split.exposed_communication_seconds) == 50


def test_an_evaluation_between_the_steps_is_left_out_with_its_work_on_the_device(tmp_path):
    split = read(
        tmp_path,
        step(1, 0, 100),
        launched(1, 10, 100, 300),
        step(2, 100, 300),
        step(0, 110, 200, "flopwatch::outside_steps"),
        launched(2, 120, 300, 900),
        launched(3, 210, 900, 1100),
    )
    assert (split.steps, microseconds(split.seconds)) == (2, 500)
    assert microseconds(split.matmul_seconds) == 400


def test_the_mark_that_the_profiler_opens_after_the_last_step_is_none(tmp_path):
    split = read(tmp_path, step(1, 0, 100), launched(1, 10, 20, 90), step(2, 100, 101))
    assert (split.steps, microseconds(split.seconds)) == (1, 100)


def test_steps_that_overlap_because_their_times_were_rounded_are_all_steps(tmp_path):
    marks = [step(number, 100 * number, 100 * number + 101) for number in range(4)]
    split = read(
        tmp_path, marks, *(launched(number + 1, 100 * number, 100 * number, 100 * number + 50) for number in range(4))
    )
    assert (split.steps, microseconds(split.seconds)) == (4, 401)


def test_steps_that_another_thread_continues_are_all_steps(tmp_path):
    marks = [{**step(number, 100 * number, 100 * number + 100), "tid": number % 2} for number in range(4)]
    split = read(
        tmp_path, marks, *(launched(number + 1, 100 * number, 100 * number, 100 * number + 50) for number in range(4))
    )
    assert (split.steps, microseconds(split.seconds)) == (4, 400)


def test_a_file_with_the_steps_of_two_processes_is_refused(tmp_path):
    with pytest.raises(InputError, match="has steps of 2 processes"):
        read(tmp_path, step(1, 0, 100), {**step(1, 10, 60), "pid": 2}, launched(1, 10, 20, 60))


def test_kernels_whose_launches_are_unknown_are_refused(tmp_path):
    with pytest.raises(InputError, match="does not say which kernels the steps have launched"):
        read(tmp_path, step(1, 0, 100), event("kernel", MATMUL, FIRST + 20, 150))


def test_steps_that_take_no_time_are_refused(tmp_path):
    outside = step(0, 0, 100, "flopwatch::outside_steps")
    with pytest.raises(InputError, match="has steps that take no time"):
        read(tmp_path, step(1, 0, 100), outside, launched(1, 10, 20, 60))


def test_launches_of_kernels_that_the_trace_does_not_have_are_no_training_on_a_cpu(tmp_path):
    ops = [event("cpu_op", "aten::mm", FIRST + 10, 40)]
    with pytest.raises(InputError, match="is of a training on cuda, but the profiler recorded no kernels"):
        read(tmp_path, step(1, 0, 100), ops, launched(1, 10, 20, 60)[1])
    synchronize = event("cuda_runtime", "cudaDeviceSynchronize", FIRST + 90, 5, correlation=1)
    assert read(tmp_path, step(1, 0, 100), ops, synchronize).device == "cpu"


@pytest.mark.parametrize("seed", range(25))
def test_random_traces_agree_with_an_independent_reading(tmp_path, seed):
    draw = random.Random(seed)
    events, number, device = [], 0, dict.fromkeys((7, 13, 20), draw.randrange(200))
    events += [earlier(end - 40, end, stream=stream) for stream, end in device.items() if draw.random() < 0.5]
    for place in range(3):
        start = 100 * place
        events.append(step(place, start, start + 99))
        for at in sorted(draw.sample(range(start, start + 99), draw.randrange(1, 9))):
            stream, number = draw.choice(list(device)), number + 1
            begin = max(device[stream], at) + draw.randrange(30)
            device[stream] = begin + draw.randrange(1, 120)
            name = draw.choice([MATMUL, ELEMENTWISE, ALL_REDUCE])
            events += launched(number, at, begin, device[stream], name=name, stream=stream)
    draw.shuffle(events)
    path = write_trace(tmp_path / "t.json.gz", events)
    split, truth = read_trace(path), Trace(path).truth()
    assert split.steps == truth.steps
    assert microseconds(split.seconds) == truth.length / 1e3
    assert microseconds(split.idle_seconds) == truth.idle / 1e3
    assert microseconds(split.exposed_communication_seconds) == truth.exposed_communication / 1e3
    assert microseconds(split.hidden_communication_seconds) == truth.hidden_communication / 1e3

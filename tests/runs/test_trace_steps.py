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


def read(tmp_path, *events, mark=None, **about):
    flat = [each for group in events for each in (group if isinstance(group, list) else [group])]
    return read_trace(write_trace(tmp_path / "t.json", flat, **about), mark)


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


def test_without_correlations_the_steps_are_the_hosts_and_the_last_ends_on_the_device(tmp_path):
    split = read(
        tmp_path,
        step(1, 0, 100),
        event("kernel", MATMUL, FIRST + 20, 150),
        event("gpu_user_annotation", "ProfilerStep#1", FIRST + 20, 150),
    )
    assert (microseconds(split.seconds), microseconds(split.matmul_seconds)) == (170, 150)


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


@pytest.mark.parametrize(("op", "use"), [(5, "matmul"), (6, "other_kernel")])
def test_what_a_matmul_launches_is_a_matmul(tmp_path, op, use):
    kernel = event("kernel", ELEMENTWISE, FIRST + 20, 70, correlation=1, **{"External id": op})
    ops = [event("cpu_op", "aten::mm", FIRST + 5, 10, **{"External id": 5})]
    ops += [event("cpu_op", "aten::add", FIRST + 5, 10, **{"External id": 6})]
    launch = event("cuda_runtime", "cudaLaunchKernel", FIRST + 10, 2, correlation=1)
    split = read(tmp_path, step(1, 0, 100), ops, launch, kernel)
    assert microseconds(getattr(split, f"{use}_seconds")) == 70


def test_the_correlation_id_in_place_of_an_ops_id_means_no_op(tmp_path):
    """Kineto of before 2024 wrote it there, so the number is that of another op."""
    kernels = [
        event("kernel", ELEMENTWISE, FIRST + 10 * number, 5, correlation=number, **{"External id": number})
        for number in range(1, 6)
    ]
    ops = [event("cpu_op", "aten::mm", FIRST, 5, **{"External id": 3})]
    split = read(tmp_path, step(1, 0, 100), ops, kernels)
    assert microseconds(split.other_kernel_seconds) == 25


def test_steps_that_overlap_because_their_times_were_rounded_are_all_steps(tmp_path):
    marks = [step(number, 100 * number, 100 * number + 101) for number in range(4)]
    split = read(
        tmp_path, marks, *(launched(number + 1, 100 * number, 100 * number, 100 * number + 50) for number in range(4))
    )
    assert (split.steps, microseconds(split.seconds)) == (4, 401)


def test_of_threads_that_train_at_the_same_time_the_one_with_most_steps_is_read(tmp_path):
    """Steps of both together would be half as long."""
    first = [step(number, 100 * number, 100 * number + 99) for number in range(4)]
    second = [{**step(number, 100 * number + 50, 100 * number + 149), "tid": 2} for number in range(3)]
    split = read(tmp_path, first, second, launched(1, 10, 20, 60), launched(2, 310, 320, 380))
    assert (split.steps, microseconds(split.seconds)) == (4, 399)


def test_steps_that_another_thread_continues_are_all_steps(tmp_path):
    marks = [{**step(number, 100 * number, 100 * number + 100), "tid": number % 2} for number in range(4)]
    split = read(
        tmp_path, marks, *(launched(number + 1, 100 * number, 100 * number, 100 * number + 50) for number in range(4))
    )
    assert (split.steps, microseconds(split.seconds)) == (4, 400)


def test_a_file_with_the_steps_of_two_processes_is_refused(tmp_path):
    with pytest.raises(InputError, match="has steps of 2 processes"):
        read(tmp_path, step(1, 0, 100), {**step(1, 10, 60), "pid": 2}, launched(1, 10, 20, 60))


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


@pytest.mark.parametrize("named", [True, False], ids=["device named", "device as the process"])
def test_several_devices_are_told(tmp_path, named):
    events = [step(1, 0, 100)]
    for device in range(2):
        kernel, launch = launched(device + 1, 5, 50 * device, 50 * device + 50)
        kernel["pid"], kernel["args"]["device"] = device, device
        if not named:
            del kernel["args"]["device"]
        events += [kernel, launch]
    split = read(tmp_path, events)
    assert (split.devices, split.idle_seconds) == (2, 0)
    assert read(tmp_path, events[:3]).devices == 1


class TestOtherMarks:
    def three(self, *, name):
        for number in range(3):
            yield step(number, 100 * number + 20, 100 * number + 80, name)
            yield from launched(number + 1, 100 * number + 30, 100 * number + 40, 100 * number + 60)

    @pytest.mark.parametrize(
        ("name", "marked_by"),
        [
            *(
                (name, name.replace("{}", "N"))
                for name in ("iteration {}", "step_{}", "## Step {} ##", "train step #{}")
            ),
            *((name, name) for name in ("train_step", "training_step", "[pl][profile]run_training_batch")),
        ],
    )
    def test_an_iterations_own_annotation_is_a_step(self, tmp_path, name, marked_by):
        split = read(tmp_path, list(self.three(name=name)))
        assert (split.steps, split.marked_by, microseconds(split.seconds)) == (2, marked_by, 200)

    def test_a_single_annotation_of_an_iteration_is_a_step(self, tmp_path):
        split = read(tmp_path, step(7, 20, 80, "iteration {}"), launched(1, 30, 40, 60))
        assert (split.steps, microseconds(split.seconds)) == (1, 60)

    @pytest.mark.parametrize("name", ["Optimizer.step#SGD.step", "DistributedDataParallel.forward", "my own mark"])
    def test_an_annotation_that_the_user_names_is_divided_as_one_that_is_found(self, tmp_path, name):
        events = [*self.three(name=name), *(step(number, 100 * number, 100 * number + 1) for number in range(9))]
        split = read(tmp_path, events, mark=name[:12])
        assert (split.steps, split.marked_by, microseconds(split.seconds)) == (2, name, 200)

    @pytest.mark.parametrize("mark", ["pass", "pass {}", "pass N", "pass 0"])
    def test_the_whole_name_of_an_annotation_goes_before_a_part_of_another_one(self, tmp_path, mark):
        name = mark.replace("N", "{}").replace("0", "{}")
        layers = [step(number, 10 * number, 10 * number + 5, "subpass {} of pass N") for number in range(30)]
        split = read(tmp_path, list(self.three(name=name)), layers, mark=mark.replace("{}", "N"))
        assert split.marked_by == name.replace("{}", "N")

    def test_an_empty_name_of_an_annotation_is_none(self, tmp_path):
        others = [step(number, 10 * number, 10 * number + 5, "layer") for number in range(30)]
        assert read(tmp_path, others, list(self.three(name="ProfilerStep#{}")), mark="").marked_by == "ProfilerStep#N"

    def test_between_the_ends_of_two_optimizer_steps_is_a_step(self, tmp_path):
        split = read(tmp_path, list(self.three(name="Optimizer.step#SGD.step")))
        assert (split.steps, split.marked_by) == (2, "Optimizer.step#SGD.step")
        assert microseconds(split.seconds) == 200

    @pytest.mark.parametrize("name", ["DistributedDataParallel.forward", "## forward ##"])
    def test_between_the_starts_of_two_forward_passes_is_a_step(self, tmp_path, name):
        split = read(tmp_path, list(self.three(name=name)))
        assert (split.steps, split.marked_by, microseconds(split.seconds)) == (2, name, 200)

    def test_marks_of_the_profiler_go_before_all_others(self, tmp_path):
        others = [*self.three(name="iteration {}"), *self.three(name="Optimizer.step#SGD.step")]
        split = read(tmp_path, others, step(7, 0, 90))
        assert (split.steps, split.marked_by) == (1, "ProfilerStep#N")

    @pytest.mark.parametrize("name", ["load batch", "validation_step", "Optimizer.zero_grad#SGD.zero_grad", "backward"])
    def test_other_annotations_are_no_steps(self, tmp_path, name):
        with pytest.raises(InputError, match=rf"Its annotations are '{name}' \(3\)"):
            read(tmp_path, list(self.three(name=name)))


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

import pytest
import torch

from flopwatch import InputError, MeasurementError, measure_peak
from flopwatch.hardware.measure import matmul_flops, plain_matmuls, search_best_matmul
from flopwatch.testing import FakeClock
from support.fakes import FakeMatmul

FASTEST = (4096, 1024, 4096)


def rate_of(shape):
    return 8e12 if shape == FASTEST else 5e12


def fake(flops_per_s=rate_of):
    clock = FakeClock()
    return {"time_matmul": FakeMatmul(clock, flops_per_s), "clock": clock}


def test_the_peak_is_the_rate_of_the_fastest_shape():
    peak = measure_peak("cpu", "fp32", **fake())
    assert peak.flops_per_s == pytest.approx(8e12, rel=1e-12)
    assert (peak.kind, peak.dtype, peak.confidence) == ("measured", "fp32", "medium")
    assert "4096 x 1024 x 4096, median of" in peak.source
    assert "spread 0.0%" in peak.source


def test_the_result_is_the_median_of_fresh_repeats_and_the_spread_is_their_range():
    clock = FakeClock()
    shape = (1000, 1000, 1000)  # 2 GFLOP
    # 1 warm-up, 1 estimate, 3 search repeats, then the final ones; seconds for one call each.
    seconds = iter([9.0, 1.0, 0.5, 0.5, 0.5, 1.0, 2.0, 4.0, 2.0, 1.0])

    def time_matmul(shape, calls):
        assert calls == 1
        taken = next(seconds)
        clock.advance(taken)
        return taken

    best = search_best_matmul(time_matmul, 1.0, clock, [shape])
    assert best.flops_per_s == 2e9 / 2.0
    assert best.spread == (4.0 - 1.0) / 2.0
    assert (best.repeats, best.shape, best.shapes_tried) == (5, shape, 1)


def test_short_matmuls_are_timed_many_at_a_time():
    clock = FakeClock()
    time_matmul = FakeMatmul(clock, lambda shape: 1e12)
    search_best_matmul(time_matmul, 1.0, clock, [(100, 100, 100)])  # 2 microseconds each
    assert time_matmul.timed[:3] == [((100, 100, 100), 1), ((100, 100, 100), 1), ((100, 100, 100), 10_000)]


def test_shapes_that_would_not_fit_into_the_time_are_not_tried():
    clock = FakeClock()
    time_matmul = FakeMatmul(clock, lambda shape: 100e9)
    search_best_matmul(time_matmul, 3.0, clock)
    tried = {shape for shape, _ in time_matmul.timed}
    assert (512, 512, 512) in tried
    assert (16384, 16384, 16384) not in tried  # 88 s at this rate
    assert clock() < 2 * 3.0


def test_a_timer_that_says_no_time_has_passed_is_an_error():
    with pytest.raises(MeasurementError, match=r"reports 0\.0 s"):
        measure_peak("cpu", "fp32", time_matmul=lambda shape, calls: 0.0)


def test_a_device_that_cannot_multiply_in_the_type_is_an_error_that_says_so():
    def refuse(shape, calls):
        raise RuntimeError("not implemented for 'Half'")

    with pytest.raises(MeasurementError, match=r"fp16 matmuls failed on .*not implemented for 'Half'"):
        measure_peak("cpu", "fp16", time_matmul=refuse)


@pytest.mark.parametrize("dtype", ["tf32", "fp8", "int8"])
def test_a_type_that_cannot_be_measured_here_is_an_error_that_names_those_that_can(dtype):
    with pytest.raises(
        InputError, match=f"{dtype} cannot be measured on a cpu device; measure one of: fp64, fp32, bf16"
    ):
        measure_peak("cpu", dtype)


def test_a_known_figure_is_not_measured_again():
    first = measure_peak("cpu", "fp32", **fake())
    again = fake(lambda shape: 1e12)
    assert measure_peak("cpu", "fp32", **again) == first
    assert again["time_matmul"].timed == []


def test_refresh_measures_again_and_replaces_the_figure():
    measure_peak("cpu", "fp32", **fake())
    slower = measure_peak("cpu", "fp32", refresh=True, **fake(lambda shape: 1e12))
    assert slower.flops_per_s == pytest.approx(1e12)
    assert measure_peak("cpu", "fp32", **fake()) == slower


def test_a_cache_that_cannot_be_written_does_not_fail_the_measurement(monkeypatch, tmp_path):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert measure_peak("cpu", "fp32", **fake()).flops_per_s == pytest.approx(8e12)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_this_cpu_can_be_measured(dtype):
    peak = measure_peak("cpu", dtype, seconds=0.2)
    assert peak.flops_per_s > 1e6
    assert peak.kind == "measured"


def test_measuring_leaves_torch_as_it_was(restored_fp32_precision):
    torch.set_float32_matmul_precision("medium")
    switches = fp32_switches()
    random_state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measure_peak("cpu", "fp32", seconds=0.05)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled()
    assert torch.get_float32_matmul_precision() == "medium"
    assert fp32_switches() == switches


def fp32_switches():
    """The switches of all backends; torch releases before 2.9 have only one."""
    found = [getattr(torch.backends.cuda.matmul, "fp32_precision", torch.get_float32_matmul_precision())]
    if hasattr(torch.backends.mkldnn, "matmul"):
        found.append(torch.backends.mkldnn.matmul.fp32_precision)
    return found


@pytest.mark.parametrize(("dtype", "while_measuring"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "tf32")])
def test_fp32_and_tf32_are_measured_as_such_whatever_is_allowed(restored_fp32_precision, dtype, while_measuring):
    torch.backends.cuda.matmul.allow_tf32 = True
    with plain_matmuls(torch.device("cuda"), dtype):
        names = {"highest": "ieee", "high": "tf32"}  # of releases before 2.9
        assert names.get(fp32_switches()[0], fp32_switches()[0]) == while_measuring
    assert torch.backends.cuda.matmul.allow_tf32 is True


def test_a_matmul_takes_two_flops_for_each_multiply_add():
    assert matmul_flops((2, 3, 5)) == 60

"""The peak of a CPU from what Linux prints about it, on machines written down in a folder."""

import pytest

from flopwatch.hardware.cpu import CpuFacts, peak_of_cpu, read_cpu

SAPPHIRE_RAPIDS = "fma avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8"


@pytest.fixture
def machine(tmp_path):
    """Writes a machine: 2 sockets x 2 cores x 2 hyper-threads unless told otherwise."""

    def write(flags="fma avx2", name="A CPU", sockets=2, cores=2, threads=2, files=(), **fields):
        blocks = []
        for number in range(sockets * cores * threads):
            core = number % (sockets * cores)
            shown = {"processor": number, "model name": name, "flags": flags, "cpu MHz": "2000.000"}
            shown |= {"physical id": core // cores, "core id": core % cores} | fields
            blocks.append("\n".join(f"{key}\t: {value}" for key, value in shown.items() if value is not None))
        contents = {"proc/cpuinfo": "\n\n".join(blocks) + "\n\n", "proc/self/cgroup": "0::/\n", **dict(files)}
        for path, text in contents.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return write


def read(root, usable=frozenset(range(64))):
    return read_cpu(root, set(usable))


def test_hyper_threads_do_not_count_as_cores(machine):
    assert read(machine()).core_count == 4


def test_only_cores_this_process_may_run_on_count(machine):
    # CPUs 0 and 4 are the two threads of one core, 1 is another core.
    assert read(machine(), usable={0, 4, 1}).core_count == 2


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 4),
        ({"sys/fs/cgroup/cpu.max": "900000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/pod/job/cpu.max": "max 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
    ],
)
def test_a_quota_of_the_control_group_limits_the_cores(machine, files, cores):
    assert read(machine(files=files.items())).core_count == cores


CLOCK_FILES = "sys/devices/system/cpu/cpu0/"


@pytest.mark.parametrize(
    ("files", "name", "clock_ghz"),
    [
        ({CLOCK_FILES + "cpufreq/base_frequency": "2700000\n"}, "A CPU @ 2.50GHz", 2.7),
        ({CLOCK_FILES + "acpi_cppc/nominal_freq": "2450\n"}, "A CPU", 2.45),
        ({CLOCK_FILES + "cpufreq/cpuinfo_max_freq": "3900000\n"}, "A CPU @ 2.50GHz", 2.5),
        ({}, "A CPU", 2.0),
    ],
)
def test_the_clock_is_one_that_all_cores_can_hold(machine, files, name, clock_ghz):
    assert read(machine(name=name, files=files.items())).clock_ghz == clock_ghz


@pytest.mark.parametrize(
    ("flags", "dtype", "flop_per_cycle"),
    [
        ("fma avx2", "fp32", 32),
        ("fma avx2", "fp64", 16),
        ("fma avx2 avx512f", "fp32", 64),
        (SAPPHIRE_RAPIDS, "bf16", 1024),
        (SAPPHIRE_RAPIDS, "int8", 2048),
        ("fma avx2 avx512f avx512_bf16", "bf16", 128),
    ],
)
def test_the_peak_is_cores_times_clock_times_flop_per_cycle(machine, flags, dtype, flop_per_cycle):
    peak = peak_of_cpu(read(machine(flags)), dtype)
    assert peak.flops_per_s == 4 * 2.0e9 * flop_per_cycle
    assert (peak.kind, peak.confidence) == ("derived", "low")
    assert f"4 cores x 2 GHz (current clock, /proc/cpuinfo) x {flop_per_cycle} FLOP per cycle" in peak.source


@pytest.mark.parametrize(
    ("flags", "fields", "flop_per_cycle"),
    [
        ("fma avx2 avx512f", {"vendor_id": "AuthenticAMD", "cpu family": 25, "model": 17}, 32),  # Zen 4
        ("fma avx2 avx512f", {"vendor_id": "AuthenticAMD", "cpu family": 26, "model": 2}, 64),  # Zen 5
        ("fma avx2", {"vendor_id": "AuthenticAMD", "cpu family": 25, "model": 1}, 32),  # Zen 3
        ("fma avx2", {"vendor_id": "AuthenticAMD", "cpu family": 23, "model": 1}, 16),  # Zen 1
        ("fma avx2 avx512f", {"vendor_id": "GenuineIntel", "cpu family": 6, "model": 140}, 32),  # Tiger Lake
        ("fma avx2 avx512f", {"vendor_id": "GenuineIntel", "cpu family": 6, "model": 143}, 64),  # Sapphire Rapids
        ("fma avx2 avx512f", {"name": "Intel(R) Xeon(R) Silver 4110 CPU @ 2.00GHz"}, 32),
        ("fma avx2 avx512f", {"name": "Intel(R) Xeon(R) Gold 6148 CPU @ 2.00GHz"}, 64),
    ],
)
def test_cores_with_narrow_units_get_half_the_rate(machine, flags, fields, flop_per_cycle):
    assert peak_of_cpu(read(machine(flags, **fields)), "fp32").flops_per_s == 4 * 2.0e9 * flop_per_cycle


def test_a_system_without_proc_is_unknown(tmp_path):
    assert read_cpu(tmp_path) == CpuFacts()
    assert "only Linux" in peak_of_cpu(read_cpu(tmp_path), "fp32").reason

"""What a host can still give is the least of what its machine and its groups can."""

import pytest

from flopwatch.sweep.host.environment import available_bytes, least_available, safe_limit_bytes

GIB = 1 << 30


@pytest.fixture
def meminfo(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {20 << 20} kB\n")
    return file


def make_group(folder, limit, used, droppable, *, version):
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    folder.mkdir(parents=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {droppable}\n")
    return folder


def test_a_machine_without_groups_gives_what_it_has(meminfo):
    assert least_available(meminfo, []) == 20 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_gives_less_and_its_old_cache_is_free(meminfo, tmp_path, version):
    group = make_group(tmp_path / "group", 8 * GIB, 5 * GIB, 2 * GIB, version=version)
    assert least_available(meminfo, [group]) == 5 * GIB


def test_the_limit_of_a_parent_holds_for_its_children(meminfo, tmp_path):
    make_group(tmp_path / "job", 4 * GIB, 1 * GIB, 0, version=2)
    step = make_group(tmp_path / "job" / "step", "max", 1 * GIB, 0, version=2)
    assert least_available(meminfo, [step]) == 3 * GIB


def test_a_group_without_a_limit_says_nothing(meminfo, tmp_path):
    group = make_group(tmp_path / "group", "max", 5 * GIB, 0, version=2)
    assert least_available(meminfo, [group]) == 20 * GIB


def test_a_full_group_has_nothing_left(meminfo, tmp_path):
    group = make_group(tmp_path / "group", GIB, 2 * GIB, 0, version=2)
    assert least_available(meminfo, [group]) == 0


def test_where_nobody_says_it_is_unknown(tmp_path):
    assert least_available(tmp_path / "none", []) is None


def test_this_host_says_something_below_what_it_has():
    with open("/proc/meminfo") as lines:
        total_bytes = int(next(lines).split()[1]) * 1024
    assert 0 < available_bytes() < total_bytes


def test_the_margin_is_a_tenth_but_never_less_than_half_a_gibibyte():
    assert safe_limit_bytes(100 * GIB) == 90 * GIB
    assert safe_limit_bytes(2 * GIB) == 2 * GIB - (512 << 20)
    assert safe_limit_bytes(1000) == 1

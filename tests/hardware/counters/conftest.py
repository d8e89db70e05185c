import os

import pytest

from testbeds import stand_in_nvml


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory):
    """Compiles the stand-in for the library of a driver version, once for each version."""
    if not stand_in_nvml.has_compiler:
        if os.environ.get("FLOPWATCH_REQUIRE_SERVERS") == "1":
            pytest.fail("gcc is needed: FLOPWATCH_REQUIRE_SERVERS is set")
        pytest.skip("the stand-in for NVIDIA's library needs a compiler: apt-get install gcc")
    pytest.importorskip("pynvml", reason='the real bindings: pip install "flopwatch[nvml]"')
    built = {}

    def library(driver=580):
        if driver not in built:
            built[driver] = stand_in_nvml.build(tmp_path_factory.mktemp(f"nvml-{driver}"), driver)
        return built[driver]

    return library


@pytest.fixture
def nvml(nvml_library):
    """The stand-in of a new driver, to which the real nvidia-ml-py is connected."""
    with stand_in_nvml.connected(nvml_library()) as stand_in:
        yield stand_in

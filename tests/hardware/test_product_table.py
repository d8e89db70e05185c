"""Which product a device name means. The names are what drivers report (see research/peaks.md, section 5)."""

import json
import re
from pathlib import Path

import pytest

from flopwatch.hardware.peaks import DTYPES, DeviceFacts, Unknown, find_accelerator, load_accelerators, similar_products

EXAMPLES = [
    (row["id"], example if isinstance(example, dict) else {"name": example})
    for row in json.loads(Path(__file__).with_name("device_names.json").read_text())
    for example in row["examples"]
]

# Each of these is close to a product in the table and is another one, or none at all.
NEAR_MISSES = [
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3080 Laptop GPU",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA GeForce RTX 3080 Ti Laptop GPU",
    "NVIDIA GeForce GTX 1080 Ti",
    "NVIDIA RTX A1000",
    "NVIDIA RTX A4000 Laptop GPU",
    "NVIDIA RTX A4000H",
    "NVIDIA RTX 6000D",
    "NVIDIA RTX PRO 4000 Blackwell SFF Edition",
    "NVIDIA T400",
    "NVIDIA T1000 8GB",
    "NVIDIA A10M",
    "NVIDIA L40G",
    "GRID A100-40C",
    "NVIDIA A100-40C",
    "Tesla P100-SXM2-16GB",
    "NVIDIA Vera Rubin",
    "AMD Instinct MI455X",
    "TPU v8",
    "Ascend310P3",
    "Ascend910",
    "Apple M10",
    "llvmpipe",
    "cpu",
    "",
]


def facts_of(example: dict) -> DeviceFacts:
    return DeviceFacts(
        example["name"],
        unit_count=example.get("sm_count"),
        memory_gib=example.get("memory_gib"),
        gcn_arch=example.get("gcn_arch"),
    )


def test_there_are_209_names_and_26_near_misses():
    assert len(EXAMPLES) == 209
    assert len(NEAR_MISSES) == 26


@pytest.mark.parametrize(("product_id", "example"), EXAMPLES, ids=lambda value: str(value))
def test_a_name_a_driver_reports_means_its_product(product_id, example):
    assert find_accelerator(facts_of(example)).id == product_id


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_means_nothing(name):
    assert isinstance(find_accelerator(DeviceFacts(name)), Unknown)


def test_an_rtx_a1000_is_not_an_a100():
    assert find_accelerator(DeviceFacts("NVIDIA A100-SXM4-80GB")).id == "a100-sxm4-80gb"
    assert isinstance(find_accelerator(DeviceFacts("NVIDIA RTX A1000")), Unknown)


@pytest.mark.parametrize(
    ("facts", "product_id"),
    [
        (DeviceFacts("NVIDIA H100 80GB HBM3", unit_count=132), "h100-sxm5-80gb"),
        (DeviceFacts("AMD Instinct MI250X/MI250", unit_count=110), "mi250x-gcd"),
        (DeviceFacts("AMD Instinct MI250X/MI250", unit_count=104), "mi250-gcd"),
        (DeviceFacts("Orin", unit_count=8, memory_gib=15.3), "jetson-orin-nx-16gb"),
        (DeviceFacts("Orin", unit_count=14, memory_gib=29.9), "jetson-agx-orin-32gb"),
        (DeviceFacts("NVIDIA GeForce RTX 3080", memory_gib=11.76), "rtx-3080-12gb"),
        (DeviceFacts("nvidia  a100-sxm4-80gb"), "a100-sxm4-80gb"),
    ],
)
def test_facts_tell_namesakes_apart(facts, product_id):
    assert find_accelerator(facts).id == product_id


def test_namesakes_without_facts_mean_the_one_marked_as_default():
    assert find_accelerator(DeviceFacts("NVIDIA GeForce RTX 3080")).id == "rtx-3080-10gb"


def test_namesakes_of_which_none_fits_the_facts_mean_nothing():
    answer = find_accelerator(DeviceFacts("Orin", unit_count=6, memory_gib=15.3))
    assert answer == Unknown("5 products in the table report the name 'Orin', but none of them has 6 units, 15.3 GiB")


def test_amds_generic_name_needs_architecture_units_and_memory():
    complete = DeviceFacts("AMD Radeon Graphics", unit_count=304, memory_gib=192.0, gcn_arch="gfx942:sramecc+:xnack-")
    without_memory = DeviceFacts("AMD Radeon Graphics", unit_count=304, gcn_arch="gfx942")
    assert find_accelerator(complete).id == "mi300x"
    assert isinstance(find_accelerator(without_memory), Unknown)


@pytest.mark.parametrize("record", load_accelerators(), ids=lambda record: record.id)
def test_a_record_is_complete(record):
    variants = {"fp64_tensor", "fp64_matrix", "fp32_matrix", "fp32_packed"}
    assert record.source
    assert record.confidence in ("high", "medium", "low")
    assert all(rate > 0 for rate in record.peak_tflops.values())
    assert set(record.peak_tflops) <= {*DTYPES, *variants}
    assert all(pattern.startswith("^") for pattern in record.match)


def test_no_two_records_share_an_id():
    ids = [record.id for record in load_accelerators()]
    assert len(ids) == len(set(ids)) == 163


@pytest.mark.parametrize(("product_id", "example"), EXAMPLES, ids=lambda value: str(value))
def test_the_shortcut_before_a_pattern_never_hides_it(product_id, example):
    record = next(record for record in load_accelerators() if record.id == product_id)
    name = example["name"]
    if any(re.search(pattern, name, re.IGNORECASE) for pattern in record.match):
        assert not record.contains or any(part in name.lower() for part in record.contains)


def test_similar_products_are_suggested_for_a_name_that_means_nothing():
    assert all("A100" in product for product in similar_products("NVIDIA A100"))
    assert "GeForce RTX 4090" in similar_products("4090")
    assert "Instinct MI300X" in similar_products("MI300")
    assert similar_products("llvmpipe") == []

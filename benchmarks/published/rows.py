"""Reads the published rows. A figure in brackets, which is that of another setting, is a second reading of its row."""

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

DATA = Path(__file__).with_name("data")

# Dense peaks in TFLOP/s that llm-foundry divides by: `GPU_AVAILABLE_FLOPS` in composer/callbacks/speed_monitor.py.
_FOUNDRY_PEAKS = {"a100": 312.0, "h100": 989.5}
_FP8 = 2.0
# Releases whose tokens per second are all multiples of this have rounded them.
_ROUNDED_TO = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement.

    Attributes:
        published: TFLOP/s per device, or an MFU in percent of `peak_tflops`; None if only tokens per second are given.
        half_digit: Half a unit of the last published digit.
        tokens_half: The same of the tokens per second.
        kind: What was trained, such as `pre-training` or `LoRA`.
        is_rounded: Whether the tokens per second are rounded to more than their last digit.
        is_repeated: Whether the row is in another file too.
    """

    source: str
    release: str
    model: str
    length: int
    hardware: str
    tokens_per_s: float | None
    published: float | None
    half_digit: float = 0.0
    tokens_half: float = 0.5
    peak_tflops: float | None = None
    kind: str = "pre-training"
    parameters: int | None = None
    is_rounded: bool = False
    is_repeated: bool = False
    readings: tuple[tuple[float, float], ...] = ()
    """Tokens per second and published figures of the row's other settings."""


def all_rows() -> list[Row]:
    return [*_bridge(), *_foundry(), *_picked(), *_more()]


def _table(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _numbers(text: str) -> list[float]:
    """The figure of a cell, and that in brackets if there is one, without footnotes.

    >>> _numbers("37556 (36108)"), _numbers("661[^gpt-oss-note]")
    ([37556.0, 36108.0], [661.0])
    """
    return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,.]*", re.sub(r"\[\^[^\]]*\]", "", text))]


def _half_digit(text: str) -> float:
    """Half a unit of the last digit.

    >>> _half_digit("38.55"), _half_digit("1933")
    (0.005, 0.5)
    """
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


def _bridge() -> Iterator[Row]:
    found = defaultdict[str, list[Row]](list)
    for line in _table("megatron-bridge-rows.csv"):
        rates, figures = _numbers(line["Tokens / sec / GPU"]), _numbers(line["Model TFLOP / sec / GPU"])
        row = Row(
            "Megatron-Bridge",
            line["_rel"],
            line["_model"],
            int(line["Sequence Length"]),
            f"{line['#-GPUs']} {line['System']} {line['Precision']}".strip(),
            rates[0],
            figures[0],
            half_digit=0.5,
            kind=line["_sec"].removesuffix(" Performance").lower(),
            readings=tuple(zip(rates[1:], figures[1:], strict=False)),
        )
        found[row.release].append(row)
    for rows in found.values():
        is_rounded = all((row.tokens_per_s or 1) % _ROUNDED_TO == 0 for row in rows)
        yield from (replace(row, is_rounded=is_rounded) for row in rows)


def _foundry() -> Iterator[Row]:
    for line in _table("llm-foundry-rows.csv"):
        devices = int(line["# GPUs"])
        peak = _FOUNDRY_PEAKS[line["GPU"].partition("_")[0]] * (_FP8 if line["Precision"] == "amp_fp8" else 1)
        yield Row(
            "llm-foundry",
            "README",
            f"MPT {line['Model']}",
            int(line["SeqLen (T)"]),
            f"{devices} {line['GPU']} {line['Precision']}",
            int(line["Throughput (T/s)"]) / devices,
            float(line["MFU"]),
            half_digit=0.005,
            tokens_half=0.5 / devices,
            peak_tflops=peak,
            parameters=int(line["NumParams"]),
        )


_PICKED = {"8b": "LLAMA3_8B", "70b": "LLAMA3_70B", "405b": "LLAMA3.1_405B", "q30": "Qwen3_30B_a3B"}
_PICKED |= {"q235": "Qwen3_235B_a22B", "ds": "DeepSeekV3 (w/o MTP)"}


_ONLY_HERE = "H100 8B FSDP"
"""A row of the study that `more-rows.csv` does not have: torchtitan's 33 % belongs to another row of its page."""


def _picked() -> Iterator[Row]:
    for line in _table("published-rows.csv"):
        model, _, length = line["model_at_length_and_attention(c=causal f=full)"].partition("@")
        source, said = line["source_and_row"].split(" ", 1)
        is_bridge = source == "Bridge"
        yield Row(
            "Megatron-Bridge" if is_bridge else source,
            said.split(" ")[0] if is_bridge else "",
            _PICKED[model],
            int(length[:-1]),
            said,
            float(line["tokens_per_s_per_gpu"]),
            float(line["published_tflops_per_s_per_gpu"]),
            half_digit=0.5 if is_bridge or source == "Automodel" else _half_digit_of_percent(said),
            tokens_half=_half_digit(line["tokens_per_s_per_gpu"]),
            kind="sft" if "SFT" in said else "pre-training",
            is_repeated=not said.startswith(_ONLY_HERE),
        )


def _half_digit_of_percent(said: str) -> float:
    """Half a digit of an MFU that was converted to TFLOP/s, by the peak of the row's device."""
    peak = 918 if "v6e" in said else 989
    return peak / 100 * (0.005 if "v6e" in said else 0.5)


def _more() -> Iterator[Row]:
    for line in _table("more-rows.csv"):
        rate, figure = line["tokens_per_s_per_gpu"], line["published"]
        yield Row(
            line["source"],
            "",
            line["model"],
            int(line["length"]),
            f"{line['gpus']} devices, {line['where']}",
            float(rate) if rate else None,
            float(figure) if figure else None,
            half_digit=_half_digit(figure),
            tokens_half=_half_digit(rate),
            peak_tflops=float(line["peak_tflops"]) if line["unit"] == "MFU %" else None,
            kind=line["kind"].lower() if line["kind"] == "LoRA" else line["kind"],
        )


def by_source(rows: list[Row]) -> Mapping[str, list[Row]]:
    found = defaultdict[str, list[Row]](list)
    for row in rows:
        found[row.source].append(row)
    return found

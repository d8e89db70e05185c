"""Draws the pictures of docs/architecture.md as SVG, on a background of their own, so that they read on dark pages too.

python benchmarks/pages/drawings.py
"""

from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
_WIDTH = 860
_FONT = "font-family='Helvetica, Arial, sans-serif'"
_FILLS = {"user": "#fde9d0", "ours": "#dbe9fb", "file": "#e3f2e1", "plain": "#eeeeee"}


class Box(NamedTuple):
    """A rectangle with lines of text: the first is bold."""

    x: int
    y: int
    width: int
    height: int
    lines: tuple[str, ...]
    kind: str = "ours"


class Arrow(NamedTuple):
    """A straight arrow with a label beside its middle."""

    start: tuple[int, int]
    end: tuple[int, int]
    label: str = ""
    dashed: bool = False


def drawing(boxes: list[Box], arrows: list[Arrow], height: int) -> str:
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' height='{height}'>",
        "<defs><marker id='head' markerWidth='9' markerHeight='8' refX='8' refY='4' orient='auto'>"
        "<path d='M0,0 L9,4 L0,8 z' fill='#444'/></marker></defs>",
        f"<rect width='{_WIDTH}' height='{height}' rx='8' fill='#ffffff'/>",
        *map(_arrow, arrows),
        *map(_box, boxes),
        *map(_label, arrows),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _box(box: Box) -> str:
    frame = f"<rect x='{box.x}' y='{box.y}' width='{box.width}' height='{box.height}' rx='6' fill='{_FILLS[box.kind]}' "
    middle, top = box.x + box.width / 2, box.y + box.height / 2 - 9 * (len(box.lines) - 1) + 5
    texts = [
        f"<text x='{middle:g}' y='{top + 18 * index:g}' text-anchor='middle' font-size='{14 if index == 0 else 12.5}' "
        f"{_FONT} font-weight='{'bold' if index == 0 else 'normal'}' fill='#222'>{escape(line)}</text>"
        for index, line in enumerate(box.lines)
    ]
    return "\n".join([frame + "stroke='#667' stroke-width='1'/>", *texts])


def _arrow(arrow: Arrow) -> str:
    (x1, y1), (x2, y2) = arrow.start, arrow.end
    dashes = " stroke-dasharray='5 4'" if arrow.dashed else ""
    ends = f"x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}'"
    return f"<line {ends} stroke='#444' stroke-width='1.4'{dashes} marker-end='url(#head)'/>"


def _label(arrow: Arrow) -> str:
    if not arrow.label:
        return ""
    x, y = (arrow.start[0] + arrow.end[0]) / 2, (arrow.start[1] + arrow.end[1]) / 2
    is_level = arrow.start[1] == arrow.end[1]
    is_slanted = not is_level and arrow.start[0] != arrow.end[0]
    aside = 24 if is_slanted else 8
    place = f"x='{x:g}' y='{y - 7:g}' text-anchor='middle'" if is_level else f"x='{x + aside:g}' y='{y + 4:g}'"
    return f"<text {place} font-size='12' {_FONT} fill='#444'>{escape(arrow.label)}</text>"


def step() -> str:
    top = [
        Box(20, 40, 170, 80, ("your loop", "model(batch), backward,", "optimizer.step()"), "user"),
        Box(260, 40, 170, 80, ("record", "events, shapes, calls", "of modules")),
        Box(260, 190, 170, 80, ("divide, arrive", "times of steps, values", "from the device")),
        Box(480, 190, 160, 80, ("cost", "FLOPs of each step,", "exact or not")),
        Box(680, 190, 160, 80, ("totals, row", "sums, metrics,", "percentiles")),
        Box(480, 40, 160, 80, ("count", "some steps, op by op,", "as they run")),
        Box(680, 340, 160, 80, ("sinks", "one queue and one", "thread each")),
        Box(260, 340, 170, 80, ("training_log.jsonl", "watch, explain,", "compare"), "file"),
        Box(480, 340, 160, 80, ("elsewhere", "TensorBoard, W&B,", "MLflow, Prometheus"), "file"),
    ]
    arrows = [
        Arrow((190, 80), (258, 80), "each step"),
        Arrow((430, 80), (478, 80)),
        Arrow((345, 120), (345, 188), "once per window"),
        Arrow((430, 230), (478, 230)),
        Arrow((640, 230), (678, 230)),
        Arrow((560, 120), (560, 188)),
        Arrow((760, 270), (760, 338)),
        Arrow((680, 380), (642, 380)),
        Arrow((345, 438), (345, 422)),
    ]
    # The sinks' way to the log passes below the other places.
    detour = "<path d='M760,420 V438 H345' fill='none' stroke='#444' stroke-width='1.4'/>"
    return drawing(top, arrows, 456).replace("</svg>", f"{detour}\n</svg>")


def layers() -> str:
    rows = [
        [("cli", "the commands")],
        [("automatic", "flopwatch run and flopwatch.watch()")],
        [("integrations", "frameworks"), ("mfu", "MFU of one step"), ("sweep", "trials"), ("report", "their results")],
        [("monitor", "a live training")],
        [("flops", "FLOPs of a step"), ("hardware", "peak of a device"), ("sinks", "where rows go")],
        [("models", "models by name"), ("runs", "a run's log, read back")],
        [("records", "the values that packages exchange and store")],
    ]
    boxes, y = [], 20
    for row in rows:
        width = (_WIDTH - 40 - 20 * (len(row) - 1)) // len(row)
        boxes += [Box(20 + index * (width + 20), y, width, 50, lines) for index, lines in enumerate(row)]
        y += 76
    arrows = [Arrow((_WIDTH // 2, 70 + 76 * level), (_WIDTH // 2, 94 + 76 * level)) for level in range(len(rows) - 1)]
    return drawing(boxes, arrows, y)


def sweep() -> str:
    boxes = [
        Box(20, 150, 170, 80, ("runner", "flopwatch sweep:", "plans, submits, retries")),
        Box(250, 150, 150, 80, ("engine", "this machine,", "Ray or Slurm")),
        Box(460, 40, 160, 80, ("guard", "kills what is left if", "the supervisor dies")),
        Box(460, 190, 160, 80, ("supervisor", "heartbeat, limits,", "outcome by evidence")),
        Box(680, 190, 160, 80, ("worker", "one trial: build,", "warm up, measure"), "user"),
        Box(460, 330, 160, 60, ("result.json", "log, stacks, trace"), "file"),
        Box(20, 330, 170, 60, ("report", "compare, fit")),
    ]
    arrows = [
        Arrow((190, 190), (248, 190), "trial"),
        Arrow((400, 190), (458, 100)),
        Arrow((540, 120), (540, 188), "starts"),
        Arrow((620, 230), (678, 230), "starts"),
        Arrow((540, 270), (540, 328), "writes"),
        Arrow((460, 360), (192, 360), "reads", dashed=True),
    ]
    return drawing(boxes, arrows, 420)


def ranks() -> str:
    boxes = [
        Box(300, 30, 260, 66, ("rank 0, the logging rank", "adds up, writes the row")),
        Box(60, 170, 170, 60, ("rank 1", "host A")),
        Box(250, 170, 170, 60, ("rank 2", "host A")),
        Box(540, 170, 200, 60, ("rank 3", "first rank of host B")),
        Box(440, 300, 170, 60, ("rank 4", "host B")),
        Box(640, 300, 170, 60, ("rank 5", "host B")),
        Box(20, 33, 180, 60, ("training_log.jsonl", "one row for the job"), "file"),
    ]
    arrows = [
        Arrow((160, 170), (350, 98)),
        Arrow((335, 170), (410, 98), "500 bytes per window"),
        Arrow((640, 170), (510, 98), "through the job's store"),
        Arrow((525, 300), (610, 232)),
        Arrow((725, 300), (680, 232)),
        Arrow((300, 63), (202, 63)),
    ]
    return drawing(boxes, arrows, 390)


DRAWINGS = {"flow-step": step, "flow-layers": layers, "flow-sweep": sweep, "flow-ranks": ranks}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(PICTURES / f"{name}.svg")

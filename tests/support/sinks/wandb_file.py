"""Reads W&B's offline file. The package has no public reader for it.

The file is a LevelDB log under a header of W&B's own: blocks of 32 KiB, in them chunks of (crc32, length, kind), where
the kind says whether a chunk is a whole record or its first, a middle or the last piece. Each record is a protobuf.
"""

import json
import struct
import zlib

HEADER = struct.Struct("<4sHB")
CHUNK = struct.Struct("<IHB")
BLOCK_BYTES = 32 * 1024
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def find_file(folder):
    """The one offline file below `folder`."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return path


def read_records(path):
    """All records in order; a tail torn by a crash is left out, a wrong checksum is an error."""
    from wandb.proto import wandb_internal_pb2

    for content in _contents(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        yield record


def read_kind(path, kind):
    """The records of one kind: `run`, `history`, `summary`, `output`, ..."""
    return [record for record in read_records(path) if record.WhichOneof("record_type") == kind]


def read_history(path):
    """Each `run.log` as a dict."""
    return [_values(record.history.item) for record in read_kind(path, "history")]


def read_config(path):
    config = {}
    for record in read_records(path):
        kind = record.WhichOneof("record_type")
        if kind in ("run", "config"):
            updates = record.run.config.update if kind == "run" else record.config.update
            config.update(_values(updates))
    return config


def read_summary(path):
    summary = {}
    for record in read_kind(path, "summary"):
        summary.update(_values(record.summary.update))
    return summary


def read_step_metrics(path):
    """Which key is drawn over which."""
    return {record.metric.name: record.metric.step_metric for record in read_kind(path, "metric")}


def read_exit_code(path):
    """What W&B was told at the end; None for a run that was not finished."""
    codes = [record.exit.exit_code for record in read_kind(path, "exit")]
    return codes[-1] if codes else None


def _values(items):
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _contents(file):
    identity, magic, _version = HEADER.unpack_from(file)
    assert (identity, magic) == (b":W&B", 0xBEE1), f"no W&B file: it starts with {file[:7]!r}"
    position = HEADER.size
    pieces = b""
    while position + CHUNK.size <= len(file):
        room = BLOCK_BYTES - position % BLOCK_BYTES
        if room < CHUNK.size:  # too little left of this block for a chunk: filled up with zeros
            position += room
            continue
        checksum, length, kind = CHUNK.unpack_from(file, position)
        content = file[position + CHUNK.size : position + CHUNK.size + length]
        if len(content) < length:
            return
        assert zlib.crc32(bytes([kind]) + content) == checksum, f"wrong checksum at byte {position}"
        position += CHUNK.size + length
        pieces = content if kind in (WHOLE, FIRST) else pieces + content
        if kind in (WHOLE, LAST):
            yield pieces

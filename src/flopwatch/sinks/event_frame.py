"""The frame of an event in TensorBoard's file: length, checksum, content, checksum.

TensorBoard's own writer computes the checksum (CRC-32C) byte by byte in Python, 0.3 ms for a row of 35 values: most of
what a row would cost. The checksum is linear, so numpy, which TensorBoard needs anyway, looks up all bytes at once.
"""

import struct
from functools import cache, lru_cache
from typing import Any

from flopwatch.optional import require

_POLYNOMIAL = 0x82F63B78
_BLOCK_BYTES = 2048


def frame_event(content: bytes) -> bytes:
    """A serialised event as it stands in the file."""
    return b"".join((_head(len(content)), content, _masked_checksum(content)))


@lru_cache(maxsize=256)
def _head(size: int) -> bytes:
    """Rows with the same keys have the same few lengths."""
    length = struct.pack("<Q", size)
    return length + _masked_checksum(length)


def crc32c(content: bytes) -> int:
    """The Castagnoli checksum.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    numpy = require("numpy", "tensorboard")
    table = _table()
    state = 0xFFFFFFFF
    # The state goes into the first four bytes of the next block; zeros behind the end stand in where there are fewer.
    for start in range(0, len(content), _BLOCK_BYTES):
        block = content[start : start + _BLOCK_BYTES]
        size = len(block)
        mixed = numpy.frombuffer(block.ljust(4, b"\0"), numpy.uint8).copy()
        mixed[:4] ^= numpy.frombuffer(struct.pack("<I", state), numpy.uint8)
        carried = state >> (8 * size) if size < 4 else 0
        state = int(numpy.bitwise_xor.reduce(table[numpy.arange(size - 1, -1, -1), mixed[:size]])) ^ carried
    return state ^ 0xFFFFFFFF


@cache
def _table() -> Any:
    """Row k: what a byte adds to the checksum when k more bytes follow it in its block."""
    numpy = require("numpy", "tensorboard")
    row = numpy.arange(256, dtype=numpy.uint32)
    for _ in range(8):
        row = (row >> 1) ^ numpy.where(row & 1, numpy.uint32(_POLYNOMIAL), numpy.uint32(0))
    table = numpy.empty((_BLOCK_BYTES, 256), numpy.uint32)
    table[0] = row
    for followers in range(1, _BLOCK_BYTES):
        table[followers] = row[table[followers - 1] & 0xFF] ^ (table[followers - 1] >> 8)
    return table


def _masked_checksum(content: bytes) -> bytes:
    """Turned and shifted, as the format wants it, so that a checksum of checksums stays a good one."""
    checksum = crc32c(content)
    turned = (checksum >> 15) | (checksum << 17)
    return struct.pack("<I", (turned + 0xA282EAD8) & 0xFFFFFFFF)

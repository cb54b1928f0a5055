"""The file that W&B keeps of a run on this machine, as far as a killed run got: its records, still packed.

The format is that of LevelDB's log: after a header of 7 bytes, blocks of 32 KiB hold pieces, each with a head of 7 bytes
(checksum, length, and whether it is a whole record, or the first, a middle or the last piece of one).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

HEADER, BLOCK = 7, 32 * 1024
PIECE = struct.Struct("<IHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def packed_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file; the one at which it is torn, and what follows, are left out."""
    data, begun = path.read_bytes(), b""
    for kind, piece in _pieces(data):
        begun = piece if kind in (WHOLE, FIRST) else begun + piece
        if kind in (WHOLE, LAST):
            yield begun


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = HEADER
    while at + PIECE.size <= len(data):
        if BLOCK - at % BLOCK < PIECE.size:  # no room for a head: the block is filled up
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = PIECE.unpack_from(data, at)
        at += PIECE.size
        if kind not in (WHOLE, FIRST, MIDDLE, LAST) or at + length > len(data):
            return
        yield kind, data[at : at + length]
        at += length

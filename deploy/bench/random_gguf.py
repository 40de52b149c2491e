"""A model of any size with random weights, as a GGUF file: nonsense, but as heavy as a real one.

The shape is that of Llama, weights are 16-bit floats, and the tokenizer comes from another GGUF file. Needs nothing but Python.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_MAGIC, _VERSION = b"GGUF", 3
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_U32, _F32, _STRING, _ARRAY = 4, 6, 8, 9
_TYPE_F32, _TYPE_F16 = 0, 1
_ALIGNMENT = 32
_HEAD_DIM, _KV_HEADS = 64, 4
_CHUNK = 1 << 20
# A half's high byte: its sign and two bits of its fraction stay random, its exponent becomes 2^-7 or 2^-6.
_TAMED = bytes(byte & 0x87 | 0x20 for byte in range(256))


def write(target: Path, tokenizer: Path, *, gigabytes: float) -> None:
    """Write a model of about so many gigabytes, at least one.

    Args:
        tokenizer: the GGUF file whose tokenizer it gets.
    """
    kept, tokens = _tokenizer(tokenizer)
    width, inner = 2048, 5632
    layer = 2 * width * width + 2 * width * _KV_HEADS * _HEAD_DIM + 3 * width * inner
    layers = max(1, round((gigabytes * 1e9 / 2 - tokens * width) / layer))
    heads = width // _HEAD_DIM
    numbers = {
        "context_length": 8192, "embedding_length": width, "block_count": layers, "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": _KV_HEADS,
        "rope.dimension_count": _HEAD_DIM, "vocab_size": tokens,
    }  # fmt: skip
    settings = [_pair("general.architecture", _STRING, _text("llama")), _pair("general.name", _STRING, _text("random"))]
    settings += [_pair(f"llama.{name}", _U32, struct.pack("<I", value)) for name, value in numbers.items()]
    settings.append(_pair("llama.attention.layer_norm_rms_epsilon", _F32, struct.pack("<f", 1e-5)))
    tensors = list(_tensors(width, inner, layers, tokens))
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(_MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(settings) + len(kept)))
        file.writelines([*settings, *kept])
        offset = 0
        for name, shape, kind in tensors:
            file.write(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset))
            offset += _padded(_bytes(shape, kind))
        file.write(bytes(_padded(file.tell()) - file.tell()))
        for _, shape, kind in tensors:
            _fill(file, _bytes(shape, kind), kind)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)


def _tensors(width: int, inner: int, layers: int, tokens: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape (the fastest dimension first) and type of each."""
    keys = _KV_HEADS * _HEAD_DIM
    yield "token_embd.weight", (width, tokens), _TYPE_F16
    yield "output_norm.weight", (width,), _TYPE_F32
    for number in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            yield f"blk.{number}.{norm}.weight", (width,), _TYPE_F32
        for name, shape in {
            "attn_q": (width, width), "attn_k": (width, keys), "attn_v": (width, keys), "attn_output": (width, width),
            "ffn_gate": (width, inner), "ffn_up": (width, inner), "ffn_down": (inner, width),
        }.items():  # fmt: skip
            yield f"blk.{number}.{name}.weight", shape, _TYPE_F16


def _fill(file: BinaryIO, size: int, kind: int) -> None:
    if kind == _TYPE_F32:
        file.write(struct.pack("<f", 1.0) * (size // 4))
    else:
        left = size
        while left:
            count = min(left, _CHUNK)
            halves = bytearray(os.urandom(count))
            halves[1::2] = halves[1::2].translate(_TAMED)
            file.write(halves)
            left -= count
    file.write(bytes(_padded(size) - size))


def _bytes(shape: tuple[int, ...], kind: int) -> int:
    count = 4 if kind == _TYPE_F32 else 2
    for length in shape:
        count *= length
    return count


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _tokenizer(path: Path) -> tuple[list[bytes], int]:
    """(the settings of a file's tokenizer as they stand there, the number of its tokens)."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise OSError(f"{path} is no GGUF file")
        _, _, count = struct.unpack("<IQQ", file.read(20))
        kept, tokens = [], 0
        for _ in range(count):
            begun = file.tell()
            key = file.read(*struct.unpack("<Q", file.read(8)))
            (kind,) = struct.unpack("<I", file.read(4))
            length = _skip(file, kind)
            if key.startswith(b"tokenizer."):
                ended = file.tell()
                file.seek(begun)
                kept.append(file.read(ended - begun))
                if key == b"tokenizer.ggml.tokens":
                    tokens = length
    if not tokens:
        raise OSError(f"{path} has no tokenizer")
    return kept, tokens


def _skip(file: BinaryIO, kind: int) -> int:
    """Pass over one value; the length of an array."""
    if kind == _STRING:
        file.seek(struct.unpack("<Q", file.read(8))[0], os.SEEK_CUR)
    elif kind == _ARRAY:
        inner, length = struct.unpack("<IQ", file.read(12))
        for _ in range(length):
            _skip(file, inner)
        return int(length)
    else:
        file.seek(_SIZES[kind], os.SEEK_CUR)
    return 1

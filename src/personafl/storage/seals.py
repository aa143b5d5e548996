"""Checksums in files that are read back: a bit that was flipped since is an error, and never another number.

A safetensors file has it in the metadata of its header, a JSON object as its last key. Files of older versions have
none, and are taken as they are.
"""

import json
import re
import zlib
from pathlib import Path
from typing import Any

from personafl.errors import BadInput

_KEY, _NONE = "crc32", "0" * 8
_SEAL = re.compile(rb'"crc32":"([0-9a-f]{8})"')  # within a string of JSON its quotes would have backslashes
_LAST = b'"crc": '


def sealed(data: bytes) -> tuple[bytes, memoryview]:
    """Return the bytes of a safetensors file with its checksum in them, in two parts; nothing stays nothing."""
    if not data:
        return b"", memoryview(b"")
    length = int.from_bytes(data[:8], "little")
    entries: dict[str, Any] = json.loads(data[8 : 8 + length])
    about = {**entries.pop("__metadata__", {}), _KEY: _NONE}
    header = json.dumps({"__metadata__": about, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    head, body = len(header).to_bytes(8, "little") + header, memoryview(data)[8 + length :]
    found = _SEAL.search(head)
    assert found is not None
    crc = zlib.crc32(body, zlib.crc32(head))
    return b"%b%08x%b" % (head[: found.start(1)], crc, head[found.end(1) :]), body


def is_sealed(data: bytes) -> bool:
    """Say whether a safetensors file has a checksum; fail with a ValueError if it is another than its bytes have."""
    head, body = data[: 8 + int.from_bytes(data[:8], "little")], memoryview(data)
    found = _SEAL.search(head)
    if found is None:
        return False
    crc = zlib.crc32(_NONE.encode(), zlib.crc32(body[: found.start(1)]))
    if zlib.crc32(body[found.end(1) :], crc) != int(found.group(1), 16):
        raise ValueError("its checksum is another")
    return True


def read_sealed(path: Path, remedy: str) -> bytes:
    """Return the bytes of a safetensors file that may have a checksum, if it is right."""
    try:
        data = path.read_bytes()
        is_sealed(data)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise BadInput(f"{path}: was damaged since it was written; {remedy}") from error
    return data


def sealed_json(text: str, name: str) -> bytes:
    """Return the text of a JSON object with a checksum, of the file's name too, as its last key; a list has none."""
    if not text.rstrip().endswith("}"):
        return text.encode()
    head = text.rstrip().removesuffix("}").rstrip().encode()
    head += b"\n" if head.endswith(b"{") else b",\n"
    return b"%b%b%d\n}\n" % (head, _LAST, zlib.crc32(head, zlib.crc32(name.encode())))


def opened_json(data: bytes, name: str) -> Any:
    """Return what JSON says that may have a checksum; fail with a ValueError if it is no JSON, or has another."""
    value = json.loads(data)
    if isinstance(value, dict) and (told := value.pop("crc", None)) is not None:
        head = data.rpartition(_LAST)[0]
        if told != zlib.crc32(head, zlib.crc32(name.encode())):
            raise ValueError("it was damaged since it was written: its checksum is another")
    return value

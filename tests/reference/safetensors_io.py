"""Reads and writes the safetensors file format: u64 length of a JSON header, the header, then the tensors' bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

_DTYPES = {"F64": np.float64, "F32": np.float32, "I64": np.int64, "I32": np.int32}


def save(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    names = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    # Wide elements are first, as in files of the common writer, so that every tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    for name, array in ordered:
        end = offset + array.nbytes
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in ordered:
            file.write(np.ascontiguousarray(array).tobytes())


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    data = Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata

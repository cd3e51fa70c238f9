"""Makes golden files of MXFP8 from the results of PyTorch, ml_dtypes and TorchAO for numbers and for blocks of 32.

Writes to tests/golden/mx/ (all numbers little-endian, all files gzip):

  bytes.gz         the values of bytes: 256 float32 each for E4M3, E5M2 and E8M0; NaN is 0x7FC00000
  bfloat16.gz      the columns described below, of the bfloat16 numbers 0x0000 to 0xFFFF in this order
  float32.gz       uint32 n, n float32, the columns of these
  blocks.gz        uint32 n, n · 32 float32; then for E4M3, E5M2, for floor, rceil, ceil, even: n scale bytes, n · 32
                   elements
  scale_layout.gz  per case: uint32 rows, uint32 blocks, rows · blocks scale bytes, these in TorchAO's blocked layout

Columns: a number's cast to E4M3 and to E5M2; then for E4M3, E5M2, for floor, rceil, ceil, even: the scale byte of the
block of this number and 31 zeros, and the number's element in it. Each column is n bytes.

PyTorch casts the clamped number, and ml_dtypes must give the same bytes. Any NaN of theirs is stored as 0x7F, which is
Tessera's only NaN. TorchAO's `to_mx` quantizes blocks, in eager mode on the CPU. Its results differ from Tessera's
definition (docs/mxfp8.md) in three kinds of blocks. The rules here recognize them from the input and TorchAO's own
intermediate numbers, and not from Tessera's results. For these blocks only, the file holds the definition's results,
computed in float64 with NumPy and cast by ml_dtypes:

  1. A block with NaN or infinity. TorchAO gives 0xFF only for NaN, treats infinity as a number of exponent 128, and
     casts the block's other numbers with such a scale. By definition the scale is 0xFF and all elements are NaN.
  2. The elements of a block whose scale byte is 0. TorchAO multiplies by 2^126, and with rceil by 1, although the scale
     2^-127 requires 2^127. (The scale byte agrees.)
  3. With rceil, a block whose amax / 448 is above a power of two while float32 rounds its logarithm down to the
     power's. TorchAO takes the ceiling of that logarithm, so its scale is too small by one power.

Everywhere else the script requires that TorchAO and the definition agree. The same versions (torch 2.15.0,
torchao 0.18.0, ml_dtypes 0.6.0) give the same files.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.utils import to_blocked

OUTPUT = Path(__file__).parent.parent / "golden" / "mx"
BLOCK = 32
MODES = ("floor", "rceil", "ceil", "even")


class Element:
    def __init__(self, torch_dtype: torch.dtype, numpy_dtype: type, mantissa_bits: int, max_exponent: int):
        self.torch_dtype = torch_dtype
        self.numpy_dtype = numpy_dtype
        self.mantissa_bits = mantissa_bits
        self.max_exponent = max_exponent
        self.largest = torch.finfo(torch_dtype).max


ELEMENTS = (
    Element(torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, 3, 8),
    Element(torch.float8_e5m2, ml_dtypes.float8_e5m2, 2, 15),
)


def write(name: str, content: bytes) -> None:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with open(OUTPUT / name, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as zipped:
        zipped.write(content)
    print(f"{name}: {(OUTPUT / name).stat().st_size} bytes")


def floats(patterns) -> np.ndarray:
    return np.asarray(patterns, dtype=np.uint32).view(np.float32)


def cast(x: np.ndarray, element: Element) -> np.ndarray:
    """Returns the bytes of float64 or float32 numbers. ml_dtypes casts them, and they saturate."""
    nan = np.isnan(x)
    clipped = np.clip(np.where(nan, 0, x), -element.largest, element.largest)
    return np.where(nan, 0x7F, clipped.astype(element.numpy_dtype).view(np.uint8)).astype(np.uint8)


def cast_by_both(x: np.ndarray, element: Element) -> np.ndarray:
    clamped = torch.from_numpy(x).clamp(-element.largest, element.largest)
    codes = clamped.to(element.torch_dtype).view(torch.uint8).numpy()
    codes = np.where(np.isnan(x), 0x7F, codes).astype(np.uint8)
    np.testing.assert_array_equal(codes, cast(x, element))
    return codes


def definition(blocks: np.ndarray, element: Element, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales and elements by the definition in docs/mxfp8.md."""
    finite = np.isfinite(blocks).all(axis=1)
    wide = np.where(finite[:, None], blocks, 0).astype(np.float64)
    amax = np.abs(wide).max(axis=1)
    if mode == "rceil":
        # A product of two float32 is exact in float64; it is rounded to float32 once.
        amax = (amax * np.float64(np.float32(1 / element.largest))).astype(np.float32).astype(np.float64)
    fraction, exponent = np.frexp(amax)  # amax = fraction · 2^exponent, 0.5 <= fraction < 1
    exponent = exponent - 1
    if mode in ("rceil", "ceil"):
        exponent = exponent + (fraction != 0.5)
    if mode == "even":
        rounded = np.rint(np.ldexp(fraction, element.mantissa_bits + 1))
        exponent = exponent + (rounded == 2 ** (element.mantissa_bits + 1))
    scale = exponent + 127 - (0 if mode == "rceil" else element.max_exponent)
    scale = np.where(amax == 0, 0, np.maximum(scale, 0))
    data = cast(np.ldexp(wide, (127 - scale)[:, None]), element)
    data[~finite] = 0x7F
    return np.where(finite, scale, 0xFF).astype(np.uint8), data


def logarithm_is_too_small(blocks: np.ndarray, element: Element) -> np.ndarray:
    """Returns the blocks to which rule 3 applies."""
    ratio = torch.from_numpy(np.abs(blocks).max(axis=1)) / element.largest
    power = np.exp2(torch.log2(ratio).numpy().astype(np.float64))
    return (np.frexp(power)[0] == 0.5) & (ratio.numpy() > power)


def quantize(blocks: np.ndarray, element: Element, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales [n] and elements [n, 32] of float32 blocks [n, 32]."""
    scale, data = to_mx(torch.from_numpy(blocks), element.torch_dtype, BLOCK, ScaleCalculationMode(mode))
    scale, data = scale.view(torch.uint8).numpy().reshape(-1).copy(), data.view(torch.uint8).numpy().copy()
    expected_scale, expected_data = definition(blocks, element, mode)

    not_finite = ~np.isfinite(blocks).all(axis=1)
    rounded = logarithm_is_too_small(blocks, element) & ~not_finite
    if mode != "rceil":
        rounded[:] = False
    by_definition = not_finite | rounded
    scale[by_definition] = expected_scale[by_definition]
    zero_scale = (scale == 0) & ~by_definition
    data_by_definition = by_definition | zero_scale
    data[data_by_definition] = expected_data[data_by_definition]
    print(
        f"  {len(blocks)} blocks, {element.numpy_dtype.__name__}, {mode}: by definition"
        f" {not_finite.sum()} with NaN or infinity, {rounded.sum()} by the logarithm, elements of {zero_scale.sum()}"
    )
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(data, expected_data)
    return scale, data


def columns(x: np.ndarray) -> bytes:
    parts = [cast_by_both(x, element) for element in ELEMENTS]
    blocks = np.zeros((len(x), BLOCK), np.float32)
    blocks[:, 0] = x
    for element in ELEMENTS:
        for mode in MODES:
            scale, data = quantize(blocks, element, mode)
            parts += [scale, data[:, 0]]
    return b"".join(part.astype(np.uint8).tobytes() for part in parts)


def adversarial_numbers() -> np.ndarray:
    """Returns the neighbourhoods of all numbers at which a cast or a scale changes, with both signs."""
    magnitudes: set[int] = set()

    def around(value: float, reach: int) -> None:
        pattern = int(np.float32(value).view(np.uint32))
        magnitudes.update(p for p in range(pattern - reach, pattern + reach + 1) if 0 <= p < 0x7F800000)

    for exponent in range(-149, 128):
        # 1.75 is in the largest elements, and the others matter for "even".
        for significand in (1.0, 1.75, 1.875, 1.9375):
            around(np.ldexp(significand, exponent), 2)
    for element in ELEMENTS:
        values = np.arange(256, dtype=np.uint8).view(element.numpy_dtype).astype(np.float64)
        values = np.unique(np.abs(values[np.isfinite(values)]))
        for place in [*values, *((values[1:] + values[:-1]) / 2), element.largest * 29 / 28, element.largest * 2]:
            around(place, 1)
    magnitudes.update([0, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
    patterns = sorted(magnitudes)
    return floats(patterns + [p | 0x80000000 for p in patterns])


def random_blocks(rng: np.random.Generator) -> np.ndarray:
    blocks = []
    for spread in (1, 2, 6, 12, 20, 40):  # by how much exponents are below the block's largest
        for top in (-140, -130, -126, -120, -118, -111, -110, -60, -8, 0, 8, 9, 15, 60, 119, 127):
            x = np.ldexp(rng.uniform(1, 2, BLOCK), top - rng.integers(0, spread, BLOCK))
            blocks.append(x * rng.choice([-1, 1], BLOCK))
    for top in range(-125, 128, 12):  # the largest number is at the edge of a mode
        for significand in (1.0, 1.75, 1.9375):
            x = np.ldexp(rng.standard_normal(BLOCK) / 8, top)
            x[rng.integers(BLOCK)] = np.ldexp(significand, top) * (1 + rng.integers(-1, 2) * 2.0**-23)
            blocks.append(x)
    blocks.extend(rng.standard_normal((40, BLOCK)))
    result = np.asarray(blocks).astype(np.float32)
    for i in range(0, 40, 2):  # NaN, infinities and zeros of both signs
        result[-1 - i, rng.integers(BLOCK)] = (np.nan, np.inf, -np.inf, 0.0, -0.0)[i // 2 % 5]
    zeros = np.zeros((2, BLOCK), np.float32)
    zeros[1] *= -1
    return np.concatenate([result, zeros])


def byte_values() -> bytes:
    parts = []
    codes = np.arange(256, dtype=np.uint8)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        by_numpy = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
        by_torch = torch.from_numpy(codes).view(getattr(torch, name)).to(torch.float32).numpy()
        np.testing.assert_array_equal(by_numpy, by_torch)
        parts.append(np.where(np.isnan(by_numpy), floats([0x7FC00000])[0], by_numpy).astype("<f4"))
    return b"".join(part.tobytes() for part in parts)


def scale_layouts(rng: np.random.Generator) -> bytes:
    content = b""
    for rows, blocks in ((1, 1), (32, 4), (33, 5), (127, 3), (128, 8), (130, 9), (260, 17)):
        scales = rng.integers(1, 255, (rows, blocks), dtype=np.uint8)
        packed = to_blocked(torch.from_numpy(scales)).numpy().astype(np.uint8)
        content += struct.pack("<II", rows, blocks) + scales.tobytes() + packed.tobytes()
    return content


def main() -> None:
    rng = np.random.default_rng(2024)
    write("bytes.gz", byte_values())
    write("bfloat16.gz", columns(floats(np.arange(0x10000, dtype=np.uint32) << 16)))
    numbers = adversarial_numbers()
    write("float32.gz", struct.pack("<I", len(numbers)) + numbers.astype("<f4").tobytes() + columns(numbers))
    blocks = random_blocks(rng)
    content = struct.pack("<I", len(blocks)) + blocks.astype("<f4").tobytes()
    for element in ELEMENTS:
        for mode in MODES:
            scale, data = quantize(blocks, element, mode)
            content += scale.tobytes() + data.tobytes()
    write("blocks.gz", content)
    write("scale_layout.gz", scale_layouts(rng))


if __name__ == "__main__":
    main()

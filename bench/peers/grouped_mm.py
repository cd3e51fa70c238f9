"""Times torch._grouped_mm (bfloat16) and torch._scaled_grouped_mm (e4m3, a scale per row).

The shapes are those of `tessera bench grouped`. "fast" means use_fast_accum=True, which does not add up sums in
float32. The weight gradient is written in bfloat16. "wgrad to float32" also converts it into a float32 gradient, as
training needs it and as Tessera writes it.
"""

import sys

import torch
from timing import random, row

SHAPES = ((8, 98304, 2048, 1408), (8, 98304, 1408, 2048), (32, 65536, 7168, 2048), (32, 16384, 7168, 2048))


def groups(rows, experts, skewed):
    """Returns the sizes of groups, as in src/app/bench/gpu_tables_products.cc."""
    weights = [1 + (5 * e + 3) % 8 if skewed else 1 for e in range(experts)]
    sizes = [rows // 128 * weight // sum(weights) * 128 for weight in weights]
    sizes[-1] += rows - sum(sizes)
    return sizes


def main():
    torch.manual_seed(0)
    for skewed in (False,) if "profile" in sys.argv else (False, True):
        for experts, rows, n, m in SHAPES:
            shape = f"E{experts} R{rows} {n}->{m} {'skewed' if skewed else 'equal'}"
            flop = 2 * rows * n * m
            x, d_y, w = random(rows, n), random(rows, m), random(experts, m, n)
            offsets = torch.tensor(groups(rows, experts, skewed)).cumsum(0).to(device="cuda", dtype=torch.int32)
            row("bf16 fwd", shape, flop, lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets))
            row("bf16 dgrad", shape, flop, lambda: torch._grouped_mm(d_y, w, offs=offsets))
            row("bf16 wgrad =", shape, flop, lambda: torch._grouped_mm(d_y.t(), x, offs=offsets))
            gradient = torch.empty(experts, m, n, device="cuda")
            row("bf16 wgrad to float32", shape, flop,
                lambda: gradient.copy_(torch._grouped_mm(d_y.t(), x, offs=offsets)))
            del gradient

            # The numbers have all magnitudes of e4m3, as in blocks that have scales.
            x8, d_y8, w8 = ((t * 896).to(torch.float8_e4m3fn) for t in (x, d_y, w))
            w8t = w8.transpose(-2, -1).contiguous()
            del x, d_y, w
            row_scale = torch.rand(rows, device="cuda") + 0.5
            m_scale, n_scale = (torch.rand(experts, size, device="cuda") + 0.5 for size in (m, n))
            for fast in (False, True):
                for name, a, b, scale in (("fwd", x8, w8, m_scale), ("dgrad", d_y8, w8t, n_scale)):
                    row(f"fp8 {name}{' fast' if fast else ''}", shape, flop,
                        lambda: torch._scaled_grouped_mm(a, b.transpose(-2, -1), row_scale, scale, offs=offsets,
                                                         out_dtype=torch.bfloat16, use_fast_accum=fast))
            del x8, d_y8, w8, w8t


if __name__ == "__main__":
    main()

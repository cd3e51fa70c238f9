"""torch._scaled_grouped_mm (e4m3, a scale per row) and torch._grouped_mm (bfloat16) on the shapes of main.cu's bench.

TFLOP/s; with the argument "profile" one run of each, for a profiler.
"""

import sys

import torch


SHAPES = ((8, 98304, 2048, 1408), (8, 98304, 1408, 2048), (32, 65536, 7168, 2048), (32, 16384, 7168, 2048))


def median_ms(run, warm_up=100, runs=25):
    if "profile" in sys.argv:
        run()
        torch.cuda.synchronize()
        return 1
    for _ in range(warm_up):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(events, events[1:]))[runs // 2]


def groups(rows, experts, skew):
    if not skew:
        return [rows // experts] * experts
    weights = [1 + (5 * e + 3) % 8 for e in range(experts)]
    sizes = [rows // 128 * weight // sum(weights) * 128 for weight in weights]
    sizes[-1] += rows - sum(sizes)
    return sizes


def main():
    torch.manual_seed(0)
    scaled = ("fwd", "dgrad", "fwd fast", "dgrad fast")
    bf16 = ("fwd", "dgrad", "wgrad")
    print(f"{'TFLOP/s':27} | _scaled_grouped_mm {' '.join(scaled)} | _grouped_mm {' '.join(bf16)}")
    for skew in (False,) if "profile" in sys.argv else (False, True):
        for experts, rows, n, m in SHAPES:
            x = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
            d_y = torch.randn(rows, m, device="cuda", dtype=torch.bfloat16)
            w = torch.randn(experts, m, n, device="cuda", dtype=torch.bfloat16)
            offsets = torch.tensor(groups(rows, experts, skew)).cumsum(0).to(device="cuda", dtype=torch.int32)
            x8, d_y8 = ((t * 60).to(torch.float8_e4m3fn) for t in (x, d_y))
            w8 = (w * 60).to(torch.float8_e4m3fn)
            w8t = w8.transpose(-2, -1).contiguous()
            row_scale = torch.rand(rows, device="cuda") + 0.5
            m_scale, n_scale = (torch.rand(experts, size, device="cuda") + 0.5 for size in (m, n))

            def scaled_mm(a, b, scale_b, fast):
                return lambda: torch._scaled_grouped_mm(
                    a,
                    b.transpose(-2, -1),
                    row_scale,
                    scale_b,
                    offs=offsets,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=fast,
                )

            runs = [
                scaled_mm(x8, w8, m_scale, False),
                scaled_mm(d_y8, w8t, n_scale, False),
                scaled_mm(x8, w8, m_scale, True),
                scaled_mm(d_y8, w8t, n_scale, True),
                lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets),
                lambda: torch._grouped_mm(d_y, w, offs=offsets),
                lambda: torch._grouped_mm(d_y.t(), x, offs=offsets),
            ]
            line = f"{experts:2} {rows:6} {n:5}->{m:4} {'skewed' if skew else 'equal':7} |"
            for run in runs:
                try:
                    line += f" {2e-9 * rows * m * n / median_ms(run):7.1f}"
                except RuntimeError as error:
                    line += f" {type(error).__name__:>7}"
            print(line, flush=True)
            del x, d_y, w, x8, d_y8, w8, w8t


if __name__ == "__main__":
    main()

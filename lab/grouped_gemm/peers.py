"""torch._grouped_mm on the shapes of main.cu's bench: forward, dgrad, wgrad (into bfloat16), TFLOP/s; "once" for a profiler."""

import sys

import torch


def mean_ms(run, budget_ms=30):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    runs = 1
    for _ in range(2):
        begin.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        ms = begin.elapsed_time(end) / runs
        runs = max(1, int(budget_ms / ms))
    return ms


def groups(rows, experts, skew):
    if not skew:
        return [rows // experts] * experts
    weights = [1 + (5 * e + 3) % 8 for e in range(experts)]
    sizes = [rows * weight // sum(weights) for weight in weights]
    sizes[-1] += rows - sum(sizes)
    return sizes


def main():
    torch.manual_seed(0)
    for skew in (False, True):
        for experts, rows, n, m in ((8, 98304, 2048, 1408), (8, 98304, 1408, 2048), (32, 65536, 7168, 2048), (32, 16384, 7168, 2048), (32, 2048, 7168, 2048)):
            x = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
            d_y = torch.randn(rows, m, device="cuda", dtype=torch.bfloat16)
            w = torch.randn(experts, m, n, device="cuda", dtype=torch.bfloat16) * 0.02
            offsets = torch.tensor(groups(rows, experts, skew)).cumsum(0).to(device="cuda", dtype=torch.int32)
            runs = (
                lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets),
                lambda: torch._grouped_mm(d_y, w, offs=offsets),
                lambda: torch._grouped_mm(d_y.t(), x, offs=offsets),
            )
            if sys.argv[1:] == ["once"]:
                for run in runs:
                    run()
                continue
            line = f"torch     {experts:2} {rows:6} {n:5}->{m:5} {'skewed' if skew else 'equal':7}"
            for run in runs:
                times = sorted(mean_ms(run) for _ in range(10))
                line += f" {2e-9 * rows * m * n / times[5]:8.1f}"
            print(line, flush=True)
            del x, d_y, w


if __name__ == "__main__":
    main()

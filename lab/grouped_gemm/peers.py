"""torch._grouped_mm on the shapes of main.cu's bench: forward, dgrad, wgrad (into bfloat16), TFLOP/s."""

import torch


def median_ms(run, warm_up=40, runs=30):
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
    sizes = [rows * weight // sum(weights) for weight in weights]
    sizes[-1] += rows - sum(sizes)
    return sizes


def main():
    torch.manual_seed(0)
    print(f"{'torch._grouped_mm':34} {'fwd':>8} {'dgrad':>8} {'wgrad':>8}   TFLOP/s")
    for skew in (False, True):
        for experts, rows, n, m in ((8, 98304, 2048, 1408), (8, 98304, 1408, 2048), (32, 65536, 7168, 2048), (32, 16384, 7168, 2048)):
            x = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
            d_y = torch.randn(rows, m, device="cuda", dtype=torch.bfloat16)
            w = torch.randn(experts, m, n, device="cuda", dtype=torch.bfloat16) * 0.02
            offsets = torch.tensor(groups(rows, experts, skew)).cumsum(0).to(device="cuda", dtype=torch.int32)
            runs = (
                lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets),
                lambda: torch._grouped_mm(d_y, w, offs=offsets),
                lambda: torch._grouped_mm(d_y.t(), x, offs=offsets),
            )
            line = f"{experts:2} {rows:6} {n:5}->{m:5} {'skewed' if skew else 'equal':12}"
            for run in runs:
                try:
                    line += f" {2e-9 * rows * m * n / median_ms(run):8.1f}"
                except RuntimeError as error:
                    line += f" {type(error).__name__:>8}"
            print(line, flush=True)
            del x, d_y, w


if __name__ == "__main__":
    main()

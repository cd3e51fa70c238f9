"""How PyTorch's operators are timed: as `tessera bench` times its own (src/app/gpu_bench.cc). One line of JSON per row."""

import json
import sys

import torch

WARM_MS, MAX_WARM_RUNS, RUNS = 100, 400, 24


def random(*shape, dtype=torch.bfloat16):
    """Numbers of the same distribution: how much power a product draws depends on them."""
    return (torch.rand(*shape, device="cuda") - 0.5).to(dtype)


def median_ms(run):
    def event():
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    for _ in range(2):
        run()
    begin = event()
    run()
    end = event()
    end.synchronize()
    for _ in range(min(MAX_WARM_RUNS, int(WARM_MS / begin.elapsed_time(end)))):
        run()
    pairs = []
    for _ in range(RUNS):
        begin = event()
        run()
        pairs.append((begin, event()))
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in pairs)[RUNS // 2]


def row(name, shape, flop, run):
    """With the argument "profile" one run only, for a profiler. A row that PyTorch cannot run is left out."""
    try:
        if sys.argv[1:] == ["profile"]:
            run()
            torch.cuda.synchronize()
            return
        ms = median_ms(run)
    except RuntimeError as error:
        print(f"{name} {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
        return
    line = {"name": name, "shape": shape, "microseconds": ms * 1e3, "rate": flop / ms * 1e-9, "unit": "TFLOP/s"}
    print(json.dumps(line), flush=True)

"""Times PyTorch's operators as `tessera bench` times its own (src/app/bench/gpu_bench.cc). Prints a line of JSON per
row."""

import json
import math
import statistics
import sys

import torch

GRAPH_MS, WARM_MS, LAUNCHES = 4, 100, 9
# The default stream cannot be captured, so another stream is used. A backward runs on its forward's stream.
torch.cuda.set_stream(torch.cuda.Stream())


def random(*shape, dtype=torch.bfloat16):
    """Returns numbers of the distribution that Tessera's benchmarks use. A product's power draw depends on its
    numbers."""
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
    run_ms = begin.elapsed_time(end)
    runs = math.ceil(GRAPH_MS / run_ms)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(runs):
            run()
    for _ in range(math.ceil(WARM_MS / (runs * run_ms))):
        graph.replay()
    events = [event()]
    for _ in range(LAUNCHES):
        graph.replay()
        events.append(event())
    torch.cuda.synchronize()
    return statistics.median(map(torch.cuda.Event.elapsed_time, events, events[1:])) / runs


def row(name, shape, flop, run):
    """Measures and prints a row. With the argument "profile" it only runs once, for a profiler. A row that PyTorch
    cannot run is left out."""
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

#!/usr/bin/env python3
"""Compares steps on GPUs that were measured with what the planner predicts for them. Needs no GPU, but to measure.

    bench/forecast_gpu.py --tessera PROGRAM [--clusters clusters] [--out VALIDATION]    # plan --validation shows it
    bench/forecast_gpu.py --tessera PROGRAM --predict 2xh200 --out FORECAST    # without a GPU; or settings-2xh200
    bench/forecast_gpu.py --tessera PROGRAM --measure FORECAST                 # makes them, on such GPUs

PROGRAM must be built with CUDA. Rows are those of docs/results.md and docs/performance.md that have a command, and
steps of two H100s. Rows that had a part in the rates of clusters/, or that older kernels ran, do not count. Prints a
table. Fails if the mean error of the others is above 3 %, or the largest above 8 %. A FORECAST has the rows of so many
GPUs, for settings-2xh200 those of SETTINGS, and for 8xh200 the steps of bench/gpus.py. It is committed before the runs
that check it.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import types

import gpus
from gpu import FP8_BLOCKWISE, MXFP8, OUTPUT
from training_run import AS_ROOT

FORCED = ["--debug.moe_force_load_balance=true", "--parallelism.expert_parallel_capacity_factor=1.05"]
CUT = ["--model.flavor=16B", "--model.args.n_layers=8", "--training.seq_len=8192", "--training.local_batch_size=2",
       *FORCED]
WHOLE = ["--model.flavor=16B", "--training.seq_len=8192", "--training.local_batch_size=2", *FORCED]
ON_TWO = ["configs/16b-2gpu.toml", *FORCED]
PIPELINE = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=1",
            "--training.global_batch_size=16", "--parallelism.pipeline_parallel_microbatch_size=1"]
MXFP8_ROWS = ["--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8"]
LAYER = ["--model.flavor=671B", "--model.args.n_dense_layers=0", "--training.seq_len=4096",
         "--training.local_batch_size=2", "--model.args.num_experts=64", *FORCED]


def experts(ranks, backend, domain=None):
    return [f"--parallelism.expert_parallel_degree={ranks}", f"--parallelism.expert_parallel_comm_backend={backend}",
            *([f"--parallelism.expert_parallel_ranks_per_domain={domain}"] if domain else [])]


def mode(name, batch):
    return [f"--activation_checkpoint.mode={name}", f"--training.local_batch_size={batch}"]


# What a row is that does not count: it had a part in the rates of clusters/, or older kernels ran it.
CALIBRATES, OLDER = "calibrates", "older kernels"
# Name, cluster, GPUs, arguments, measured tokens/s per GPU, and why the row does not count.
ROWS = [
    ("8 layers, bf16", "h200", 1, CUT, 71005, ""),
    ("8 layers, fp8_blockwise", "h200", 1, CUT + FP8_BLOCKWISE, 77498, ""),
    ("8 layers, fp8_blockwise, output", "h200", 1, CUT + FP8_BLOCKWISE + [OUTPUT], 81568, ""),
    ("8 layers, mxfp8", "h200", 1, CUT + MXFP8, 79243, ""),
    ("8 layers, mxfp8, output", "h200", 1, CUT + MXFP8 + [OUTPUT], 83513, ""),
    ("8 layers, FSDP only", "h200", 2, CUT, 61887, CALIBRATES),
    ("8 layers, FSDP only", "h200", 4, CUT, 59430, OLDER),
    ("8 layers, direct", "h200", 2, CUT + experts(2, "direct"), 71153, CALIBRATES),
    ("8 layers, direct, mxfp8", "h200", 2, CUT + experts(2, "direct") + MXFP8, 76340, OLDER),
    ("8 layers, direct", "h200", 4, CUT + experts(4, "direct"), 71823, OLDER),
    ("8 layers, 1F1B", "h200", 2, CUT + PIPELINE, 68336, OLDER),
    ("16B, standard", "h200", 4, WHOLE + experts(4, "standard"), 22335, ""),
    ("16B, direct", "h200", 4, WHOLE + experts(4, "direct"), 24498, ""),
    ("16B, direct, mxfp8", "h200", 4, WHOLE + experts(4, "direct") + MXFP8, 28746, ""),
    ("16B, standard, none", "h200", 2, ON_TWO + mode("none", 1) + experts(2, "standard"), 19244, OLDER),
    ("16B, direct, none", "h200", 2, ON_TWO + mode("none", 1), 20778, OLDER),
    ("16B, standard, mxfp8, full", "h200", 2, ON_TWO + mode("full", 2) + experts(2, "standard") + MXFP8, 20331, OLDER),
    ("16B, direct, mxfp8, full", "h200", 2, ON_TWO + mode("full", 2) + MXFP8 + MXFP8_ROWS, 22359, OLDER),
]
FIVE = [one.replace("n_layers=8", "n_layers=5") for one in CUT]
# What two H100s gave on 2026-11-26, with `--measure bench/forecasts/2026-11-26-2xh100.json`.
ROWS += [
    ("5 layers, bf16", "h100", 1, FIVE, 95453, ""),
    ("5 layers, mxfp8", "h100", 1, FIVE + MXFP8, 101173, ""),
    ("5 layers, full, fp8_blockwise, output", "h100", 1, FIVE + mode("full", 2) + FP8_BLOCKWISE + [OUTPUT], 97329,
     ""),
    ("8 layers, FSDP only", "h100", 2, CUT, 58472, ""),
    ("8 layers, direct", "h100", 2, CUT + experts(2, "direct"), 66396, CALIBRATES),
    ("8 layers, standard", "h100", 2, CUT + experts(2, "standard"), 61161, CALIBRATES),
    ("8 layers, direct, mxfp8", "h100", 2, CUT + experts(2, "direct") + MXFP8, 72948, ""),
    ("8 layers, 1F1B", "h100", 2, CUT + PIPELINE, 63426, ""),
]
# Name, GPUs, arguments, measured milliseconds of a layer: half of the difference of steps with three and with one.
LAYERS = [
    (f"671B layer, {backend}, {name}", 2, LAYER + experts(2, backend) + recipe, ms)
    for backend, name, recipe, ms in (
        ("standard", "bf16", [], 84.1), ("direct", "bf16", [], 79.3),
        ("standard", "fp8_blockwise", FP8_BLOCKWISE, 73.6), ("direct", "fp8_blockwise", FP8_BLOCKWISE, 68.1),
        ("standard", "mxfp8", MXFP8, 73.3), ("direct", "mxfp8", MXFP8, 68.4))
]
# Name and arguments of steps on two H200s with other schedules, SMs for dispatch and combine, and the real router. The
# planner takes its load to be balanced.
REAL = ["--debug.moe_force_load_balance=false", "--parallelism.expert_parallel_capacity_factor=1.8"]
SETTINGS = [
    *((f"8 layers, {schedule}", CUT + PIPELINE + [f"--parallelism.pipeline_parallel_schedule={schedule}"])
      for schedule in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")),
    *((f"8 layers, direct, {sms} SMs", CUT + experts(2, "direct") + [f"--parallelism.expert_parallel_num_sms={sms}"])
      for sms in (8, 16, 32)),
    *((f"16B, {backend}, real, {name}", ON_TWO + REAL + experts(2, backend) + how)
      for name, how in (("bf16", []), ("mxfp8, full", mode("full", 1) + MXFP8)) for backend in ("standard", "direct")),
]
MEAN, MOST = 0.03, 0.08


def predict(program, clusters, cluster, ranks, arguments):
    """Returns the planner's answer."""
    command = [program, "plan", "time", *arguments, "--cluster", clusters / f"{cluster}.toml", "--ranks", str(ranks),
               "--json"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"forecast_gpu: {' '.join(map(str, command))}: {done.stderr or done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def blind_runs(kind):
    """Yields name, number of GPUs and options of the runs of a kind, such as 2xh200."""
    if kind == "settings-2xh200":
        yield from ((name, 2, options) for name, options in SETTINGS)
        return
    if kind == "8xh200":
        args = types.SimpleNamespace(ranks=gpus.BOUND_RANKS, tessera="", bench="")
        for run in gpus.plan(args):
            if "step" in run.key:
                ranks, _, _, *options = run.key
                yield (gpus.name_of(run), ranks,
                       [one for one in options if not one.startswith(("--steps", "--warmup", "--comm"))])
        return
    for name, cluster, ranks, options, _, _ in ROWS:
        if kind == f"{ranks}x{cluster}":
            yield name, ranks, options
    for name, ranks, options, _ in LAYERS:
        if kind == f"{ranks}xh200":
            for depth in (3, 1):
                yield f"{name}, {depth} layers", ranks, [*options, f"--model.args.n_layers={depth}"]


def write_blind(path, kind, program, clusters):
    """Writes the forecasts of runs that have not been made."""
    rows = []
    runs = list(blind_runs(kind))
    if not runs:
        sys.exit(f"forecast_gpu: no runs on '{kind}'; expected 8xh200, settings-2xh200, or GPUs of a row: "
                 f"{', '.join(sorted({f'{ranks}x{cluster}' for _, cluster, ranks, *_ in ROWS}))}")
    for name, ranks, options in runs:
        answer = predict(program, clusters, kind.split("x")[1], ranks, options)
        rows.append({"run": name, "ranks": ranks, "options": options,
                     "tokens_per_s_per_gpu": round(answer["tokens_per_s_per_gpu"]),
                     "step_ms": round(answer["step_ms"], 1), "memory_gib": round(answer["memory_bytes"] / 2**30, 1)})
    path.write_text(json.dumps({"cluster": kind, "forecasts": rows}, indent=1) + "\n")
    print(f"{path}: {len(rows)} forecasts")


def measure(path, program):
    """Makes the runs of a forecast, and compares. Returns whether all could be made."""
    is_complete = True
    forecasts = json.loads(path.read_text()).get("forecasts")
    if not forecasts:
        sys.exit(f"forecast_gpu: '{path}' has no forecasts of --predict")
    print("| run | GPUs | measured | predicted | error, % |\n| --- | --- | --- | --- | --- |")
    for row in forecasts:
        command = [*gpus.mpirun(row["ranks"]), program, "bench", "step", "--training.device=cuda", "--steps=12",
                   "--warmup=5", *row["options"]]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | AS_ROOT)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            print(f"| {row['run']} | {row['ranks']} | {(done.stderr or done.stdout).strip()[-300:]} | | |", flush=True)
            is_complete = False
            continue
        measured, predicted = json.loads(lines[-1])["tokens_per_s_per_rank"], row["tokens_per_s_per_gpu"]
        print(f"| {row['run']} | {row['ranks']} | {measured:,.0f} | {predicted:,} | "
              f"{100 * (predicted / measured - 1):+.1f} |", flush=True)
    return is_complete


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--clusters", type=pathlib.Path, default=pathlib.Path(__file__).parents[1] / "clusters")
    parser.add_argument("--predict", metavar="NxGPU", help="write forecasts for such GPUs to --out")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--measure", type=pathlib.Path, metavar="FORECAST", help="make its runs, and compare")
    args = parser.parse_args()
    if args.predict and not args.out:
        parser.error("--predict needs --out")
    if args.predict:
        return write_blind(args.out, args.predict, args.tessera, args.clusters)
    if args.measure:
        sys.exit(not measure(args.measure, args.tessera))
    errors, runs = [], {}

    def show(name, gpus_of_run, unit, measured, predicted, why_not):
        """Adds a row: tokens/s (unit 0), or ms (unit 1). A positive error is a forecast that is too fast."""
        as_rate = (lambda value: 1000.0 / value) if unit else (lambda value: value)
        error = as_rate(predicted) / as_rate(measured) - 1.0
        runs[f"{name}, {gpus_of_run}"] = {"measured": round(as_rate(measured), 3),
                                          "predicted": round(as_rate(predicted), 3)}
        if not why_not:
            errors.append(abs(error))
        print(f"| {name} | {gpus_of_run} | {measured:,.{unit}f} | {predicted:,.{unit}f} | {100 * error:+.1f} | "
              f"{why_not} |", flush=True)

    print("| run | GPUs | measured | predicted | error, % | |\n| --- | --- | --- | --- | --- | --- |")
    for name, cluster, ranks, arguments, measured, why_not in ROWS:
        answer = predict(args.tessera, args.clusters, cluster, ranks, arguments)
        show(name, f"{ranks} {cluster.upper()}", 0, measured, answer["tokens_per_s_per_gpu"], why_not)
    for name, ranks, arguments, measured in LAYERS:
        three, one = (predict(args.tessera, args.clusters, "h200", ranks,
                              [*arguments, f"--model.args.n_layers={depth}"])["step_ms"] for depth in (3, 1))
        show(name + ", ms", f"{ranks} H200", 1, measured, 0.5 * (three - one), OLDER)
    if args.out:
        args.out.write_text(json.dumps({"format": "tessera validation", "version": 1, "runs": runs}, indent=1) + "\n")
    mean, most = statistics.mean(errors), max(errors)
    print(f"\nrows that validate: mean error {100 * mean:.1f} % (must {100 * MEAN:g}), largest {100 * most:.1f} % "
          f"(must {100 * MOST:g})")
    sys.exit(mean > MEAN or most > MOST)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Compares steps that were predicted with steps that were then measured, on the CPU of this machine.

    bench/forecast.py predict --tessera PROGRAM --out FORECAST    calibrates, and writes the forecast of every run
    bench/forecast.py measure --tessera PROGRAM --forecast FORECAST    runs them, five times each
    bench/forecast.py all --tessera PROGRAM                       does both

A forecast is made before the runs, from calibrations that know none of them: one of a rank with all cores, and one of
two ranks. Fails unless the mean error is at most 5 % and no run is more than 12 % off.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile

from training_run import measure_steps, output_of

MEAN, MOST = 0.05, 0.12

FLOAT32 = ["--training.mixed_precision_param=float32"]
LINEAR = ["--model.converters=quantize.linear.mx"]
MXFP8 = ["--model.converters=quantize.linear.mx,quantize.grouped_mm.mx"]
BLOCKWISE = MXFP8 + [f"--quantize.{kind}.mx.recipe_name=fp8_blockwise" for kind in ("linear", "grouped_mm")]
FULL = ["--activation_checkpoint.mode=full"]
SELECTIVE = ["--activation_checkpoint.mode=selective"]


def model(dim, layers, heads, experts, top_k, vocab, *, moe, inter=None, q_lora=0, shared=1, dense=1):
    sizes = {"dim": dim, "n_layers": layers, "n_heads": heads, "num_experts": experts, "top_k": top_k,
             "vocab_size": vocab, "moe_inter_dim": moe, "inter_dim": inter or 3 * dim, "q_lora_rank": q_lora,
             "kv_lora_rank": dim // 64 * 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
             "num_shared_experts": shared, "n_dense_layers": dense}
    return [f"--model.args.{key}={value}" for key, value in sizes.items()]


def shape(batch, seq_len, micro_batches=1):
    return [f"--training.local_batch_size={batch}", f"--training.seq_len={seq_len}",
            f"--training.global_batch_size={batch * micro_batches}"]


SMALL = model(160, 3, 5, 8, 2, 1536, moe=96)
WIDE = model(448, 2, 7, 8, 2, 3072, moe=224, q_lora=160)
DEEP = model(224, 6, 4, 4, 1, 1024, moe=160, inter=480)
MANY = model(320, 2, 6, 32, 4, 2048, moe=64, shared=2)
DENSE = model(288, 4, 6, 4, 2, 6144, moe=128, inter=960, dense=4)
TWO_RANKS = {
    "small, FSDP": SMALL + shape(2, 192, 2),
    "wide, FSDP": WIDE + shape(1, 384, 2),
    "wide, FSDP, mxfp8": WIDE + shape(1, 384, 2) + MXFP8,
    "dense, replicated": DENSE + shape(2, 160, 2) + ["--parallelism.data_parallel_replicate_degree=2"],
    "many experts, direct": MANY + shape(2, 256, 2) + ["--parallelism.expert_parallel_degree=2",
                                                       "--parallelism.expert_parallel_comm_backend=direct"],
    "many experts, standard": MANY + shape(2, 256, 2) + ["--parallelism.expert_parallel_degree=2"],
    "dense, tensor": DENSE + shape(4, 160) + ["--parallelism.tensor_parallel_degree=2"],
    "deep, 1F1B": DEEP + shape(6, 128) + ["--parallelism.pipeline_parallel_degree=2",
                                          "--parallelism.pipeline_parallel_microbatch_size=1"],
}
ONE_RANK = {
    "small": SMALL + shape(4, 192),
    "small, float32": SMALL + shape(4, 192) + FLOAT32,
    "small, mxfp8": SMALL + shape(4, 192) + MXFP8,
    "small, short sequences": SMALL + shape(16, 48),
    "small, long sequences": SMALL + shape(1, 1536),
    "small, recomputed": SMALL + shape(4, 192) + FULL,
    "wide": WIDE + shape(2, 384),
    "wide, float32": WIDE + shape(2, 384) + FLOAT32,
    "wide, mxfp8": WIDE + shape(2, 384) + MXFP8,
    "wide, linear mxfp8": WIDE + shape(2, 384) + LINEAR,
    "wide, fp8_blockwise": WIDE + shape(2, 384) + BLOCKWISE,
    "wide, four micro-batches": WIDE + shape(1, 256, 4),
    "wide, selective recomputation": WIDE + shape(2, 384) + SELECTIVE,
    "deep": DEEP + shape(6, 128),
    "deep, float32": DEEP + shape(6, 128) + FLOAT32,
    "deep, fp8_blockwise": DEEP + shape(6, 128) + BLOCKWISE,
    "many experts": MANY + shape(3, 320),
    "many experts, float32": MANY + shape(3, 320) + FLOAT32,
    "many experts, mxfp8": MANY + shape(3, 320) + MXFP8,
    "many experts, recomputed": MANY + shape(3, 320) + FULL,
    "dense": DENSE + shape(4, 160),
    "dense, linear mxfp8": DENSE + shape(4, 160) + LINEAR,
    "dense, long sequences": DENSE + shape(1, 1024),
    "debug model": shape(2, 256),
}


RUNS = {name: (1, run) for name, run in ONE_RANK.items()} | {
    f"{name}, 2 ranks": (2, run) for name, run in TWO_RANKS.items()}


def predict(tessera, worlds, out):
    calibrations, forecast = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in worlds:
            path = f"{folder}/{num_ranks}.json"
            # Ranks that share the cores train half as many models again, and take thrice as long for each.
            rounds = 3 if num_ranks == 1 else 1
            output_of([tessera, "bench", "calibrate", "--rounds", rounds, "--out", path], num_ranks)
            calibrations[num_ranks] = json.loads(pathlib.Path(path).read_text())
        for name, (num_ranks, run) in RUNS.items():
            if num_ranks not in worlds:
                continue
            printed, _ = output_of([tessera, "plan", "time", "--json", "--ranks", num_ranks, "--calibration",
                                    f"{folder}/{num_ranks}.json", *run])
            line = json.loads(printed)
            forecast[name] = {key: line[key] for key in ("step_ms", "tokens_per_s", "host_ms")}
    out.write_text(json.dumps({"calibrations": calibrations, "runs": forecast}, indent=1) + "\n")
    print(f"{out}: {len(forecast)} runs", flush=True)


def measure(tessera, forecast_file, rounds, steps):
    """Returns the errors of the forecast, by run. The runs take turns, so a slow moment affects all of them."""
    forecast = json.loads(forecast_file.read_text()).get("runs")
    if not forecast:
        sys.exit(f"forecast: '{forecast_file}' has no runs of `forecast.py predict`")
    times = {name: [] for name in forecast}
    for turn in range(rounds):
        for name in forecast:
            num_ranks, run = RUNS[name]
            line = measure_steps(tessera, ["--training.device=cpu", "--steps", steps, "--warmup", 2, *run], num_ranks)
            times[name].append(line["step_ms"])
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    errors = {}
    print(f"{'run':32}{'predicted ms':>14}{'measured ms':>14}{'error':>10}{'spread':>10}")
    for name, of_run in times.items():
        predicted, measured = forecast[name]["step_ms"], statistics.median(of_run)
        errors[name] = predicted / measured - 1.0
        spread = (max(of_run) - min(of_run)) / measured
        print(f"{name:32}{predicted:14.1f}{measured:14.1f}{100 * errors[name]:+9.1f}%{100 * spread:9.1f}%")
    return errors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "measure", "all"])
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="worlds to calibrate and predict")
    parser.add_argument("--forecast", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    if args.what == "predict" and not args.out:
        parser.error("predict needs --out")
    if args.what == "measure" and not args.forecast:
        parser.error("measure needs --forecast")
    if args.what == "predict":
        return predict(args.tessera, args.ranks, args.out)
    with tempfile.TemporaryDirectory() as folder:
        forecast = args.forecast
        if args.what == "all":
            forecast = pathlib.Path(folder) / "forecast.json"
            predict(args.tessera, args.ranks, forecast)
        errors = measure(args.tessera, forecast, args.rounds, args.steps)
    mean, most = statistics.mean(map(abs, errors.values())), max(map(abs, errors.values()))
    print(f"mean error {100 * mean:.1f} %, largest {100 * most:.1f} %; expected at most {100 * MEAN:.0f} and "
          f"{100 * MOST:.0f} %")
    return 1 if mean > MEAN or most > MOST else 0


if __name__ == "__main__":
    sys.exit(main())

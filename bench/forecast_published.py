#!/usr/bin/env python3
"""Compares published speeds of other engines with what the planner predicts from their stated settings. Needs no GPU.

    bench/forecast_published.py --tessera PROGRAM

PROGRAM must be built with CUDA. No rate was fitted to these figures. Rows are of three classes. Where the settings are
known, the error must be at most 10 %. Where an input is open, the forecasts of its values must bracket the figure.
Where software limits a run, the forecast is a ceiling, and the ratio is printed. Prints a table, and fails if a row
misses.
"""

import argparse
import pathlib
import sys

from forecast_gpu import predict

ROOT = pathlib.Path(__file__).parents[1]
FORCED = "--debug.moe_force_load_balance=true"
SEEDS = [ROOT / "configs/671b-256gpu.toml"]
STANDARD = "--parallelism.expert_parallel_comm_backend=standard"
MX = "--model.converters=quantize.linear.mx,quantize.grouped_mm.mx"
MX_EXPERTS = "--model.converters=quantize.grouped_mm.mx"
BLOCKWISE = ["--quantize.linear.mx.recipe_name=fp8_blockwise", "--quantize.grouped_mm.mx.recipe_name=fp8_blockwise"]
# Megatron also trains one module of multi-token prediction, which costs about a layer; it recomputes small operators
# only, which is nearest to nothing here.
MEGATRON = ["--model.flavor=671B", "--model.args.n_layers=62", "--training.seq_len=4096",
            "--training.local_batch_size=1", "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
            "--parallelism.pipeline_parallel_last_stage_less_layers=1", "--activation_checkpoint.mode=none",
            "--parallelism.expert_parallel_comm_backend=direct", "--parallelism.expert_parallel_capacity_factor=1.1",
            "--optimizer.state_dtype=bfloat16", "--routing", "groups"]


def layout(sequences, pp, layers_per_stage, ep, tp=1, domain=0):
    return [f"--training.global_batch_size={sequences}", f"--parallelism.pipeline_parallel_degree={pp}",
            f"--parallelism.pipeline_parallel_layers_per_stage={layers_per_stage}",
            f"--parallelism.expert_parallel_degree={ep}", f"--parallelism.tensor_parallel_degree={tp}",
            *([f"--parallelism.expert_parallel_ranks_per_domain={domain}"] if domain else [])]


KNOWN, OPEN, CEILING = "known", "open: routing", "limited by software"
GROUPS = ["--routing", "groups"]
TITAN_16B = ["--model.flavor=16B", "--training.seq_len=4096", "--training.local_batch_size=4", STANDARD, FORCED,
             "--parallelism.expert_parallel_degree=8"]
# Name, class, tokens/s per GPU, cluster, GPUs, engine, and options of each forecast.
ROWS = [
    ("TorchTitan, 671B, bf16", KNOWN, 651, "b200", 256, "torchtitan", [[*SEEDS, FORCED, STANDARD]]),
    ("Megatron, 671B, FP8, PP8 TP2 EP64", KNOWN, 1297, "h100", 1024, "megatron",
     [[*MEGATRON, MX, *BLOCKWISE, *layout(8192, 8, 2, 64, tp=2, domain=8)]]),
    ("Megatron, 671B, MXFP8, PP4 EP64, full graph", KNOWN, 4912, "gb200", 256, "megatron-overlap",
     [[*MEGATRON, MX, *layout(2048, 4, 4, 64)]]),
    ("TorchTitan + DeepEP, 671B, bf16", OPEN, 859, "b200", 256, "torchtitan-deepep",
     [[*SEEDS, *GROUPS], [*SEEDS, FORCED]]),
    ("TorchTitan + DeepEP, 671B, MXFP8 experts", OPEN, 918, "b200", 256, "torchtitan-deepep",
     [[*SEEDS, *GROUPS, MX_EXPERTS], [*SEEDS, FORCED, MX_EXPERTS]]),
    ("Megatron, 671B, MXFP8, PP8 EP32, partial graphs", CEILING, 3328, "b200", 256, "megatron-overlap",
     [[*MEGATRON, MX, *layout(2048, 8, 4, 32, domain=8)]]),
    ("TorchTitan, 16B, bf16, no recomputation", CEILING, 12437, "b200", 8, "torchtitan",
     [[*TITAN_16B, "--activation_checkpoint.mode=none"]]),
    ("TorchTitan, 16B, bf16, full recomputation", CEILING, 10050, "b200", 8, "torchtitan",
     [[*TITAN_16B, "--activation_checkpoint.mode=full"]]),
]
MOST = 0.10


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tessera", required=True)
    args = parser.parse_args()
    missed = []
    print("| run | GPUs | class | published | predicted | |\n| --- | --- | --- | --- | --- | --- |")
    for name, kind, published, cluster, ranks, engine, forecasts in ROWS:
        predicted = sorted(
            predict(args.tessera, ROOT / "clusters", cluster, ranks,
                    ["--engine", str(ROOT / f"engines/{engine}.toml"), *map(str, options)])["tokens_per_s_per_gpu"]
            for options in forecasts)
        low, high = predicted[0], predicted[-1]
        error = low / published - 1.0
        holds = {KNOWN: abs(error) <= MOST, OPEN: low <= published <= high, CEILING: published <= low}[kind]
        said = {KNOWN: f"{100 * error:+.1f} %", OPEN: "holds it", CEILING: f"{published / low:.2f} of it"}[kind]
        text = f"{low:,.0f}" if len(predicted) == 1 else f"{low:,.0f} to {high:,.0f}"
        print(f"| {name} | {ranks} {cluster.upper()} | {kind} | {published:,} | {text} | "
              f"{said if holds else said + ': MISSED'} |", flush=True)
        missed += [] if holds else [name]
    sys.exit(len(missed))


if __name__ == "__main__":
    main()

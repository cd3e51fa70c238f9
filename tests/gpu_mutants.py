#!/usr/bin/env python3
"""Shows that the GPU's gradient tests notice kernels that scale or add up wrongly, and exchanges that are missing.

    tests/gpu_mutants.py BUILD [--of gradients|meshes|operators] [--only PART] [--jobs N]
    tests/gpu_mutants.py BUILD [...] --make FOLDER    # only builds the mutants' test programs, without a GPU
    tests/gpu_mutants.py BUILD [...] --made FOLDER    # tests these programs, without a compiler

Each mutant changes one line of a source. The script compiles that source beside the build's objects and links it with
them. The named test must then fail: a case of CudaGradients, for meshes one of GradientsOnGpus, or an operator's test.
The sources and the build do not change. Tests need a GPU, and those of meshes need two. The script prints a line per
mutant, and fails if a mutant passes its test.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
FP8, EXACT, BF16 = "sm90_grouped_gemm_fp8", "sm90_grouped_gemm_exact", "sm90_grouped_gemm"

# Each mutant is: the description of what is wrong, the file in src that changes, the text to replace, its
# replacement, the source in src to compile, and the case that must fail.
MUTANTS = [
    ("bfloat16 products forget the first step", f"ops/gemm/sm90/{BF16}.cuh", "warpgroup, step > 0);",
     "warpgroup, step > 0 && (kWgrad || step != 1));", f"ops/gemm/sm90/{BF16}.cu", "bfloat16"),
    ("bfloat16 weight gradients forget the first step", f"ops/gemm/sm90/{BF16}.cuh", "warpgroup, step > 0);",
     "warpgroup, step > 0 && (!kWgrad || step != 1));", f"ops/gemm/sm90/{BF16}.cu", "bfloat16"),
    ("bfloat16 weight gradients: later parts of a sum are lost", f"ops/gemm/sm90/{BF16}.cuh",
     "if (p.accumulate || !work.is_last_part)", "if (p.accumulate)", f"ops/gemm/sm90/{BF16}.cu", "bfloat16"),
    ("bfloat16 weight gradients count the next expert's rows", f"ops/gemm/sm90/{BF16}.cuh",
     "if (num_valid < kStepK)", "if (num_valid < 0)", f"ops/gemm/sm90/{BF16}.cu", "bfloat16"),
    ("8-bit products: rows have their neighbours' scales", f"ops/gemm/sm90/{FP8}.cuh",
     "d[i] += scale[i / 2 % 2] * sum[i];", "d[i] += scale[0] * sum[i];", f"ops/gemm/sm90/{FP8}.cu", "mxfp8"),
    ("8-bit products, float32 scales: the same", f"ops/gemm/sm90/{FP8}.cuh",
     "d[i] += scale[i / 2 % 2] * sum[i];", "d[i] += scale[0] * sum[i];", f"ops/gemm/sm90/{FP8}.cu", "fp8_blockwise"),
    ("8-bit products forget every fourth step", f"ops/gemm/sm90/{FP8}.cuh", "add(d[wave], sum, scale);",
     "if (first != 1) add(d[wave], sum, scale);", f"ops/gemm/sm90/{FP8}.cu", "mxfp8"),
    ("8-bit products with blocks of 256 forget each second step", f"ops/gemm/sm90/{FP8}.cuh",
     "multiply_stage(shared.stages[at.stage], true);", "", f"ops/gemm/sm90/{FP8}.cu", "mxfp8_256"),
    ("blocks of 256: gradients' tiles ignore the tiles beside them", "ops/quantize/tile_quantizer.cuh",
     "return max(largest, other.of_others[0][row]);", "return largest;", "ops/quantize/quantize_cuda.cu",
     "mxfp8_256"),
    ("blocks of 256: weights' tiles ignore one of the other three", "ops/quantize/tile_quantizer.cuh",
     "if (exists[i]) largest = max(largest, of_others[i]);",
     "if (exists[i] && i < 3) largest = max(largest, of_others[i]);",
     "ops/quantize/quantize_cuda.cu", "mxfp8_256"),
    ("8-bit products: all experts have the first one's scales", f"ops/gemm/sm90/{FP8}.cuh",
     "kFloat ? std::int64_t{work.expert} *", "kFloat ? std::int64_t{0} *", f"ops/gemm/sm90/{FP8}.cu", "fp8_blockwise"),
    ("8-bit weight gradients: rows have their neighbours' scales", f"ops/gemm/sm90/{FP8}.cuh",
     "* sum[i] * scale[i / 2 % 2];", "* sum[i] * scale[0];", f"ops/gemm/sm90/{FP8}.cu", "fp8_blockwise"),
    ("8-bit weight gradients: blocks of columns have no scales", f"ops/gemm/sm90/{FP8}.cuh",
     "const float of_columns = scales_j[j];", "const float of_columns = 1.0f;", f"ops/gemm/sm90/{FP8}.cu", "mxfp8"),
    ("8-bit weight gradients: columns have others' scales", f"ops/gemm/sm90/{FP8}.cuh",
     "scale_position(j0 % kBox + x)", "(j0 % kBox + x)", f"ops/gemm/sm90/{FP8}.cu", "fp8_blockwise"),
    ("8-bit weight gradients: later parts of a sum are lost", f"ops/gemm/sm90/{FP8}.cuh",
     "if (p.accumulate || !work.is_last_part)", "if (p.accumulate)", f"ops/gemm/sm90/{FP8}.cu", "mxfp8"),
    ("exact products: both blocks have the first one's scale", f"ops/gemm/sm90/{EXACT}.cuh",
     "shared.scales[at.stage][in_tile][t / 2]", "shared.scales[at.stage][in_tile][0]",
     f"ops/gemm/sm90/{FP8}.cu", "mxfp8_exact"),
    ("exact products forget the second step", f"ops/gemm/sm90/{EXACT}.cuh", "      multiply<kColumns>(d, a);",
     "      if (k != 1) multiply<kColumns>(d, a);", f"ops/gemm/sm90/{FP8}.cu", "mxfp8_exact"),
    ("exact weight gradients: rows have their neighbours' scales", "ops/gemm/quantized_gemm_cuda.cu",
     "scales[(row + i) * (num_rows / mx::kBlock) +", "scales[row * (num_rows / mx::kBlock) +",
     "ops/gemm/quantized_gemm_cuda.cu", "mxfp8_exact"),
    ("quantizer: scales are rounded down", "ops/quantize/tile_quantizer.cuh", "mx::scale_byte(largest, format.mode)",
     "mx::scale_byte(largest, mx::ScalingMode::kFloor)", "ops/quantize/quantize_cuda.cu", "mxfp8_exact"),
    ("quantizer: a wide block's scale is that of its first half", "ops/quantize/tile_quantizer.cuh",
     "std::uint32_t largest = max(max(amax[0], amax[1]), max(amax[2], amax[3]));",
     "std::uint32_t largest = max(amax[0], amax[1]);",
     "ops/quantize/quantize_cuda.cu", "fp8_blockwise"),
    ("SwiGLU quantizes with scales that are rounded down", "ops/quantize/tile_quantizer.cuh",
     "mx::scale_byte(largest, format.mode)", "mx::scale_byte(largest, mx::ScalingMode::kFloor)",
     "ops/elementwise/swiglu_cuda.cu",
     "mxfp8_exact"),
    ("rows are gathered and quantized with scales that are rounded down", "ops/quantize/tile_quantizer.cuh",
     "mx::scale_byte(largest, format.mode)", "mx::scale_byte(largest, mx::ScalingMode::kFloor)",
     "ops/routing/permute_cuda.cu",
     "mxfp8_exact"),
    ("RMSNorm quantizes with scales that are rounded down", "ops/quantize/tile_quantizer.cuh",
     "mx::scale_byte(largest, format.mode)", "mx::scale_byte(largest, mx::ScalingMode::kFloor)",
     "ops/norm/rmsnorm_cuda.cu", "mxfp8_exact"),
    ("dense products assign where they should add", "ops/gemm/gemm_cuda.cu", "key.accumulate ? 1.0f : 0.0f", "0.0f",
     "ops/gemm/gemm_cuda.cu", "bfloat16"),
    ("attention's scale is 0.5 % off", "ops/attention/mla_attention_cuda.cu", ".scale = dims.scale,",
     ".scale = dims.scale * 1.005f,", "ops/attention/mla_attention_cuda.cu", "bfloat16"),
    ("attention: the shared key's gradient misses a head", "ops/attention/mla_attention_cuda.cu",
     "for (unsigned head = 0;", "for (unsigned head = 1;", "ops/attention/mla_attention_cuda.cu", "bfloat16"),
    ("combine: a token's last row has no weight", "ops/routing/permute_cuda.cu", "if (begin + i >= top_k) break;",
     "if (begin + i >= top_k - 1) break;", "ops/routing/permute_cuda.cu", "bfloat16"),
    ("RMSNorm: the weight's gradient misses a warp's rows", "ops/norm/rmsnorm_cuda.cu",
     "i < kMaxThreads / kWarp; ++i) sum +=",
     "i < kMaxThreads / kWarp - 1; ++i) sum +=", "ops/norm/rmsnorm_cuda.cu", "bfloat16"),
    ("embedding: long runs miss a row", "ops/elementwise/embedding_cuda.cu", "for (int line = 0; line < count;",
     "for (int line = 1; line < count;", "ops/elementwise/embedding_cuda.cu", "bfloat16"),
    ("cross-entropy: the label's part is 0.5 % off", "ops/loss/cross_entropy_cuda.cu",
     "i == at_label ? x[i] - scale :", "i == at_label ? x[i] - scale * 1.005f :", "ops/loss/cross_entropy_cuda.cu",
     "bfloat16"),
    # By less than half a step of 8 bits it would be rounded away.
    ("cross-entropy in 8 bits: the label's part is 10 % off", "ops/loss/cross_entropy_cuda.cu",
     "i == at_label ? x[i] - scale :", "i == at_label ? x[i] - scale * 1.1f :", "ops/loss/cross_entropy_cuda.cu",
     "mxfp8_output"),
]

# These drop or damage one exchange between ranks. Cases of GradientsOnGpus must fail. They need two GPUs.
MESH_MUTANTS = [
    ("FSDP: a unit's gradients are not summed", "params/unit_slots.cc",
     "bucket.unit != slot.unit || !table_->sharded(bucket)",
     "bucket.unit != slot.unit || bucket.unit == 2 || !table_->sharded(bucket)", "params/unit_slots.cc",
     "fsdp2_bfloat16"),
    ("FSDP in bfloat16: the last rank's gradients are not summed", "comm/gpu_group_kernels.cu", "rank < num_parts;",
     "rank < num_parts - 1;", "comm/gpu_group_kernels.cu", "fsdp2_reduce_bfloat16"),
    ("FSDP in bfloat16: the high numbers of words are those of their neighbours", "comm/gpu_group_kernels.cu",
     "rounded_pair(low.x, high.x)", "rounded_pair(low.x, high.y)", "comm/gpu_group_kernels.cu",
     "fsdp2_reduce_bfloat16"),
    ("replicas: gradients are not summed", "params/parameters.cc",
     'mesh().dp_replicate.all_reduce(all_gradients(), "the gradients of the replicas").wait();', "",
     "params/parameters.cc", "replicate2_bfloat16"),
    ("tensor parallelism: the shared key's gradient is not summed", "model/attention.cc",
     "reduce_scatter(context, TokenSet::kSequences, d_k_rope, wkv_a_.name())", "context.local_rows(d_k_rope)",
     "model/attention.cc", "tp2_bfloat16"),
    ("tensor parallelism: the last norm's gradient is not summed", "model/head.cc",
     "reduce_scatter(context, TokenSet::kMicroBatch, d_y_TD, name)", "context.local_rows(d_y_TD)", "model/head.cc",
     "tp2_fp8_blockwise"),
    ("context parallelism: gathered keys stay in the order of ranks", "model/token_exchange.cc",
     "return tokens == TokenSet::kSequences && context", "return tokens != TokenSet::kSequences && context",
     "model/token_exchange.cc", "cp2_bfloat16"),
    ("expert parallelism: the weights' gradients are not sent back", "ep/backends/standard_dispatcher.cc",
     'd_weights = from_experts(returned, back, saved, "weights\' gradients");', "",
     "ep/backends/standard_dispatcher.cc", "ep2_bfloat16"),
    ("direct expert parallelism: sums lose their weights", "ep/direct/direct_sums.cu", "fmaf(weight, to_float",
     "fmaf(1.0f, to_float", "ep/direct/direct_sums.cu", "ep2_direct_bfloat16"),
]

# These change operators of decoding, and streams. The operators' tests must fail.
OPERATOR_MUTANTS = [
    ("a call does not wait for its operands", "ops/kit/call_stream.cc", "call_.cuda->stream().wait(before_);", "{}",
     "ops/kit/call_stream.cc", "CallStreamCuda.ComesBehindWhatWasBeforeAndBeforeWhatFollows"),
    ("what follows a call does not wait for it", "ops/kit/call_stream.cc", "main_->wait(end);", "",
     "ops/kit/call_stream.cc", "CallStreamCuda.ComesBehindWhatWasBeforeAndBeforeWhatFollows"),
    ("a call does not wait for what ran beside the one before", "ops/kit/call_stream.cc", "call.wait(beside_done_);",
     "{}", "ops/kit/call_stream.cc", "CallStreamCuda.GoesOnWithTheCallBefore"),
    ("products of few rows do not wait for the rows", "ops/gemm/few_rows.cuh",
     "dots(columns, product.k);\n  wait_for_kernel_before();", "dots(columns, product.k);", "ops/gemm/gemm_cuda.cu",
     "GemmCuda.OfFewRowsThatComeLate"),
    ("products of few rows and an untransposed matrix do not wait for the rows", "ops/gemm/few_rows.cuh",
     "load(warp);\n  wait_for_kernel_before();", "load(warp);", "ops/gemm/gemm_cuda.cu",
     "GemmCuda.OfFewRowsThatComeLate"),
    ("long products of few rows use the first weights again", "ops/kit/dots.cuh", "if (begin > first()) load(begin);",
     "", "ops/gemm/gemm_cuda.cu", "GemmCuda.Shapes"),
    ("products of few rows and an untransposed matrix miss a warp", "ops/gemm/few_rows.cuh",
     "w < kUntransposedWarps; ++w", "w < kUntransposedWarps - 1; ++w", "ops/gemm/gemm_cuda.cu", "GemmCuda.OfABatch"),
    ("products of few rows: a warp's second column is its first", "ops/gemm/few_rows.cuh",
     "min(first + c, product.n - 1)", "min(first, product.n - 1)", "ops/gemm/gemm_cuda.cu", "GemmCuda.Shapes"),
    ("two products at once: the second one begins a block late", "ops/gemm/gemm_cuda.cu",
     "blockIdx.x >= products.first_blocks", "blockIdx.x > products.first_blocks", "ops/gemm/gemm_cuda.cu",
     "GemmCuda.OfTwoWeights"),
    ("few rows: the norm forgets the residual's last part", "ops/norm/rmsnorm_cuda.cu",
     "if (args.delta != nullptr) delta[part] =", "if (args.delta != nullptr && threadIdx.x < 32) delta[part] =",
     "ops/norm/rmsnorm_cuda.cu", "RmsNormCuda.Residual"),
    ("experts: the second kernel may begin before the choices are there", "ops/routing/moe_decode_cuda.cu",
     "wait_for_kernel_before();\n    let_next_kernel_begin();",
     "let_next_kernel_begin();\n    wait_for_kernel_before();", "ops/routing/moe_decode_cuda.cu",
     "MoeDecodeCuda.OfTokensOrChoicesThatComeLate"),
    ("experts: the second kernel does not wait for the first", "ops/routing/moe_decode_cuda.cu",
     "dots(w, args.hidden);\n    wait_for_kernel_before();", "dots(w, args.hidden);", "ops/routing/moe_decode_cuda.cu",
     "MoeDecodeCuda.OfTokensOrChoicesThatComeLate"),
    ("experts: all choices have the first one's weight", "ops/routing/moe_decode_cuda.cu",
     "args.weights[token * args.top_k + k] *", "args.weights[token * args.top_k] *", "ops/routing/moe_decode_cuda.cu",
     "MoeDecodeCuda.AsOnTheCpu"),
    ("experts: gate and up change places", "ops/routing/moe_decode_cuda.cu",
     "{gate_D, gate_D + gate_rows * args.dim}", "{gate_D + gate_rows * args.dim, gate_D}",
     "ops/routing/moe_decode_cuda.cu", "MoeDecodeCuda.AsOnTheCpu"),
    ("experts: the shared ones' first part is read for all of their parts", "ops/routing/moe_decode_cuda.cu",
     "args.shared_w13 + part * args.hidden * args.dim", "args.shared_w13", "ops/routing/moe_decode_cuda.cu",
     "MoeDecodeCuda.AsOnTheCpu"),
    ("experts: parts beyond the warps are left out", "ops/routing/moe_decode_cuda.cu",
     "part < args.num_shared + args.top_k; part += kDownWarps", "part < kDownWarps; part += kDownWarps",
     "ops/routing/moe_decode_cuda.cu", "MoeDecodeCuda.AsOnTheCpu"),
    ("new tokens: k_rope is rotated as at the first position", "ops/attention/mla_decode_cuda.cu",
     "tokens.rotate(k_rope + 2 * i, position, i,", "tokens.rotate(k_rope + 2 * i, 0, i,",
     "ops/attention/mla_decode_cuda.cu", "MlaDecodeCuda.NewTokensAreMadeReadyAsOnTheCpu"),
    ("new tokens: the kernel does not wait for the one in front", "ops/attention/mla_decode_cuda.cu",
     "wait_for_kernel_before();\n#pragma unroll", "#pragma unroll", "ops/attention/mla_decode_cuda.cu",
     "MlaDecodeCuda.NewTokensThatComeLate"),
    ("new tokens: queries are rotated too early", "ops/attention/mla_decode_cuda.cu",
     "wait_for_kernel_before();\n  tokens.rotate(at,", "tokens.rotate(at,", "ops/attention/mla_decode_cuda.cu",
     "MlaDecodeCuda.NewTokensThatComeLate"),
    ("new tokens: heads have their neighbours' W_k", "ops/attention/mla_decode_cuda.cu",
     "block % blocks_per_head, block / blocks_per_head", "block % blocks_per_head, block / blocks_per_head / 2 * 2",
     "ops/attention/mla_decode_cuda.cu", "MlaDecodeCuda.NewTokensAreMadeReadyAsOnTheCpu"),
    ("attention: the queries are read too early", "ops/attention/mla_decode_tiles.cuh",
     "  wait_for_kernel_before();\n  load_queries(args, token, first_head, shared.queries);",
     "  load_queries(args, token, first_head, shared.queries);\n  wait_for_kernel_before();",
     "ops/attention/mla_decode_cuda.cu", "MlaDecodeCuda.StoreAndDecode"),
    ("attention: the row in front of the newest one is read for it", "ops/attention/mla_decode_tiles.cuh",
     "copy_row(text + (end - 1) * args.row(),", "copy_row(text + max(end - 2, std::int64_t{0}) * args.row(),",
     "ops/attention/mla_decode_cuda.cu", "MlaDecodeCuda.StoreAndDecode"),
    ("attention: a quarter of each score is missing", "ops/attention/mla_decode_tiles.cuh",
     "quarter < kQuarters; ++quarter", "quarter < kQuarters - 1; ++quarter", "ops/attention/mla_decode_cuda.cu",
     "MlaDecodeCuda.StoreAndDecode"),
    ("attention: sums are not made smaller when a larger score comes", "ops/attention/mla_decode_tiles.cuh",
     "shared.factors[h] = factor;", "shared.factors[h] = 1.0f;", "ops/attention/mla_decode_cuda.cu",
     "MlaDecodeCuda.StoreAndDecode"),
    ("attention: a tile's last rows are weighed though they do not exist", "ops/attention/mla_decode_tiles.cuh",
     "const bool exists = lane < count;", "const bool exists = true;", "ops/attention/mla_decode_cuda.cu",
     "MlaDecodeCuda.StoreAndDecode"),
    ("attention: blocks are merged without regard to their largest scores", "ops/attention/mla_decode_tiles.cuh",
     "rescaling(of_block.total, of_block.largest, largest)", "of_block.total == 0.0f ? 0.0f : 1.0f",
     "ops/attention/mla_decode_cuda.cu", "MlaDecodeCuda.StoreAndDecode"),
    ("attention: the parts are merged too early", "ops/attention/mla_decode_tiles.cuh",
     "dots(w, args.latent());\n  wait_for_kernel_before();", "dots(w, args.latent());",
     "ops/attention/mla_decode_cuda.cu", "MlaDecodeCuda.StoreAndDecode"),
]

STEP_TEST, OPERATORS_TEST = "tests/step/test_step_cuda", "tests/ops/test_ops_cuda"
# Of each kind: the mutants, the test program, and the filter that chooses a mutant's case.
KINDS = {"gradients": (MUTANTS, STEP_TEST, "*CudaGradients*/{}"),
         "meshes": (MESH_MUTANTS, STEP_TEST, "*GradientsOnGpus*/{}"),
         "operators": (OPERATOR_MUTANTS, OPERATORS_TEST, "{}")}


def problems():
    """Returns the mutants that no longer fit the sources. `make test` expects none."""
    found = []
    for what, changed, before, _, source, _ in MUTANTS + MESH_MUTANTS + OPERATOR_MUTANTS:
        for path in (changed, source):
            if not (ROOT / "src" / path).exists():
                found.append(f"{what}: no src/{path}")
        path = ROOT / "src" / changed
        times = path.read_text().count(before) if path.exists() else 1
        if times != 1:
            found.append(f"{what}: src/{changed} has {times} times and not once: {before}")
    return found


def run(command, folder, seconds=600):
    """Returns the command's exit status, or None if it was ended after that time, and what it printed."""
    # In a group of its own, so that the shell's programs end with it.
    running = subprocess.Popen(command, shell=True, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, start_new_session=True)
    try:
        said, _ = running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        return None, f"no end within {seconds} s\n{running.communicate()[0]}"
    return running.returncode, said


def must(command, folder):
    status, said = run(command, folder)
    if status != 0:
        sys.exit(f"{command}\n{said}")


def link_command(test, build, objects, output):
    """Returns the command that links the test with `objects` before the libraries. The linker then ignores the
    libraries' versions of these objects."""
    _, commands = run(f"ninja -t commands {test}", build)
    parts = commands.strip().splitlines()[-1].split(" && ")
    link = next(part for part in parts if f"-o {test} " in part)
    return link.replace(f"-o {test} ", f"-o {output} {objects} ")


def of_unity(source, commands, target):
    """Returns the command for the sources that are compiled as one with `source`. `target` becomes a source that
    includes the same ones from the mutant's folder."""
    for unity in (file for file in commands if "/Unity/" in file):
        text = pathlib.Path(unity).read_text()
        if f'"{ROOT / "src" / source}"' in text:
            target.write_text(text.replace(str(ROOT / "src"), str(target.with_suffix(".src"))))
            return commands[unity].replace(unity, str(target))
    sys.exit(f"no command compiles src/{source}")


def make(mutant, test, build, commands, scratch, program):
    """Builds the test program with the mutant, without symbols. Returns the mutant's description."""
    what, changed, before, after, source, _ = mutant
    copy, made = (scratch / f"{program.name}.{end}" for end in ("src", "o"))
    shutil.copytree(ROOT / "src", copy)
    path = copy / changed
    path.write_text(path.read_text().replace(before, after))
    command = commands.get(str(ROOT / "src" / source)) or of_unity(source, commands, scratch / f"{program.name}.cxx")
    command = command.replace(str(ROOT / "src"), str(copy))
    must(re.sub(r" -o \S+", f" -o {made}", command), build)
    must(link_command(test, build, made, program), build)
    must(f"strip {program}", build)
    shutil.rmtree(copy)
    return what


def make_all(mutants, test, build, jobs):
    """Builds the programs of the mutants, which are given by program."""
    commands = {one["file"]: one["command"] for one in json.loads((build / "compile_commands.json").read_text())}
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        made = [pool.submit(make, mutant, test, build, commands, pathlib.Path(scratch), program)
                for program, mutant in mutants.items()]
        for one in made:
            print(f"made: {one.result()}", file=sys.stderr, flush=True)


def test_all(mutants, test, case, build):
    """Tests the programs of the mutants, which are given by program, and returns how many are noticed."""
    # A case that fails without a mutant would notice everything.
    for name in sorted({mutant[-1] for mutant in mutants.values()}):
        status, said = run(f"{test} --gtest_filter={case.format(name)}", build)
        if status != 0 or "[       OK ]" not in said:
            sys.exit(f"{name} does not pass without a mutant\n{said}")

    def test_one(program, mutant):
        return run(f"{program} --gtest_filter={case.format(mutant[-1])}", build)

    num_noticed = 0
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for mutant, (status, said) in zip(mutants.values(), pool.map(test_one, mutants, mutants.values())):
            # A test that fails says which parameters are wrong. A program that ends in another way has shown nothing.
            noticed = status == 1 and "[  FAILED  ]" in said
            num_noticed += noticed
            how = f"{said.count('Failure')} bounds" if noticed else f"exit status {status}"
            print(f"{'noticed' if noticed else 'NOT NOTICED'}: {mutant[0]} ({mutant[-1]}): {how}", flush=True)
    return num_noticed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--of", choices=KINDS, default="gradients", help="what the mutants change")
    parser.add_argument("--only", default="", help="mutants whose description has this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    parser.add_argument("--make", type=pathlib.Path, metavar="FOLDER", help="only build the programs, into this folder")
    parser.add_argument("--made", type=pathlib.Path, metavar="FOLDER", help="test the programs that --make built there")
    args = parser.parse_args()

    if problems():
        sys.exit("\n".join(problems()))
    build = args.build.resolve()
    all_mutants, test, case = KINDS[args.of]
    with tempfile.TemporaryDirectory() as own:
        folder = (args.make or args.made or pathlib.Path(own)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        mutants = {folder / f"{args.of}.{number}": mutant for number, mutant in enumerate(all_mutants)
                   if args.only in mutant[0]}
        if not args.made:
            make_all(mutants, test, build, args.jobs)
        if args.make:
            return
        num_noticed = test_all(mutants, test, case, build)
    print(f"{num_noticed} of {len(mutants)} mutants noticed")
    sys.exit(num_noticed < len(mutants) or not mutants)


if __name__ == "__main__":
    main()

"""Golden logits of Hugging Face's transformers, on weights that `tessera convert` exported.

Trains small models for a few steps, exports them with `tessera convert --to hf`, loads the exported folders with
DeepseekV3ForCausalLM (asserting that no key is missing or unexpected) and stores its logits beside them:

    tests/golden/hf/<case>/            the exported folder: config.json, index, shards in float32
    tests/golden/hf/<case>/golden.safetensors   tokens [B, S] int32, logits [B, S, V] float32 of transformers
    tests/golden/hf/fp8/               case "groups" in DeepSeek's FP8 form; logits are of the dequantized weights

    python make_hf_goldens.py --tessera ../../build/release/src/app/tessera
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden" / "hf"
TEXT = "\n".join(
    " ".join(f"{w}{(i * 7 + j * j) % 23}" for j, w in enumerate("the quick brown fox jumps over a lazy dog".split()))
    for i in range(400)
)

COMMON = """
[model.args]
vocab_size = 260
dim = 48
inter_dim = 64
moe_inter_dim = 24
n_layers = 3
n_dense_layers = 1
n_heads = 3
norm_eps = 1e-6
num_experts = 8
score_func = "sigmoid"
load_balance_coeff = 0.05
kv_lora_rank = 32
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 12
"""
CASES = {
    # query compression, expert groups, normalised and scaled routing weights
    "groups": "num_shared_experts = 1\ntop_k = 3\nq_lora_rank = 20\nroute_norm = true\nroute_scale = 2.5\n"
    "n_expert_groups = 4\nn_limited_groups = 2\n",
    # none of these; YaRN, because sequences are longer than original_seq_len
    "yarn": "num_shared_experts = 2\ntop_k = 2\noriginal_seq_len = 16\nrope_factor = 8.0\nmscale = 0.7\n",
}


def run(*command):
    print("+", " ".join(str(part) for part in command))
    subprocess.run([str(part) for part in command], check=True)


def logits_of(folder, tokens):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert type(model).__name__ == "DeepseekV3ForCausalLM", type(model)
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    with torch.no_grad():
        return model.eval()(input_ids=tokens.long(), use_cache=False).logits.float()


def store_golden(folder, tokens, logits):
    save_file({"tokens": tokens.int(), "logits": logits.contiguous()}, folder / "golden.safetensors")


def export_case(tessera, name, args, work):
    (work / "text.txt").write_text(TEXT)
    data = work / "data"
    if not data.exists():
        run(tessera, "data", "prepare", "--input", work / "text.txt", "--tokenizer", "bytes", "--output", data,
            "--val-fraction", "0")
    config = work / f"{name}.toml"
    config.write_text(COMMON + args)
    out = work / name
    run(tessera, "train", config, f"--job.dump_folder={out}", f"--training.dataset_path={data}", "--training.steps=30",
        "--training.seq_len=64", "--training.local_batch_size=4", "--training.mixed_precision_param=float32",
        "--checkpoint.enable", "--optimizer.lr=0.01", "--lr_scheduler.warmup_steps=2")
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    run(tessera, "convert", "--to", "hf", "--input", out, "--output", folder, "--dtype", "float32", "--max-shard-gb",
        "0.0002")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (2, 48), generator=generator)
    logits = logits_of(folder, tokens)
    print(f"{name}: logits up to {logits.abs().max():.3f}")
    store_golden(folder, tokens, logits)
    # The same in bfloat16 must load, too.
    run(tessera, "convert", "--to", "hf", "--input", out, "--output", work / f"{name}-bf16")
    logits_of(work / f"{name}-bf16", tokens)


def quantize(weight):
    """DeepSeek's form: e4m3 numbers and a factor per 128 x 128 block, from the block's largest magnitude."""
    rows, columns = weight.shape
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty((rows + 127) // 128, (columns + 127) // 128)
    for r in range(0, rows, 128):
        for c in range(0, columns, 128):
            block = weight[r : r + 128, c : c + 128]
            scale = block.abs().max() / 448.0
            data[r : r + 128, c : c + 128] = (block / scale).to(torch.float8_e4m3fn)
            scales[r // 128, c // 128] = scale
    return data, scales


def make_fp8(work):
    """The case "groups" with the linear layers of the blocks in FP8, as DeepSeek-V3 is published."""
    source, folder, plain = GOLDEN / "groups", GOLDEN / "fp8", work / "dequantized"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plain.mkdir()
    weights = {}
    for shard in sorted(source.glob("model-*.safetensors")):
        weights.update(load_file(shard))
    stored, dequantized = {}, {}
    for name, weight in weights.items():
        quantizes = "_proj" in name and weight.dim() == 2
        stored[name] = dequantized[name] = weight
        if quantizes:
            data, scales = quantize(weight)
            stored[name], stored[name + "_scale_inv"] = data, scales
            dequantized[name] = data.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[
                : weight.shape[0], : weight.shape[1]
            ]
        elif "e_score" not in name:
            stored[name] = weight.bfloat16()
            dequantized[name] = stored[name].float()
    config = json.loads((source / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    save_file(dequantized, plain / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(stored, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: "model-00001-of-00001.safetensors" for name in sorted(stored)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    tokens = load_file(source / "golden.safetensors")["tokens"]
    store_golden(folder, tokens, logits_of(plain, tokens))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", type=pathlib.Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as work:
        for name, args in CASES.items():
            export_case(options.tessera.resolve(), name, args, pathlib.Path(work))
        make_fp8(pathlib.Path(work))


if __name__ == "__main__":
    main()

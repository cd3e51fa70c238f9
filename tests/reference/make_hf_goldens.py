"""Golden logits of Hugging Face's transformers, on weights that `tessera convert` exported.

Trains small models, exports them with `tessera convert --to hf`, loads the exported folders (asserting that no key is
missing or unexpected), and stores what transformers computes beside them:

    tests/golden/hf/<case>/            the exported folder: config.json, index, shards in float32; no Python files
    tests/golden/hf/<case>/golden.safetensors   tokens [B, S] int32, logits [B, S, V] float32,
                                                prompts [B, P] int32, greedy [B, N] int32 that continue them
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
qk_rope_head_dim = 8
num_experts = 8
"""
SIGMOID = """
dim = 48
inter_dim = 64
moe_inter_dim = 24
n_layers = 3
n_heads = 3
norm_eps = 1e-6
score_func = "sigmoid"
load_balance_coeff = 0.05
kv_lora_rank = 32
qk_nope_head_dim = 16
v_head_dim = 12
"""
SOFTMAX = """
dim = 32
inter_dim = 48
moe_inter_dim = 16
n_heads = 2
kv_lora_rank = 16
qk_nope_head_dim = 8
v_head_dim = 8
"""
YARN = "original_seq_len = 16\nrope_factor = 8.0\n"
# Class of transformers, training steps, model.args.
CASES = {
    # This case has query compression, expert groups, and normalised and scaled routing weights.
    "groups": ("DeepseekV3ForCausalLM", 30, SIGMOID + "num_shared_experts = 1\ntop_k = 3\nq_lora_rank = 20\n"
               "route_norm = true\nroute_scale = 2.5\nn_expert_groups = 4\nn_limited_groups = 2\n"),
    # This case has none of them. It has YaRN, because sequences are longer than original_seq_len.
    "yarn": ("DeepseekV3ForCausalLM", 30, SIGMOID + YARN + "num_shared_experts = 2\ntop_k = 2\nmscale = 0.7\n"),
    # For this case the plain form of a softmax router is exact: only the loss balances the experts.
    "v2": ("DeepseekV2ForCausalLM", 300, SOFTMAX + "n_layers = 4\nnorm_eps = 1e-6\nload_balance_coeff = 0.0\n"
           "seq_balance_loss_coeff = 0.001\n"),
    # This case adds query compression, two dense layers, YaRN with mscale, and scaled routing weights.
    "v2_yarn": ("DeepseekV2ForCausalLM", 300, SOFTMAX + YARN + "n_layers = 4\nnorm_eps = 1e-6\n"
                "load_balance_coeff = 0.0\n"
                "seq_balance_loss_coeff = 0.001\nq_lora_rank = 12\nn_dense_layers = 2\nmscale = 0.7\n"
                "route_scale = 2.0\ntop_k = 2\n"),
    # This case has what neither class computes: softmax scores with an expert bias, groups, no shared experts, norm_eps
    # in MLA's norms, and YaRN without mscale. It also has a multi-token prediction module, which transformers does not
    # load.
    "remote_code": ("TesseraForCausalLM", 300, SOFTMAX + YARN + "norm_eps = 1e-3\nnum_shared_experts = 0\n"
                    "route_norm = true\nn_expert_groups = 4\nn_limited_groups = 2\nmscale = 0.0\n"
                    "num_mtp_modules = 1\nn_layers = 3\n"),
}
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 16, 32


def run(*command):
    print("+", " ".join(str(part) for part in command))
    subprocess.run([str(part) for part in command], check=True)


def load(folder, class_name):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, trust_remote_code=True
    )
    assert type(model).__name__ == class_name, type(model)
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    return model.eval()


@torch.no_grad()
def store_golden(folder, model):
    """Stores logits of random tokens and the continuations of texts. No choice of a token is a near-tie."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (2, 48), generator=generator)
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    prompts = torch.tensor([list(TEXT[at : at + NUM_PROMPT_TOKENS].encode()) for at in (0, 100)])
    model.generation_config.eos_token_id = None
    texts = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
    )
    best = model(input_ids=texts, use_cache=False).logits[:, NUM_PROMPT_TOKENS - 1 : -1].topk(2)
    greedy = texts[:, NUM_PROMPT_TOKENS:]
    margin = (best.values[..., 0] - best.values[..., 1]).min()
    assert torch.equal(best.indices[..., 0], greedy) and margin > 1e-3, margin
    print(f"{folder.name}: logits up to {logits.abs().max():.3f}, greedy margin {margin:.4f}")
    golden = {"tokens": tokens, "prompts": prompts, "greedy": greedy}
    golden = {name: numbers.int().contiguous() for name, numbers in golden.items()}
    save_file(golden | {"logits": logits.contiguous()}, folder / "golden.safetensors")


def export_case(tessera, name, work):
    class_name, steps, args = CASES[name]
    (work / "text.txt").write_text(TEXT)
    data = work / "data"
    if not data.exists():
        run(tessera, "data", "prepare", "--input", work / "text.txt", "--tokenizer", "bytes", "--output", data,
            "--val-fraction", "0")
    config = work / f"{name}.toml"
    config.write_text(COMMON + args)
    out = work / name
    run(tessera, "train", config, f"--job.dump_folder={out}", f"--training.dataset_path={data}",
        f"--training.steps={steps}",
        "--training.seq_len=64", "--training.local_batch_size=4", "--training.mixed_precision_param=float32",
        "--checkpoint.enable", "--optimizer.lr=0.01", "--lr_scheduler.warmup_steps=2")
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    form = "remote-code" if class_name == "TesseraForCausalLM" else "auto"
    convert = [tessera, "convert", "--to", "hf", "--form", form, "--input", out]
    run(*convert, "--output", folder, "--dtype", "float32", "--max-shard-gb", "0.0002")
    store_golden(folder, load(folder, class_name))
    for file in folder.glob("*.py"):
        file.unlink()  # the test compares them with src/checkpoint/transformers
    # The model in bfloat16 must load, too.
    run(*convert, "--output", work / f"{name}-bf16")
    load(work / f"{name}-bf16", class_name)


def quantize(weight):
    """Quantizes to DeepSeek's form: e4m3 numbers and a factor per 128 x 128 block, from the block's largest
    magnitude."""
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
    """Makes the case "groups" with the linear layers of the blocks in FP8, as DeepSeek-V3 is published."""
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
    store_golden(folder, load(plain, CASES["groups"][0]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", type=pathlib.Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as work:
        for name in CASES:
            export_case(options.tessera.resolve(), name, pathlib.Path(work))
        make_fp8(pathlib.Path(work))


if __name__ == "__main__":
    main()

// A run of a small model with every kind of layer, which takes a moment. It is for tests of what happens to runs.
#pragma once

namespace tessera {

inline constexpr const char* kShortRun = R"(
[model.args]
vocab_size = 258
dim = 32
inter_dim = 48
moe_inter_dim = 16
n_layers = 2
n_dense_layers = 1
n_heads = 2
num_experts = 8
num_shared_experts = 1
top_k = 2
kv_lora_rank = 24
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16
load_balance_coeff = 0.01
[training]
local_batch_size = 1
global_batch_size = 4
seq_len = 16
steps = 8
num_threads = 1
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 2
)";

}  // namespace tessera

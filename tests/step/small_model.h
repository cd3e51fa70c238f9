// A model with every kind of layer that trains in no time. Its sizes are multiples of 2 and 4 ranks of any axis.
#pragma once

namespace tessera {

inline constexpr const char* kSmallModel = R"(
[model.args]
vocab_size = 96
dim = 64
n_layers = 4
n_dense_layers = 1
n_heads = 4
inter_dim = 96
moe_inter_dim = 32
num_experts = 8
num_shared_experts = 1
top_k = 3
q_lora_rank = 0
kv_lora_rank = 32
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16
eos_id = 1
load_balance_coeff = 0.01
)";

}  // namespace tessera

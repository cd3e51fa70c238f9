"""Configuration of a model that Tessera trained. The keys are those of DeepSeek-V3's config.json, plus "yarn"."""

from transformers import PretrainedConfig


class TesseraConfig(PretrainedConfig):
    model_type = "tessera"

    def __init__(
        self,
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=6,
        first_k_dense_replace=1,  # number of first layers with a dense feed-forward network
        num_nextn_predict_layers=0,  # modules of multi-token prediction, which are not loaded
        num_attention_heads=16,
        q_lora_rank=None,  # None: queries are not compressed
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        scoring_func="softmax",  # or "sigmoid"
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        yarn=None,
        use_cache=True,
        initializer_range=0.02,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.moe_intermediate_size = moe_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.first_k_dense_replace = first_k_dense_replace
        self.num_nextn_predict_layers = num_nextn_predict_layers
        self.num_attention_heads = num_attention_heads
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.n_routed_experts = n_routed_experts
        self.n_shared_experts = n_shared_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.n_group = n_group
        self.topk_group = topk_group
        self.scoring_func = scoring_func
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.yarn = yarn
        self.use_cache = use_cache
        self.initializer_range = initializer_range
        super().__init__(**kwargs)

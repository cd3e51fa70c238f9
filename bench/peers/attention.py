"""cuDNN's attention through PyTorch in the shapes of `tessera bench attention`. It is given joined keys."""

import torch
from timing import random, row
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DIM_QK, DIM_V = 192, 128


def main():
    for seqs, heads, length in ((4, 16, 4096), (1, 128, 4096), (2, 16, 8192)):
        shape = f"B{seqs} H{heads} S{length}"
        q, k, v, d_o = (random(seqs, length, heads, dim).transpose(1, 2) for dim in (DIM_QK, DIM_QK, DIM_V, DIM_V))
        for tensor in (q, k, v):
            tensor.requires_grad_()
        scores = seqs * heads * length * length  # of the lower triangle: half of them, and two operations each
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            def forward():
                return scaled_dot_product_attention(q, k, v, is_causal=True)

            row("attention fwd", shape, scores * (DIM_QK + DIM_V), forward)
            o = forward()
            row("attention bwd", shape, scores * (3 * DIM_QK + 2 * DIM_V),
                lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True))


if __name__ == "__main__":
    main()

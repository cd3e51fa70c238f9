"""Times cuDNN's attention through PyTorch in the shapes of `tessera bench attention`, from the same operands: queries,
the projection that holds every head's keys and values, and the rotated part of the keys that all heads share. Also
times it with keys that were joined before ("core"), which a model never has."""

import torch
from timing import random, row
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

NOPE, ROPE, DIM_V = 128, 64, 128
DIM_QK = NOPE + ROPE


def core(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def from_projections(q, kv, k_rope):
    heads = q.shape[2]
    k_nope, v = kv.split([NOPE, DIM_V], dim=-1)
    k = torch.cat([k_nope, k_rope.unsqueeze(2).expand(-1, -1, heads, -1)], dim=-1)
    return core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def both_ways(name, shape, scores, function, operands, d_o):
    for operand in operands:
        operand.requires_grad_()
    row(f"{name} fwd", shape, scores * (DIM_QK + DIM_V), lambda: function(*operands))
    o = function(*operands)
    row(f"{name} bwd", shape, scores * (3 * DIM_QK + 2 * DIM_V),
        lambda: torch.autograd.grad(o, operands, d_o, retain_graph=True))


def main():
    for seqs, heads, length in ((4, 16, 4096), (1, 128, 8192), (2, 16, 8192)):
        shape = f"B{seqs} H{heads} S{length}"
        # Half of the scores are in the lower triangle, and each takes two operations.
        scores = seqs * heads * length * length
        q, kv, d_o = (random(seqs, length, heads, dim) for dim in (DIM_QK, NOPE + DIM_V, DIM_V))
        both_ways("attention", shape, scores, from_projections, (q, kv, random(seqs, length, ROPE)), d_o)
        joined = tuple(random(seqs, length, heads, dim).transpose(1, 2) for dim in (DIM_QK, DIM_QK, DIM_V))
        both_ways("attention core", shape, scores, core, joined, d_o.transpose(1, 2))


if __name__ == "__main__":
    main()

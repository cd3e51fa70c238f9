"""Times PyTorch's bfloat16 products in the shapes of `tessera bench gemm`. The weight gradient is assigned, in
bfloat16."""

from timing import random, row


def main():
    for rows, n, m in ((8192, 8192, 8192), (16384, 2048, 2816)):
        shape, flop = f"{rows}x{m}x{n}", 2 * rows * n * m
        x, d_y, w = random(rows, n), random(rows, m), random(m, n)
        row("bf16 fwd", shape, flop, lambda: x @ w.t())
        row("bf16 dgrad", shape, flop, lambda: d_y @ w)
        row("bf16 wgrad =", shape, flop, lambda: d_y.t() @ x)


if __name__ == "__main__":
    main()

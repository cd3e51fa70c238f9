#!/usr/bin/env python3
"""Draws the README's figure, docs/loss-16b.svg, from the losses in docs/runs/16B-two-h200.tar.gz.

    bench/readme_figure.py           # writes it
    bench/readme_figure.py --check   # fails if the file differs; part of make test
"""

import json
import pathlib
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
RUNS = ROOT / "docs/runs/16B-two-h200.tar.gz"
FIGURE = ROOT / "docs/loss-16b.svg"
SIDES = {"bf16": "#5b6472", "mxfp8": "#d9480f"}
WINDOW = 50  # a point is the mean of this many steps
WIDTH, LEFT, RIGHT = 760, 56, 736
MARGIN = 0.25  # percent; compare calls a smaller difference equivalent


def losses(side):
    """Returns, by step, the mean of the seeds' losses."""
    of_seeds = []
    with tarfile.open(RUNS) as archive:
        for name in sorted(archive.getnames()):
            if f"/{side}/" in name and name.endswith("/metrics.jsonl"):
                lines = [json.loads(line) for line in archive.extractfile(name)]
                of_seeds.append({line["step"]: line["loss"] for line in lines if "loss" in line})
    assert of_seeds and all(seed.keys() == of_seeds[0].keys() for seed in of_seeds), side
    return [sum(seed[step] for seed in of_seeds) / len(of_seeds) for step in sorted(of_seeds[0])]


def smooth(values):
    """Returns means of WINDOW steps, with the last step of each."""
    return [(end, sum(values[end - WINDOW:end]) / WINDOW) for end in range(WINDOW, len(values) + 1, WINDOW // 2)]


def axes(top, bottom, ticks, place, label, unit=""):
    parts = [f'<text x="{LEFT}" y="{top - 10}" font-weight="600">{label}</text>']
    for tick in ticks:
        y = place(tick)
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}{unit}</text>')
    return parts


def draw():
    curves = {side: smooth(losses(side)) for side in SIDES}
    num_steps = curves["bf16"][-1][0]
    x = lambda step: LEFT + (RIGHT - LEFT) * step / num_steps  # noqa: E731
    path = lambda points, y: "M" + "L".join(f"{x(s):.1f} {y(v):.1f}" for s, v in points)  # noqa: E731

    lowest, highest = 2.0, 10.0
    loss_y = lambda v: 40 + 180 * (highest - v) / (highest - lowest)  # noqa: E731
    parts = axes(40, 220, [2, 4, 6, 8, 10], loss_y, "Training loss, 16B model on two H200s, mean of 3 seeds")
    for side, colour in SIDES.items():
        dash = ' stroke-dasharray="6 4"' if side == "mxfp8" else ""
        parts.append(f'<path d="{path(curves[side], loss_y)}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
    for place, (side, colour) in enumerate(SIDES.items()):
        at = RIGHT - 190 + 100 * place
        parts.append(f'<line x1="{at}" x2="{at + 24}" y1="60" y2="60" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{at + 30}" y="64">{side.upper()}</text>')

    difference = [(step, 100 * (a / b - 1)) for (step, a), (_, b) in zip(curves["mxfp8"], curves["bf16"])]
    span = 0.4
    assert max(abs(value) for step, value in difference) < span, "the difference leaves its panel"
    diff_y = lambda v: 310 - 40 * v / span  # noqa: E731
    parts.append(f'<rect x="{LEFT}" width="{RIGHT - LEFT}" y="{diff_y(MARGIN):.1f}" '
                 f'height="{diff_y(-MARGIN) - diff_y(MARGIN):.1f}" fill="#fff0e6"/>')
    parts += axes(270, 350, [-MARGIN, 0, MARGIN], diff_y, f"MXFP8 against BF16 (band: ±{MARGIN} %)", " %")
    parts.append(f'<path d="{path(difference, diff_y)}" fill="none" stroke="{SIDES["mxfp8"]}" stroke-width="2"/>')
    for step in range(0, num_steps + 1, 300):
        parts.append(f'<text x="{x(step):.1f}" y="372" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{RIGHT}" y="392" text-anchor="end">step</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 400" font-family="sans-serif" font-size="12" '
            'fill="#343a40">\n<title>Training loss of the 16B model in BF16 and in MXFP8</title>\n'
            f'<rect width="{WIDTH}" height="400" rx="8" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n")


if sys.argv[1:] == ["--check"]:
    if not FIGURE.exists() or FIGURE.read_text() != draw():
        sys.exit(f"{FIGURE.relative_to(ROOT)} is not what its losses give: run bench/readme_figure.py")
else:
    FIGURE.write_text(draw())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws learning curves, lists of {"seconds": …, "score": …} in JSON, into one SVG.

    hack/curve.py "CartPole-v1" out.svg "without kills"=a.json "with kills"=b.json
"""

import json
import math
import sys
from pathlib import Path

LEFT, TOP, WIDTH, HEIGHT = 60, 50, 560, 230
COLORS = ("#0072b2", "#d55e00", "#009e73")
title, out, *given = sys.argv[1:]
files = [g.split("=", 1) for g in given]
curves = {name: [(p["seconds"], p["score"]) for p in json.loads(Path(file).read_text())] for name, file in files}
xs, ys = ([p[k] for c in curves.values() for p in c] for k in (0, 1))


def ticks(least: float, most: float) -> list[float]:
    step = 10 ** math.floor(math.log10(most - least))
    step *= 0.2 if (most - least) / step < 2 else 0.5 if (most - least) / step < 5 else 1
    return [i * step for i in range(math.floor(least / step), math.ceil(most / step) + 1)]


seconds, scores = ticks(0, max(xs)), ticks(min(0, *ys), max(ys))


def at(x: float, y: float) -> tuple[float, float]:
    return LEFT + WIDTH * x / seconds[-1], TOP + HEIGHT * (scores[-1] - y) / (scores[-1] - scores[0])


def text(x: float, y: float, anchor: str, color: str, what: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="13" text-anchor="{anchor}" fill="{color}">{what}</text>'


parts = [
    '<svg xmlns="http://www.w3.org/2000/svg" width="660" height="330" viewBox="0 0 660 330"',
    'font-family="Helvetica, Arial, sans-serif"><rect width="660" height="330" fill="#ffffff"/>',
    f'<text x="24" y="28" font-size="16" font-weight="bold" fill="#222222">{title}</text>',
    text(LEFT + WIDTH, TOP + HEIGHT + 40, "end", "#5b6670", "seconds"),
]
for v in scores:
    x, y = at(0, v)
    parts += [f'<path d="M{x:.1f} {y:.1f}h{WIDTH}" stroke="#e3e7ea"/>', text(x - 8, y + 4, "end", "#5b6670", f"{v:g}")]
parts += [text(at(v, 0)[0], TOP + HEIGHT + 20, "middle", "#5b6670", f"{v:g}") for v in seconds]
for i, (color, (name, points)) in enumerate(zip(COLORS, curves.items())):
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in points))
    parts += [f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>']
    parts += [text(LEFT + 12, TOP + 18 + 18 * i, "start", color, name)] if len(curves) > 1 else []
Path(out).write_text("\n".join([*parts, "</svg>\n"]))

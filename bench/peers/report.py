# SPDX-License-Identifier: Apache-2.0
"""A run's results as a table in Markdown."""

from __future__ import annotations

import statistics

OURS = "ringbatch"


def cell(size: int, clients: int) -> str:
    return f"{size}x{clients}"


def median(results: dict, peer: str, name: str, figure: str = "requests_per_s") -> float | None:
    """Of the rounds; None if there is none."""
    entry = results["peers"].get(peer, {}).get("cells", {}).get(name)
    return statistics.median(r[figure] for r in entry["rounds"]) if entry and entry["rounds"] else None


def ratio(results: dict, peer: str, name: str) -> float | None:
    """ringbatch's Python client against the peer: the median of the rounds' own ratios."""
    cells = [results["peers"].get(p, {}).get("cells", {}).get(name) for p in (OURS, peer)]
    if not all(c and c["rounds"] for c in cells):
        return None
    pairs = zip(*([r["requests_per_s"] for r in c["rounds"]] for c in cells))
    return statistics.median(a / b if b else float("inf") for a, b in pairs)


def number(x: float) -> str:
    """Rounds to three digits; such a measurement has no more."""
    digits = len(str(int(x)))
    return f"{round(x, 3 - digits):,.0f}" if digits > 3 else f"{x:.0f}"


def times(x: float) -> str:
    return f"{x:.0f}" if x >= 10 else f"{x:.1f}"


def ms(x: float) -> str:
    return f"{x:.0f}" if x >= 10 else f"{x:.1f}" if x >= 1 else f"{x:.2f}"


def table(results: dict) -> str:
    """One table: requests/s, and in brackets the ratio of ringbatch's Python client to the peer."""
    cells = [(s, c) for s in results["sizes"] for c in results["clients"]]
    lines = [
        "| requests/s (ringbatch's Python client ÷ it); p50 | " + " | ".join(f"{s:,} B × {c}" for s, c in cells) + " |",
        "|---|" + "---|" * len(cells),
    ]
    for peer, found in results["peers"].items():
        row = []
        for s, c in cells:
            name = cell(s, c)
            r, times_it, p50 = median(results, peer, name), ratio(results, peer, name), median(results, peer, name, "p50_ms")
            if r is None or p50 is None:
                row.append("failed" if results["peers"][peer]["cells"].get(name, {}).get("failed") else "")
            elif peer == OURS:
                row.append(f"**{number(r)}**; {ms(p50)} ms")
            else:
                row.append(f"{number(r)} ({times(times_it)} ×); {ms(p50)} ms" if times_it else f"{number(r)}; {ms(p50)} ms")
        lines.append(f"| {found['title']} | " + " | ".join(row) + " |")
    for peer, why in results["failed"].items():
        lines.append(f"| {peer} | not measured: {why.replace('|', '/')} |" + " |" * (len(cells) - 1))
    return "\n".join(lines) + "\n"


def dated(results: dict) -> str:
    m = results["machine"]
    return (
        f"Measured {results['date']} at {results['commit']}: {m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB, Python {m['python']}; "
        f"{results['rounds']} rounds of {results['seconds']:g} s; load average {results['load_before']:.1f} before, "
        f"{results['load_after']:.1f} after."
    )

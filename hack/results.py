#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures, and writes docs/results/cpu.md from what was measured.

    hack/results.py measure [NAME…]   run the commands below, keep their JSON in docs/results/data (a quiet machine; half an hour)
    hack/results.py write             docs/results/cpu.md from that JSON
    hack/results.py check             fail if the page is not what the JSON says

A figure stands on that page alone, with its date and command; other pages link
to it.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs/results/data"
PAGE = ROOT / "docs/results/cpu.md"

# What is run, from the repository's root, after `make build` and `python/test.sh`; each takes --json FILE.
RUNS = {
    "cpu-64": "bin/bench --worker_num=64 --max_batch_size=32 --model_num=1 --wait_time=0.005",
    "cpu-1": "bin/bench --worker_num=1 --max_batch_size=32",
    "transport": "bin/bench transport",
    "python": "build/python-venv/bin/python bench/python/ratios.py --rounds 3",
    "gateway": "bin/bench gateway",
    "relay": "bin/bench relay",
}


def measure(names: list[str]) -> None:
    for name in names or RUNS:
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            print(f"== {name}: {RUNS[name]}", flush=True)
            subprocess.run([*RUNS[name].split(), "--json", out.name], cwd=ROOT, check=True)
            result = json.loads(Path(out.name).read_text())
        kept = {"date": datetime.date.today().isoformat(), "command": RUNS[name], "cores": os.cpu_count(), "result": result}
        DATA.mkdir(parents=True, exist_ok=True)
        (DATA / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def single(r: dict) -> list[str]:
    """A run of one configuration, against its bound."""
    lat = r["latency_ms"]
    rows = [f"| requests/s | {r['throughput']:,.0f} |", f"| share of the bound | {100 * r['ratio_to_bound']:.0f} % |"]
    if "ratio_to_alone" in r:
        rows.append(f"| latency against the model alone | {100 * (r['ratio_to_alone'] - 1):+.1f} % |")
    return ["| | |", "|---|---|", *rows, f"| latency avg / p50 / p99, ms | {lat['avg']:.2f} / {lat['p50']:.2f} / {lat['p99']:.2f} |"]


def checks(suite: dict) -> list[str]:
    """A suite whose checks name their own aim."""
    rows = []
    for c in suite["checks"]:
        reached = "yes" if c["ok"] else "**no**"
        rows.append(f"| {c['name']} | {c['measured']:.3g} | {c['must']} | {reached} | {c['behind']} |")
    return ["| what | measured | aim | reached | behind it |", "|---|---|---|---|---|", *rows]


def ratios(r: dict) -> list[str]:
    """bench/python/ratios.py: one entry per measurement."""
    rows = []
    for name, entry in r.items():
        plain = {k: v for k, v in entry.items() if k not in ("ratio", "want") and not isinstance(v, (dict, list))}
        rest = ", ".join(f"{k.replace('_', ' ')} {number(v)}" for k, v in plain.items())
        rows.append(f"| {name} | {number(entry['ratio'])} | {entry['want']} | {rest} |")
    return ["| what | measured | aim | behind it |", "|---|---|---|---|", *rows]


def number(v: object) -> str:
    if isinstance(v, bool) or not isinstance(v, (int, float)):
        return str(v)
    return f"{v:,.0f}" if abs(v) >= 100 else f"{v:.3g}"


def page() -> str:
    parts = ["# Results without a GPU", "",
             "Written by `hack/results.py write` from the JSON in [data](data); `hack/results.py measure` measures anew.",
             "What each figure means is in [../benchmark.md](../benchmark.md). GPU figures are in [gpu.md](gpu.md)."]  # fmt: skip
    for name in [n + cores for n in RUNS for cores in ("", "-16-cores")]:
        path = DATA / f"{name}.json"
        if not path.exists() or name == "python-16-cores":  # python.md has that, with what was before
            continue
        kept = json.loads(path.read_text())
        r = kept["result"]
        suite = r.get(str(r.get("suite")))
        table = checks(suite) if suite else single(r) if "latency_ms" in r else ratios(r)
        parts += ["", f"## {name}", "", f"`{kept['command']}`, {kept['cores']} cores, {kept['date']}", "", *table]
    return "\n".join(parts) + "\n"


def main() -> None:
    verb, names = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if verb == "measure" and all(n in RUNS for n in names):
        measure(names)
        PAGE.write_text(page())
    elif verb == "write" and not names:
        PAGE.write_text(page())
    elif verb == "check" and not names:
        if PAGE.read_text() != page():
            sys.exit(f"{PAGE.relative_to(ROOT)} is not what docs/results/data says; run: hack/results.py write")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()

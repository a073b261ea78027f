#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures, and writes docs/performance.md and the tables in README.md and docs/peers.md from the measurements.

    hack/results.py measure [NAME…]   run the commands below, keep their JSON in docs/results/data (a quiet machine; half an hour)
    hack/results.py write             write the page and the tables from that JSON
    hack/results.py check             fail if a table differs from its JSON, or a rule of judge() is broken
    hack/results.py selftest          fail if judge() passes bad measurements; check begins with it

Every figure of README comes from docs/results/data, with its machine, date and
command. Other pages link to the results and repeat no figure.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

import programs

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench" / "peers"))
import report  # noqa: E402

DATA = ROOT / "docs/results/data"
PAGE = ROOT / "docs/performance.md"
README = ROOT / "README.md"
PEERS = ROOT / "docs/peers.md"
BEGIN, END = "<!-- results: written by hack/results.py write -->\n", "<!-- end of results -->"
BEGIN_PEERS = "<!-- peers: written by hack/results.py write -->\n"
BEGIN_EMBEDDINGS = "<!-- embeddings: written by hack/results.py write -->\n"
BEGIN_TORCHRL = "<!-- torchrl: written by hack/results.py write -->\n"

# The measurements, run in the repository's root after `make build` and `python/test.sh`. Each takes --json FILE.
RUNS = {
    "busy": "build/python-venv/bin/python bench/peers/busy.py --clients 8",
    "embeddings": "build/peers/infinity/bin/python bench/peers/embeddings.py",
    "torchrl": "python3 bench/peers/actors.py",
}

# What each kept measurement measured, beside the core and its own program. Some ran on other machines, by hand.
CORE = ["shm", "broker", "client", "worker"]
PYTHON = ["cbindings/src", "python/ringbatch"]
MEASURED = {
    **dict.fromkeys([*RUNS, "busy-16-cores", "torchrl-16-cores", "peers"], PYTHON),
    **dict.fromkeys(["lanes", "lanes-gpu"], PYTHON),
    **dict.fromkeys(["gpu", "packed", "weights-gpu"], [*PYTHON, "bench/gpu"]),
    "small": ["bench/transport"],
    "torture": ["test/chaos"],
}
# A measurement may be older than the last change of what it measured by this much: most changes move no figure.
GRACE = datetime.timedelta(days=14)


def judge(runs: dict[str, str], measured: dict[str, list[str]], kept: dict[str, dict], changed: dict[str, datetime.date]) -> Iterator[str]:
    """What is wrong with the kept measurements. changed is the last change of what each measured, as far as git knows it."""
    for name in sorted({*runs, *measured} - set(kept)):
        yield f"{name}: the run has no JSON in docs/results/data"
    for name in sorted(set(kept) - set(measured)):
        yield f"{name}: nothing says what it measured (MEASURED)"
    commands = {f"{name} in RUNS": command for name, command in runs.items()} | {
        name: data.get("command", "") for name, data in kept.items()
    }
    for name, command in commands.items():
        if why := programs.missing(command):
            yield f"{name}: {why}: {command}"
    for name, data in kept.items():
        for ratio in ratios(data):
            if ratio < 0:
                yield f"{name}: the ratio {ratio:g} is negative"
        if name in changed and (old := changed[name] - datetime.date.fromisoformat(data["date"])) > GRACE:
            yield f"{name}: measured {old.days} days before the last change of what it measures, {GRACE.days} are allowed; measure again"


def ratios(data: object, inside: bool = False) -> Iterator[float]:
    """Every number whose key, or a key above it, says that it compares."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from ratios(value, inside or bool(re.search("ratio|share|measured", key)))
    elif isinstance(data, list):
        for value in data:
            yield from ratios(value, inside)
    elif inside and isinstance(data, (int, float)):
        yield data


def last_changes() -> dict[str, datetime.date]:
    """The date of the last commit of what each run measured; empty where git has no history."""
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        print("results: no git history here, so the age of measurements is not checked")
        return {}
    found = {}
    for name, paths in MEASURED.items():
        log = [*git, "log", "-1", "--format=%cs", "--", *CORE, *paths, ":!*_test.go", ":!*.md"]
        found[name] = datetime.date.fromisoformat(subprocess.check_output(log, text=True).strip())
    return found


def selftest() -> None:
    """Each rule must find its own fault, and nothing else."""
    day = datetime.date(2026, 1, 1)
    good = {"command": "make peers", "date": "2026-01-01", "result": {"ratio": 1.5, "measured": [0.5], "waits_ms": -1}}
    faults = {
        "": {},
        "no main package builds bin/gatebench": {"command": "bin/gatebench --rounds 4"},
        "ringbatch has no command 'tune'": {"command": "ringbatch tune m"},
        "no script bench/nothing.py": {"command": "python3 bench/nothing.py"},
        "no program relaybench": {"command": "relaybench --rounds 3"},
        "no target 'nothing'": {"command": "make nothing"},
        "no test Simulated in ./broker": {"command": "go test ./broker -run Simulated"},
        "the ratio -2.28 is negative": {"result": {"checks": [{"name": "x", "measured": -2.28}]}},
        "the ratio -0.6 is negative": {"result": {"ratio_to_futex": [1, -0.6]}},
        "measured 15 days before": {"date": str(day - GRACE)},
    }
    for fault, change in faults.items():
        got = list(judge({"a": "bin/bench transport"}, {"a": []}, {"a": good | change}, {"a": day + datetime.timedelta(days=1)}))
        assert len(got) == (fault != "") and fault in "".join(got), (fault, got)
    for runs, measured, kept, fault in (
        ({"b": "make peers"}, {"a": [], "b": []}, {"a": good}, "b: the run has no JSON"),
        ({}, {"a": []}, {"a": good, "old": good}, "old: nothing says what it measured"),
        ({"a": "bin/torture"}, {"a": []}, {"a": good}, "a in RUNS: no main package builds bin/torture"),
    ):
        got = list(judge(runs, measured, kept, {}))
        assert len(got) == 1 and fault in got[0], (fault, got)
    page = "`bin/torture --x` `ringbatch profile m` `gatebench --only http`\n```sh\nbash hack/gone.sh\nmake peers   # text\n```\n"
    assert [bool(programs.missing(c)) for c in programs.of_page(page)] == [True, False, True, True, True], list(programs.of_page(page))


def check() -> Iterator[str]:
    selftest()
    faults = list(judge(RUNS, MEASURED, {f.stem: json.loads(f.read_text()) for f in DATA.glob("*.json")}, last_changes()))
    yield from faults
    for page in [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")]:
        for command in programs.of_page(page.read_text()):
            if why := programs.missing(command):
                yield f"{page.relative_to(ROOT)}: {why}: {command}"
    for path, text in [] if faults else pages().items():
        if path.read_text() != text:
            yield f"{path.relative_to(ROOT)} differs from docs/results/data; run: hack/results.py write"


def measure(names: list[str]) -> None:
    for name in names or RUNS:
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            print(f"== {name}: {RUNS[name]}", flush=True)
            subprocess.run([*RUNS[name].split(), "--json", out.name], cwd=ROOT, check=True)
            result = json.loads(Path(out.name).read_text())
        kept = {"date": datetime.date.today().isoformat(), "command": RUNS[name], "cores": os.cpu_count(), "result": result}
        DATA.mkdir(parents=True, exist_ok=True)
        (DATA / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def number(v: object) -> str:
    if isinstance(v, bool) or not isinstance(v, (int, float)):
        return str(v)
    return f"{v:,.0f}" if abs(v) >= 100 else f"{v:.3g}"


def page() -> str:
    parts = ["# Performance", "",
             "`hack/results.py write` writes this page from the JSON in `docs/results/data`; `hack/results.py measure` measures again.",
             "[README](../README.md#results) has the main figures, [peers](peers.md) other servers and busy hosts. On your machine: `make demo`,",
             "`ringbatch bench MODEL`, `make peers`."]  # fmt: skip
    setup = "encoder of 12 layers, 768 wide, fp16; texts of 8 to 500 tokens; two workers"
    parts += ["", "## Packed batches", "", f"{where('packed')}: {setup}", "",
              "| | sequences/s | rows a batch | p50, ms | p99, ms |", "|---|---|---|---|---|"]  # fmt: skip
    for name, r in kept("packed")["result"]["rows"].items():
        cells = (number(r[k]) if k in r else "" for k in ("rate", "rows_per_batch", "p50_ms", "p99_ms"))
        parts.append(f"| {name} | " + " | ".join(cells) + " |")
    batch = number(kept("weights-gpu")["result"][0]["batch_ms"])
    parts += ["", "## Live weights", "", f"{where('weights-gpu')}: ResNet-50 fp16, 128 producers, 3 workers, 10 updates a second; batches take {batch} ms", "",
              "| the versions' memory | images/s | without updates | share | `publish`, ms | all workers have it after, ms: median | p99 |",
              "|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in kept("weights-gpu")["result"]:
        cells = (number(r[k]) for k in ("publish_ms", "loaded_p50_ms", "loaded_p99_ms"))
        parts.append(
            f"| {r['memory']} | {r['with_updates']:,.0f} | {r['images_per_s']:,.0f} | {100 * r['share']:.1f} % | "
            + " | ".join(cells)
            + " |"
        )
    parts += ["", "## Lanes", "", "Log-normal lengths, 32 lanes, 64 clients: a transformer of 0.1 B with a CUDA graph "
              f"({where('lanes-gpu')}), and a GRU in NumPy ({where('lanes')}).", "",
              "| rows/s: loop that feeds itself, lanes, whole batches | lanes ÷ loop | lanes ÷ whole | a round beyond `step`, µs: no change; one row out, one in |",
              "|---|---|---|---|"]  # fmt: skip
    for got in (kept(name)["result"] for name in ("lanes-gpu", "lanes")):
        rates, cost = got["rows_per_s"], got["us_beyond_step"]
        parts.append(f"| {rates['loop']:,.0f}, {rates['lanes']:,.0f}, {rates['whole']:,.0f} | {100 * got['lanes_over_loop']:.0f} % | "
                     f"{got['lanes_over_whole']:.2f} × | {cost['0 out, 0 in']:.0f}; {cost['1 out, 1 in']:.0f} |")  # fmt: skip
    return "\n".join(parts) + "\n"


def kept(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text())


def rounded(v: float) -> str:
    """Three digits: a measurement has no more."""
    decimals = 3 - len(str(int(v)))
    return f"{round(v, decimals):,.{max(0, decimals)}f}"


def between(values: list[float]) -> str:
    return f"{rounded(min(values))} … {rounded(max(values))}"


def bold(v: float) -> str:
    return f"**{rounded(v)}**"


def rates(peer: str, cell: str) -> list[float]:
    """Requests per second of a peer in one column, by round."""
    return [r["requests_per_s"] for r in kept("peers")["peers"][peer]["cells"][cell]["rounds"]]


def against_peers(cell: str) -> tuple[str, str]:
    """Ours, with its range, and the others; of Triton's two ways the faster."""
    peers = {
        "`multiprocessing` + shared memory": ["plain"], "mosec": ["mosec"], "Triton": ["triton", "triton-shm"],
        "LitServe": ["litserve"], "BentoML": ["bentoml"], "Ray Serve": ["ray"],
    }  # fmt: skip
    ours = rates("ringbatch", cell)
    others = (f"{title} {rounded(max(mean(rates(name, cell)) for name in names))}" for title, names in peers.items())
    return f"{bold(mean(ours))} ({between(ours)})", ", ".join(others)


def where(name: str) -> str:
    data = kept(name)
    machine = data["machine"] if isinstance(data["machine"], str) else f"{data['machine']['cores']} cores, Intel Xeon 2.5 GHz"
    rounds = f", {data['rounds']} rounds of {data['seconds']:.0f} s" if "rounds" in data else ""
    return f"`{data['command']}`{rounds}, {machine}, {data['date']}"


def readme_table() -> str:
    """README's table, in absolute units."""
    gpu, small, kills = kept("gpu")["result"]["resnet50_fp16"], kept("small")["result"], kept("torture")["result"]
    bound = rounded(gpu["bound_images_per_s"])
    futex = between([us / ratio for us, ratio in zip(small["request_us"], small["ratio_to_futex"])])
    socket = between([n / ratio / 1e6 for n, ratio in zip(small["small_per_s"], small["ratio_to_raw_socket"])])
    micros, million = f"**{between(small['request_us'])}**", f"**{between([n / 1e6 for n in small['small_per_s']])}**"
    rows = [
        ("8 Python clients × 64 bytes, requests/s", *against_peers("64x8"), "peers"),
        ("8 Python clients × one image (602,112 bytes), requests/s", *against_peers("602112x8"), "peers"),
        ("128 clients, ResNet-50 fp16, 3 workers, images/s", bold(gpu["images_per_s"]), f"{bound} when the workers feed themselves", "gpu"),
        ("one request, nothing computed, µs", micros, f"{futex} for a futex round trip of two processes", "small"),
        ("8 clients × 16 small requests in flight, million/s", million, f"{socket} over Unix sockets with raw calls", "small"),
        ("clients killed under load, and workers", f"**{kills['clients']['killed']:,}** each", f"{kills['wrong']} wrong of {kills['answered_right']:,} answers to others", "torture"),
    ]  # fmt: skip
    runs = list(dict.fromkeys(name for *_, name in rows))
    lines = [f"| {what} | {ours} | {beside} | {runs.index(name) + 1} |" for what, ours, beside, name in rows]
    commands = [f"{i}. {where(name)}" for i, name in enumerate(runs, 1)]
    return "\n".join(["| | ringbatch | for comparison | run |", "|---|---|---|---|", *lines, "", *commands]) + "\n"


def busy_tables() -> str:
    """The tables of bench/peers/busy.py: ringbatch against the plain program, by cores and clients."""
    parts = []
    for name in ("busy", "busy-16-cores"):
        data = kept(name)
        rows = {(r["cell"], r["bytes"], r["program"]): r for r in data["result"]["rows"]}
        parts += [f"{data['cores']} cores, {data['result']['clients']} clients, `{data['command']}`, {data['date']}:", ""]
        parts.append("| cores | bytes | plain, requests/s; p50; p99 ms | ringbatch | requests/s ÷ plain | p50 ÷ | p99 ÷ |")
        parts.append("|---|---|---|---|---|---|---|")
        for (cell, size, program), ours in rows.items():
            if program != "ringbatch":
                continue
            plain = rows[cell, size, "plain"]
            both = (f"{r['requests_per_s']:,.0f}; {r['p50_ms']:.2f}; {r['p99_ms']:.2f}" for r in (plain, ours))
            ratios = (f"{ours[k] / plain[k]:.2f}" for k in ("requests_per_s", "p50_ms", "p99_ms"))
            parts.append(f"| {cell} | {size:,} | " + " | ".join([*both, *ratios]) + " |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def embeddings_table() -> str:
    """The table of bench/peers/embeddings.py."""
    data = kept("embeddings")
    medians, versions = data["result"]["medians"], ", ".join(" ".join(v) for v in data["result"]["versions"].items())
    parts = [f"{data['cores']} cores, `{data['command']}`, {data['date']};", f"{versions}:", "",
             "| program | load | texts/s | p50, ms | p99, ms |", "|---|---|---|---|---|"]  # fmt: skip
    for name, r in medians.items():
        program, load = name.split("; ")
        parts.append(f"| {program} | {load} | " + " | ".join(rounded(r[k]) for k in ("texts_per_s", "p50_ms", "p99_ms")) + " |")
    return "\n".join(parts) + "\n"


def torchrl_tables() -> str:
    """The tables of bench/peers/actors.py: rates, then faults and new weights."""
    return "\n".join(torchrl_table(kept(name)) for name in ("torchrl", "torchrl-16-cores"))


def torchrl_table(data: dict) -> str:
    r = data["result"]
    versions, actors = ", ".join(" ".join(v) for v in r["versions"].items()), list(next(iter(r["rates"].values())))
    where = f"{data['cores']} cores" + (", H200" if r["device"] == "cuda" else "")
    parts = [f"{where}, `{data['command']}`, {data['date']}, load average {r['load_before']:.1f} before;", f"{versions}:", "",
             "| requests/s; p50; p99, ms | " + " | ".join(f"{n} actor{'s' * (n != '1')}" for n in actors) + " |",
             "|---|" + "---|" * len(actors)]  # fmt: skip
    for name, cells in r["rates"].items():
        figures = ([rounded(median(turn[k] for turn in cells[n])) for k in ("requests_per_s", "p50_ms", "p99_ms")] for n in actors)
        parts.append(f"| {name} | " + " | ".join("; ".join(f) for f in figures) + " |")
    parts += ["", "| | " + " | ".join(r["kills"]) + " |", "|---|" + "---|" * len(r["kills"])]
    faults, kills, weights = (list(r[k].values()) for k in ("faults", "kills", "weights"))
    rows = {
        "goes on after an actor was killed while it waited": [f"{f['waits']} of {f['trials']}" for f in faults],
        "goes on after an actor was killed while it wrote": [f"{f['writes']} of {f['trials']}" for f in faults],
        "an actor is killed every 0.2 s: rate of 8 others": [f"{100 * k['share']:.0f} %" if k["goes_on"] else "it stops" for k in kills],
        "new weights: 8 actors have them after, ms": [rounded(w["everywhere_ms"]) for w in weights],
        "longest gap between answers with new weights, ms": [rounded(w["gap_ms"]) for w in weights],
        "longest gap without, ms": [rounded(w["gap_without_ms"]) for w in weights],
    }
    return "\n".join([*parts, *(f"| {what} | " + " | ".join(cells) + " |" for what, cells in rows.items() if cells)]) + "\n"


def with_tables(path: Path, tables: dict[str, str]) -> str:
    """The page with each table between its two marks."""
    text = path.read_text()
    for mark, table in tables.items():
        before, begin, rest = text.partition(mark)
        _, end, after = rest.partition(END)
        if not begin or not end:
            sys.exit(f"{path.name} has no lines {mark.strip()} and {END}")
        text = before + begin + table + end + after
    return text


def pages() -> dict[Path, str]:
    peers = kept("peers")
    of_peers = {BEGIN_PEERS: f"{report.dated(peers)}\n\n{report.table(peers)}", BEGIN: busy_tables(), BEGIN_EMBEDDINGS: embeddings_table(), BEGIN_TORCHRL: torchrl_tables()}
    return {PAGE: page(), README: with_tables(README, {BEGIN: readme_table()}), PEERS: with_tables(PEERS, of_peers)}


def main() -> None:
    verb, names = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if verb == "measure" and all(n in RUNS for n in names):
        measure(names)
    if verb in ("measure", "write") and all(n in RUNS for n in names):
        for path, text in pages().items():
            path.write_text(text)
    elif verb == "check" and not names:
        sys.exit("\n".join(check()) or None)
    elif verb == "selftest" and not names:
        selftest()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()

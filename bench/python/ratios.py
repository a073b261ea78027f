# SPDX-License-Identifier: Apache-2.0
"""What the Python package reaches, as ratios measured in one run.

    python bench/python/ratios.py [--json FILE] [--only NAME] [--rounds N] [--seconds S] [--wait S] [--goproducer FILE]

round_trip   a Python client's model(x) against the Go client's, 64 bytes, one at a time, a Go worker that echoes
languages    one request at a time, 64 bytes, a Go worker that echoes: Go, C, model(x) and request()
small        64 bytes through a Python worker that does nothing, against shared_memory + Queue + semaphore
ways         request() against model(x), 64 and 602,112 bytes; the input exists already, or is made (normalised) in place
reading      64 producers with 602,112-byte inputs and a worker that reads them, against the same, and against
             what writing the inputs and gathering them once takes on the same cores; with one request in flight
             each, and four, and four where the worker is handed three batches at once (depth); with the producers' CPU
             time of a request and the cores that were busy
asyncio      32 requests in flight from one process against one at a time
zero_copy    a 602,112-byte input through request(): the time beyond the assignment, and against a 64-byte input
writing      64 producers with 602,112-byte inputs and a worker that does nothing, against writing the inputs alone, with
             one request in flight each, and four; and against producers that sleep until a batch is full, without a
             broker or a worker
worker       rows/s of a Python worker that does nothing, batch 32, from 8 Go producers with 8 in flight each,
             and the CPU time of a request, which other programs on the machine disturb less
baseline     64 producers with 602,112-byte inputs and a model that does nothing, against baseline.py

The two sides of a ratio take turns, and the median of the rounds counts: the
machine's other load then hits both. Needs the installed package and, for the
Go producer, Go, or --goproducer with what `go build ./cmd/goproducer`
made elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import ringbatch as rb

SECONDS = 2.0  # of a turn
WAIT = 0.002  # of batches of 64 producers with large inputs, in both programs
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]

NOTHING = """
import ringbatch as rb

@rb.worker({name!r}, inputs={{"x": ("float32", {inputs})}}, outputs={{"y": ("float32", {outputs})}},
           max_batch_size=32, wait_time={wait}, slots={slots})
def nothing(batch):
    batch.outputs["y"]  # touched, and left as it is: an output that was not is an error

nothing.run(wait=20)
"""


@contextlib.contextmanager
def running(*command: str):
    p = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield p
    finally:
        p.terminate()
        p.wait(20)


def python_worker(name: str, inputs: tuple, outputs: tuple, wait: float, slots: int):
    return running(sys.executable, "-c", NOTHING.format(name=name, inputs=inputs, outputs=outputs, wait=wait, slots=slots))


def go_producer(folder: str) -> str:
    path = os.path.join(folder, "goproducer")
    subprocess.run(["go", "build", "-o", path, "./cmd/goproducer"], cwd=REPOSITORY, check=True)
    return path


def round_trip(rounds: int, go: str) -> dict:
    calls, ratios, go_us, python_us = 4000, [], [], []
    x = np.zeros(16, np.float32)
    with running(rb.binary_path(), "worker", "--model", "echo", "--wait_time", "0s", "--wait_for_broker", "20s"), rb.connect("echo", wait=20) as m:
        def python_side() -> float:
            times = []
            for _ in range(calls):
                start = time.perf_counter_ns()
                m(x)
                times.append(time.perf_counter_ns() - start)
            return statistics.median(times) / 1e3

        for _ in range(rounds):
            go_us.append(json.loads(subprocess.check_output([go, "--model", "echo", "--calls", str(calls)]))["p50_us"])
            python_us.append(python_side())
            ratios.append(python_us[-1] / go_us[-1])
    return {"ratio": statistics.median(ratios), "want": "<= 1.5", "go_us": statistics.median(go_us), "python_us": statistics.median(python_us)}


C_PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "ringbatch.h"
static int compare(const void *a, const void *b) { long x = *(long *)a, y = *(long *)b; return x < y ? -1 : x > y; }
static long now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000L + t.tv_nsec; }
int main(int argc, char **argv) {
	int n = argc > 1 ? atoi(argv[1]) : 1000;
	float x[16] = {1}, y[16];
	const void *in[] = {x}; void *out[] = {y};
	uint64_t request; rb_client c;
	long *took = malloc(n * sizeof *took);
	if (rb_connect("echo", NULL, &c)) { fprintf(stderr, "%s\n", rb_error()); return 1; }
	for (int i = 0; i < n; i++) { long from = now(); if (rb_infer(c, 1, in, out, 0, -1, &request)) return 1; took[i] = now() - from; }
	qsort(took, n, sizeof *took, compare);
	printf("%f\n", took[n / 2] / 1e3);
	return rb_close(c);
}
"""


def languages(rounds: int, go: str) -> dict:
    """One request at a time through a Go worker: Go, C, and both ways of Python."""
    calls = 4000
    x = np.zeros(16, np.float32)
    times: dict[str, list[float]] = {"go": [], "c": [], "model(x)": [], "request()": []}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "one.c").write_text(C_PROGRAM)
        program, sources = os.path.join(folder, "one"), sorted(map(str, (REPOSITORY / "cbindings" / "src").glob("*.c")))
        subprocess.run(["cc", "-O2", "-std=gnu11", "-D_GNU_SOURCE", "-pthread", f"-I{REPOSITORY / 'cbindings'}", "-o", program, f"{folder}/one.c", *sources], check=True)
        with running(rb.binary_path(), "worker", "--model", "echo", "--wait_time", "0s", "--wait_for_broker", "20s"), rb.connect("echo", wait=20) as m:

            def two() -> None:
                with m.request() as req:
                    req.inputs["x"][...] = x
                    req.run().outputs["y"]

            def median(f) -> float:
                took = []
                for _ in range(calls):
                    start = time.perf_counter_ns()
                    f()
                    took.append(time.perf_counter_ns() - start)
                return statistics.median(took) / 1e3

            for _ in range(rounds):
                times["go"].append(json.loads(subprocess.check_output([go, "--model", "echo", "--calls", str(calls)]))["p50_us"])
                times["c"].append(float(subprocess.check_output([program, str(calls)])))
                times["model(x)"].append(median(lambda: m(x)))
                times["request()"].append(median(two))
    against = {name: statistics.median(a / b for a, b in zip(t, times["go"])) for name, t in times.items()}
    return {"ratio": against["model(x)"], "want": "<= 1.1", "request": against["request()"], "c": against["c"], "want_c": "<= 0.9", "us": {k: statistics.median(v) for k, v in times.items()}}


def ours_of(model: str, producers: int, way: str = "model", in_flight: int = 1) -> dict[str, float]:
    """In a process of its own, which forks its producers."""
    code = f"import json, sys; sys.path.insert(0, {str(HERE)!r}); import producers; print(json.dumps(producers.measure({model!r}, {producers}, {SECONDS}, {way!r}, {in_flight})))"
    return json.loads(subprocess.check_output([sys.executable, "-c", code]))


def rate_of(model: str, producers: int, way: str = "model") -> float:
    return ours_of(model, producers, way)["requests_per_s"]


def naive(producers: int, elements: int, outputs: int, wait: float, answers: str = "semaphore") -> float:
    return naive_of(producers, elements, outputs, wait, answers)["requests_per_s"]


def naive_of(producers: int, elements: int, outputs: int, wait: float, answers: str) -> dict[str, float]:
    flags = {"producers": producers, "elements": elements, "outputs": outputs, "wait_time": wait, "seconds": SECONDS, "answers": answers}
    command = [sys.executable, str(HERE / "baseline.py"), *(f"--{k}={v}" for k, v in flags.items())]
    return json.loads(subprocess.check_output(command))


def medians(measured: dict[str, list[dict[str, float]]], key: str) -> dict[str, float]:
    return {name: statistics.median(m[key] for m in several) for name, several in measured.items()}


def share(measured: dict[str, list[dict[str, float]]], of: str, who: str = "ours") -> float:
    return statistics.median(a["requests_per_s"] / b["requests_per_s"] for a, b in zip(measured[who], measured[of]))


def small(rounds: int, _go: str) -> dict:
    """64 bytes through a Python worker that does nothing, against shared_memory + Queue + semaphore."""
    one, eight, theirs_one, theirs_eight = [], [], [], []
    with python_worker("tiny", (16,), (16,), 0, 256):
        for _ in range(rounds):
            one.append(rate_of("tiny", 1))
            theirs_one.append(naive(1, 16, 16, 0))
            eight.append(rate_of("tiny", 8))
            theirs_eight.append(naive(8, 16, 16, 0))
    return {
        "ratio": statistics.median(b / a for a, b in zip(one, theirs_one)), "want": "<= 0.4 of the time, one client",
        "eight_clients": statistics.median(a / b for a, b in zip(eight, theirs_eight)), "want_eight": ">= 4 x the requests/s",
        "per_s": {"one": statistics.median(one), "theirs_one": statistics.median(theirs_one), "eight": statistics.median(eight), "theirs_eight": statistics.median(theirs_eight)},
    }  # fmt: skip


def ways(rounds: int, _go: str) -> dict:
    """request() against model(x), requests/s through a Python worker that does nothing."""
    found: dict[str, list[float]] = {}
    with python_worker("tiny", (16,), (16,), 0, 256), python_worker("frames", (3, 224, 224), (1000,), 0.002, 256):
        for _ in range(rounds):
            for model, clients, made in (("tiny", 8, ""), ("frames", 8, "made "), ("frames", 64, "made "), ("frames", 8, ""), ("frames", 64, "")):
                a, b = rate_of(model, clients, made + "request"), rate_of(model, clients, made + "model")
                found.setdefault(f"{made or 'given '}{'64' if model == 'tiny' else '602,112'} B x {clients}", []).append(a / b)
    medians = {k: statistics.median(v) for k, v in found.items()}
    return {"ratio": medians["given 64 B x 8"], "want": ">= 0.8 at 64 B, >= 1.1 at 602,112 B made in place", "all": medians}


def reading(rounds: int, _go: str) -> dict:
    """64 producers x 602,112 bytes, a worker that reads every input: gathered together as a CPU model takes them."""
    measured: dict[str, list[dict[str, float]]] = {"ours": [], "four_in_flight": [], "four_in_flight_depth_3": [], "theirs": [], "writing_alone": [], "writing_and_gathering": []}
    code = NOTHING.replace("    pass\n", "    batch.inputs[\"x\"]\n").format(name="read", inputs=(3, 224, 224), outputs=(1000,), wait=WAIT, slots=512)
    deep = code.replace("'read'", "'deep'").replace("slots=", "depth=3, slots=")
    with running(sys.executable, "-c", code), running(sys.executable, "-c", deep):
        for _ in range(rounds):
            measured["ours"].append(ours_of("read", 64))
            measured["four_in_flight"].append(ours_of("read", 64, in_flight=4))
            measured["four_in_flight_depth_3"].append(ours_of("deep", 64, in_flight=4))
            for name, answers in ("theirs", "semaphore"), ("writing_alone", "none"), ("writing_and_gathering", "gather"):
                measured[name].append(naive_of(64, 3 * 224 * 224, 1000, WAIT, answers))
    return {
        "ratio": share(measured, "theirs"), "want": ">= 3",
        "share_of_writing_and_gathering": share(measured, "writing_and_gathering"), "want_share": ">= 0.85",
        "the_same_with_four_in_flight": share(measured, "writing_and_gathering", "four_in_flight"),
        "and_with_depth_3": share(measured, "writing_and_gathering", "four_in_flight_depth_3"),
        "share_of_writing_alone": share(measured, "writing_alone"),
        "per_s": medians(measured, "requests_per_s"),
        "producer_cpu_us": medians(measured, "producer_cpu_us"), "cores_busy": medians(measured, "cores_busy"),
    }  # fmt: skip


def asyncio_ratio(rounds: int, _go: str) -> dict:
    one_rate, many_rate, ratios = [], [], []
    x = np.zeros(16, np.float32)

    async def rate(m: rb.Model, in_flight: int, total: int) -> float:
        async def loop() -> None:
            for _ in range(total // in_flight):
                await m.ainfer(x)

        start = time.perf_counter()
        await asyncio.gather(*(loop() for _ in range(in_flight)))
        return total / (time.perf_counter() - start)

    with running(rb.binary_path(), "worker", "--model", "echo", "--wait_time", "0s", "--wait_for_broker", "20s"), rb.connect("echo", wait=20, window=32) as m:

        async def main() -> None:
            await rate(m, 32, 3200)
            for _ in range(rounds):
                one_rate.append(await rate(m, 1, 3000))
                many_rate.append(await rate(m, 32, 32000))
                ratios.append(many_rate[-1] / one_rate[-1])

        asyncio.run(main())
    return {"ratio": statistics.median(ratios), "want": ">= 5", "one_per_s": statistics.median(one_rate), "many_per_s": statistics.median(many_rate)}


def zero_copy(rounds: int, _go: str) -> dict:
    frame = np.random.rand(3, 224, 224).astype(np.float32)
    private = np.empty_like(frame)
    copies, assigns, runs, small_runs, inside = [], [], [], [], True

    def timed(f) -> float:
        start = time.perf_counter_ns()
        f()
        return (time.perf_counter_ns() - start) / 1e3

    with python_worker("big", (3, 224, 224), (1,), 0, 64), python_worker("small", (16,), (1,), 0, 64):
        with rb.connect("big", wait=20) as big, rb.connect("small", wait=20) as little:
            ring = big.mapping()
            for _ in range(300 * rounds):
                with big.request() as req:
                    view = req.inputs["x"]
                    inside = inside and ring.base <= view.ctypes.data < ring.base + ring.bytes
                    assigns.append(timed(lambda view=view: view.__setitem__(..., frame)))
                    runs.append(timed(req.run))
                with little.request() as req:  # after as many bytes went through the caches
                    copies.append(timed(lambda: private.__setitem__(..., frame)))
                    small_runs.append(timed(req.run))
    median = statistics.median
    return {
        "ratio": median(runs) / median(small_runs), "want": "about 1: what follows the assignment does not depend on the size",
        "view_lies_in_the_ring": inside, "assignment_us": median(assigns), "same_copy_between_private_arrays_us": median(copies),
        "commit_to_result_us": median(runs), "commit_to_result_64_bytes_us": median(small_runs),
    }  # fmt: skip


def worker_rate(rounds: int, go: str) -> dict:
    rates, idle = [], []
    used: dict[str, list[float]] = {"broker": [], "worker": [], "producers": []}
    with python_worker("nothing", (16,), (16,), 0.002, 4096) as w:
        rb.connect("nothing", wait=20).close()
        broker = rb.stats()["pid"]
        for _ in range(rounds):
            ended = cpu_of_ended()
            ps = [
                subprocess.Popen([go, "--model", "nothing", "--seconds", str(SECONDS), "--in_flight", "8"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                for _ in range(8)
            ]
            for p in ps:
                p.stdout.readline()
            before, broker_before = cpu_seconds(w.pid), cpu_seconds(broker)
            for p in ps:
                p.stdin.write("go\n")
                p.stdin.flush()
            results = [json.loads(p.stdout.readline()) for p in ps]
            worker_cpu, broker_cpu = cpu_seconds(w.pid) - before, cpu_seconds(broker) - broker_before
            for p in ps:
                p.wait()
            idle.append(worker_cpu / SECONDS)
            requests = sum(r["requests"] for r in results)
            rates.append(requests / SECONDS)
            for name, cpu in ("broker", broker_cpu), ("worker", worker_cpu), ("producers", cpu_of_ended() - ended):
                used[name].append(1e6 * cpu / requests)
    stats = {m["name"]: m for m in rb.stats()["models"]}.get("nothing", {})
    return {
        "ratio": statistics.median(rates) / 50_000, "want": ">= 1, that is 50,000 requests/s", "requests_per_s": statistics.median(rates),
        "cpu_us_per_request": {name: statistics.median(us) for name, us in used.items()},
        "worker_cpus": statistics.median(idle), "cpus": os.cpu_count(), "broker_stats": {k: v for k, v in stats.items() if "batch" in k},
    }  # fmt: skip


def cpu_of_ended() -> float:
    """CPU seconds of the children that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def writing(rounds: int, _go: str) -> dict:
    """64 producers x 602,112 bytes, a worker that does not read them: what share of writing them alone is reached."""
    measured: dict[str, list[dict[str, float]]] = {"ours": [], "four_in_flight": [], "writing_alone": [], "writing_and_sleeping": []}
    with python_worker("frames", (3, 224, 224), (1000,), WAIT, 512):
        for _ in range(rounds):
            measured["ours"].append(ours_of("frames", 64))
            measured["four_in_flight"].append(ours_of("frames", 64, in_flight=4))
            for name, answers in ("writing_alone", "none"), ("writing_and_sleeping", "full"):
                measured[name].append(naive_of(64, 3 * 224 * 224, 1000, WAIT, answers))
    return {
        "ratio": share(measured, "writing_alone"), "want": ">= 0.8", "with_four_in_flight": share(measured, "writing_alone", "four_in_flight"),
        "of_writing_and_sleeping_till_a_batch_is_full": share(measured, "writing_and_sleeping"),
        "per_s": medians(measured, "requests_per_s"),
        "producer_cpu_us": medians(measured, "producer_cpu_us"), "cores_busy": medians(measured, "cores_busy"),
    }  # fmt: skip


def against_baseline(rounds: int, _go: str) -> dict:
    ours = []
    theirs: dict[str, list[float]] = {"queue": [], "token": [], "semaphore": [], "none": []}
    with python_worker("frames", (3, 224, 224), (1000,), 0.002, 256):
        for _ in range(rounds):
            ours.append(rate_of("frames", 64))
            for answers, rates in theirs.items():
                rates.append(naive(64, 3 * 224 * 224, 1000, 0.002, answers))
    against = {answers: statistics.median(a / b for a, b in zip(ours, rates)) for answers, rates in theirs.items()}
    return {
        "ratio": against["queue"], "want": ">= 5",
        "ratio_where_outputs_are_shared_too": against["token"], "and_answers_go_by_semaphore": against["semaphore"],
        "share_of_writing_the_inputs_alone": against["none"],
        "ringbatch_per_s": statistics.median(ours), "baseline_per_s": {k: statistics.median(v) for k, v in theirs.items()}, "cpus": os.cpu_count(),
    }  # fmt: skip


MEASUREMENTS = {"round_trip": round_trip, "languages": languages, "small": small, "ways": ways, "reading": reading, "asyncio": asyncio_ratio, "zero_copy": zero_copy, "worker": worker_rate, "writing": writing, "baseline": against_baseline}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="measure only this (repeatable)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a turn")
    parser.add_argument("--wait", type=float, default=WAIT, help="wait_time of reading and writing, seconds")
    parser.add_argument("--goproducer", metavar="FILE", help="the Go producer, built before")
    a = parser.parse_args()
    globals().update(SECONDS=a.seconds, WAIT=a.wait)
    results = {}
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        os.chmod(folder, 0o700)
        os.environ["RINGBATCH_SOCKET"] = os.path.join(folder, "b.sock")
        go = os.path.abspath(a.goproducer) if a.goproducer else go_producer(folder)
        with running(rb.binary_path(), "broker", "--log_level", "error"):
            for name in a.only or MEASUREMENTS:
                results[name] = MEASUREMENTS[name](a.rounds, go)
                print(name, json.dumps(results[name], indent=None), flush=True)
    if a.json:
        Path(a.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""ringbatch and other servers: the same model, payloads and clients, in turns.

    make peers                                    # or:
    python3 bench/peers/run.py [--only NAME]... [--rounds 3] [--seconds 2] [--json FILE]

Each peer is installed from PyPI into its own environment under build/peers
(once; a gigabyte or two), started, loaded by client processes, and ended. In the
first round each is tried with all its waits; the better one of each cell goes on.
If a peer cannot be installed or started, the run names it and goes on with the rest.
The model sums its input: it reads every byte, and every answer is checked.
hack/results.py writes the table of docs/peers.md from docs/results/data/peers.json.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import processes
import report
from peers import PEERS, REPOSITORY, Peer, Running

HERE = Path(__file__).resolve().parent
HOME = REPOSITORY / "build" / "peers"
SIZES, CLIENTS = [64, 602112], [1, 8, 64]
START_S, INSTALL_S = 240, 1800


class Failed(Exception):
    """Of this peer; the others go on."""


def say(text: str = "") -> None:
    print(text, flush=True)


def venv_of(peer: Peer) -> Path:
    return HOME / (peer.environment or peer.name) / "venv"


def install(peer: Peer, commit: str) -> None:
    """Once; ringbatch itself again after each change of the repository."""
    venv = venv_of(peer)
    mark = venv.parent / "installed"
    want = "\n".join([*peer.requirements, commit if peer.local else ""])
    if mark.exists() and mark.read_text() == want and not want.endswith("+changes"):
        return
    had = mark.exists() and mark.read_text().splitlines()[:-1] == want.splitlines()[:-1]
    commands = []
    if not had:
        shutil.rmtree(venv.parent, ignore_errors=True)
        venv.parent.mkdir(parents=True)
        commands += [[sys.executable, "-m", "venv", str(venv)], [*pip(venv), *peer.requirements]]
    if peer.local and commit not in fresh:
        commands.append([*pip(venv), "--force-reinstall", "--no-deps", str(REPOSITORY / "python")])
        fresh.add(commit)
    if not commands:
        return
    say(f"installing {peer.name}: {' '.join(peer.requirements)}{', and this repository' if peer.local else ''}")
    log = venv.parent / "install.log"
    with open(log, "wb") as out:
        for command in commands:
            p = processes.start(command, dict(os.environ), out, out)
            try:
                failed = p.wait(INSTALL_S)
            except subprocess.TimeoutExpired:
                p.kill()
                raise Failed(f"installing it took more than {INSTALL_S} s") from None
            if failed:
                raise Failed(f"cannot be installed: {tail(log)}")
    mark.write_text(want)


fresh: set[str] = set()  # commits that this run installed


def pip(venv: Path) -> list[str]:
    return [str(venv / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]


def tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-400:] or "it said nothing"


def versions(peer: Peer) -> dict[str, str]:
    code = "import sys, importlib.metadata as m; print('\\n'.join(n + ' ' + m.version(n) for n in sys.argv[1:]))"
    out = subprocess.check_output([str(venv_of(peer) / "bin" / "python"), "-c", code, *peer.packages], text=True)
    return dict(line.split() for line in out.splitlines())


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class Server:
    """A peer, started with one wait. Ends with all of its processes."""

    def __init__(self, peer: Peer, wait_ms: int) -> None:
        self.peer, self.wait_ms = peer, wait_ms
        self.folder = Path(tempfile.mkdtemp(prefix="peers"))  # short: socket paths have a limit
        self.log = self.folder / "log"
        self.log.touch()
        self.running = Running(venv_of(peer), self.folder, free_ports(2), SIZES, wait_ms)

    def __enter__(self) -> Server:
        try:
            with open(self.log, "ab") as log:
                env = {**os.environ, **processes.ONE_THREAD}
                started = [processes.start(c.arguments, {**env, **c.environment}, log, log) for c in self.peer.start(self.running)]
            end, last = time.monotonic() + START_S, ""
            while started:  # until the first right answer
                if any(p.poll() is not None for p in started):
                    raise Failed(f"ended at its start: {tail(self.log)}")
                try:
                    if self.listens():  # cheaper than a client
                        self.load(SIZES[0], 1, 0.05)
                        break
                except Failed as e:
                    last = str(e)
                if time.monotonic() > end:
                    raise Failed(f"did not answer within {START_S} s: {last} / {tail(self.log)}")
                time.sleep(0.25)
            processes.same_priority()
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        processes.end_all()
        for left in Path("/dev/shm").glob(f"{self.folder.name}*"):  # of Triton's Python backend, if it was killed
            left.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def listens(self) -> bool:
        host, _, port = self.peer.address(self.running).rpartition(":")
        if not host:
            return True  # a Unix socket: the client waits for the server
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return True
        except OSError:
            return False

    def load(self, size: int, clients: int, seconds: float) -> dict:
        flags = ["--bytes", str(size), "--clients", str(clients), "--seconds", str(seconds)]
        if self.peer.kind:
            command = [self.running.python(), str(HERE / "load.py"), self.peer.kind, self.peer.address(self.running), *flags]
        else:
            command = [self.running.python(), str(HERE / f"{self.peer.name}.py"), *flags, "--wait_ms", str(self.wait_ms)]
        p = processes.start(command, {**os.environ, **processes.ONE_THREAD}, subprocess.PIPE, subprocess.PIPE)
        try:
            out, err = p.communicate(timeout=seconds + 150)
        except subprocess.TimeoutExpired:
            raise Failed(f"{size} bytes, {clients} clients: no end") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)  # clients that are left
            p.wait()
        if p.returncode:
            raise Failed(f"{size} bytes, {clients} clients: {err.strip()[-300:]}")
        found = json.loads(out)
        if "error" in found:
            raise Failed(f"{size} bytes, {clients} clients: {found['error']}")
        return found


def measure(peers: list[Peer], rounds: int, seconds: float, results: dict) -> None:
    """Fills results as it goes, so that Ctrl-C loses no measurement."""
    chosen: dict[str, dict[str, int]] = {p.name: {} for p in peers}
    for r in range(rounds):
        for peer in peers:
            if peer.name in results["failed"]:
                continue
            about = {"title": peer.title, "versions": versions(peer), "waits_ms": list(peer.waits_ms), "cells": {}}
            cells = results["peers"].setdefault(peer.name, about)["cells"]
            try:
                tried: dict[str, dict[int, dict]] = {}
                for wait in peer.waits_ms:
                    wanted = [(s, c) for s in SIZES for c in CLIENTS if r == 0 or chosen[peer.name][report.cell(s, c)] == wait]
                    if not wanted:
                        continue
                    with Server(peer, wait) as server:
                        for size, clients in wanted:
                            try:
                                found = server.load(size, clients, seconds)
                            except Failed as e:  # only this cell
                                say(f"round {r + 1}/{rounds}  {peer.name}: {e}")
                                cells.setdefault(report.cell(size, clients), {"wait_ms": wait, "rounds": []})["failed"] = str(e)
                                chosen[peer.name].setdefault(report.cell(size, clients), wait)
                                continue
                            tried.setdefault(report.cell(size, clients), {})[wait] = found
                            waits = "" if wait < 0 else f", wait {wait} ms"
                            figures = f"{found['requests_per_s']:>9,.0f}/s  p50 {found['p50_ms']:.2f} ms"
                            say(f"round {r + 1}/{rounds}  {peer.name + waits:<24} {size:>7,} B x {clients:<2} {figures}")
                for name, found_by in tried.items():
                    best = max(found_by, key=lambda w: found_by[w]["requests_per_s"])
                    chosen[peer.name][name] = best
                    entry = cells.setdefault(name, {"rounds": []})
                    entry["wait_ms"] = best
                    entry["rounds"].append(found_by[best])
                    if r == 0 and len(found_by) > 1:
                        entry["tried"] = {str(w): f["requests_per_s"] for w, f in found_by.items()}
            except Failed as e:
                say(f"{peer.name}: {e}")
                results["failed"][peer.name] = str(e)
                results["peers"].pop(peer.name, None)


def machine() -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": memory, "python": platform.python_version()}


def main() -> int:
    global SIZES, CLIENTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [p.name for p in PEERS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME",
        help=f"only this, and ringbatch to compare with (repeatable): {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--bytes", type=int, action="append", help=f"payloads (default {SIZES})")
    parser.add_argument("--clients", type=int, action="append", help=f"client processes (default {CLIENTS})")
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    if a.rounds < 1 or a.seconds <= 0 or any(b < 4 or b % 4 for b in a.bytes or []) or any(c < 1 for c in a.clients or []):
        parser.error("--rounds and --clients are at least 1, --seconds more than 0, --bytes multiples of 4")
    SIZES, CLIENTS = a.bytes or SIZES, a.clients or CLIENTS
    results = run(a, [p for p in PEERS if not a.only or p.name in a.only or p.name == "ringbatch"])
    say("\n" + report.table(results))
    if a.json:
        Path(a.json).write_text(json.dumps(results, indent=1) + "\n")
    return 130 if results.get("interrupted") else 0


def run(a: argparse.Namespace, chosen: list[Peer]) -> dict:
    processes.adopt()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the finally below
    results: dict = {
        "command": "make peers", "date": datetime.date.today().isoformat(), "machine": machine(), "load_before": os.getloadavg()[0],
        "seconds": a.seconds, "rounds": a.rounds, "sizes": SIZES, "clients": CLIENTS, "peers": {}, "failed": {},
    }  # fmt: skip
    commit = subprocess.run(["git", "describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude", "*"], cwd=REPOSITORY,
        capture_output=True, text=True)
    results["commit"] = commit.stdout.strip()
    try:
        for peer in chosen:
            try:
                install(peer, results["commit"])
            except Failed as e:
                say(f"{peer.name}: {e}")
                results["failed"][peer.name] = str(e)
        measure(chosen, a.rounds, a.seconds, results)
    except KeyboardInterrupt:
        results["interrupted"] = True
        say("\ninterrupted: these are the measurements until then")
    finally:
        processes.end_all()
    results["load_after"] = os.getloadavg()[0]
    return results


if __name__ == "__main__":
    sys.exit(main())

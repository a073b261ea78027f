# SPDX-License-Identifier: Apache-2.0
"""The peers: the packages to install, the command that starts the server, and how clients call it.

A server's batcher waits for more requests before a batch. Each peer is tried without
a wait and with 2 ms, and in every cell the better one counts. docs/peers.md explains
all other settings.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]

TRITONCLIENT = "tritonclient[grpc]==2.73.0"


@dataclass
class Running:
    """The settings of a started server: its environment, its folder for this run, two free ports, the payloads, and the wait."""

    venv: Path
    folder: Path
    ports: list[int]
    sizes: list[int]
    wait_ms: int

    def python(self) -> str:
        return str(self.venv / "bin" / "python")

    def package(self, name: str) -> Path:
        return next(self.venv.glob("lib/python3*/site-packages")) / name


@dataclass
class Command:
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Peer:
    name: str
    title: str
    requirements: list[str]
    packages: list[str]  # whose versions are reported
    kind: str  # a key of calls.KINDS, or "" for a program with server and clients
    start: Callable[[Running], list[Command]]
    address: Callable[[Running], str] = lambda r: f"127.0.0.1:{r.ports[0]}"
    waits_ms: tuple[int, ...] = (0, 2)
    environment: str = ""  # the peer whose environment this one shares
    local: bool = False  # installs this repository, too


def http_server(file: str) -> Callable[[Running], list[Command]]:
    def start(r: Running) -> list[Command]:
        env = {"PEERS_PORT": str(r.ports[0]), "PEERS_WAIT_MS": str(r.wait_ms), "PEERS_TEMP": str(r.folder), "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
        return [Command([r.python(), str(HERE / "servers" / file)], env)]

    return start


def mosec(r: Running) -> list[Command]:
    command = [r.python(), str(HERE / "servers" / "mosec_server.py"), "--port", str(r.ports[0]), "--path", str(r.folder / "ipc"), "--wait",
        str(r.wait_ms), "--timeout", "60000", "--capacity", "1024", "--log-level", "error"]
    return [Command(command, {"PEERS_WAIT_MS": str(r.wait_ms)})]


def bentoml(r: Running) -> list[Command]:
    # BentoML adapts its wait by itself. Its only setting is the latency above which it refuses requests.
    env = {"PEERS_LATENCY_MS": "10000", "BENTOML_HOME": str(r.folder), "BENTOML_DO_NOT_TRACK": "True"}
    command = [r.python(), "-m", "bentoml", "serve", "bentoml_server:Sum", "--host", "127.0.0.1", "--port", str(r.ports[0]),
        "--working-dir", str(HERE / "servers")]
    return [Command(command, env)]


def triton(r: Running) -> list[Command]:
    models = r.folder / "models"
    for size in r.sizes:
        (models / f"sum{size}" / "1").mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "servers" / "triton_model.py", models / f"sum{size}" / "1" / "model.py")
        (models / f"sum{size}" / "config.pbtxt").write_text(f"""backend: "python"
max_batch_size: 32
input [{{ name: "x" data_type: TYPE_FP32 dims: [{size // 4}] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [1] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
dynamic_batching {{ max_queue_delay_microseconds: {1000 * r.wait_ms} }}
""")
    home, backends = r.package("pytriton") / "tritonserver", r.folder / "backends"
    shutil.copytree(home / "backends", backends)  # with the stub for this Python, as PyTriton does it
    shutil.copy(home / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}" / "triton_python_backend_stub",
        backends / "python")
    command = [str(home / "bin" / "tritonserver"), "--model-repository", str(models), "--backend-directory", str(backends)]
    command += ["--backend-config", f"python,shm-region-prefix-name={r.folder.name}", "--allow-http", "false", "--allow-metrics", "false"]
    command += ["--grpc-address", "127.0.0.1", "--grpc-port", str(r.ports[0]), "--log-info", "false", "--log-warning", "false"]
    # Triton's Python backend runs the interpreter on PATH, with the environment's packages.
    libraries = f"{r.package('nvidia_pytriton.libs')}:{Path(sys.base_prefix) / 'lib'}"
    env = {"LD_LIBRARY_PATH": libraries, "PATH": f"{r.venv}/bin:{os.environ['PATH']}", "PYTHONPATH": str(r.package(""))}
    return [Command(command, env)]


def ringbatch(gateway: bool) -> Callable[[Running], list[Command]]:
    def start(r: Running) -> list[Command]:
        binary, env = str(r.package("ringbatch") / "_native" / "ringbatch"), {"RINGBATCH_SOCKET": socket_of(r)}
        commands = [Command([binary, "broker", "--log-level", "error"], env)]
        commands += [Command([r.python(), str(HERE / "servers" / "ringbatch_worker.py"), str(size)], env) for size in r.sizes]
        if gateway:
            commands.append(Command([binary, "gateway", "--http", str(r.ports[0]), "--grpc", str(r.ports[1]), "--log-level", "error"], env))
        return commands

    return start


def socket_of(r: Running) -> str:
    return str(r.folder / "b.sock")


def nothing_to_start(r: Running) -> list[Command]:
    return []


RINGBATCH = ["numpy", TRITONCLIENT]
TRITON = ["numpy", "nvidia-pytriton==0.7.0", TRITONCLIENT], ["nvidia-pytriton", "tritonclient"]

PEERS = [
    Peer("ringbatch", "ringbatch, Python client", RINGBATCH, ["ringbatch", "numpy"], "ringbatch", ringbatch(False), socket_of, (-1,),
        local=True),
    Peer("gateway-http", "ringbatch gateway, HTTP", RINGBATCH, ["ringbatch"], "gateway", ringbatch(True), waits_ms=(-1,),
        environment="ringbatch", local=True),
    Peer("gateway-grpc", "ringbatch gateway, gRPC", RINGBATCH, ["ringbatch", "tritonclient"], "triton_grpc", ringbatch(True),
        lambda r: f"127.0.0.1:{r.ports[1]}", (-1,), "ringbatch", True),
    Peer("plain", "multiprocessing, shared memory", ["numpy"], ["numpy"], "", nothing_to_start),
    Peer("simpledbi", "SimpleDBI's design", ["numpy"], ["numpy"], "", nothing_to_start, environment="plain"),
    Peer("triton-shm", "Triton, gRPC + system shared memory", *TRITON, "triton_shm", triton, environment="triton"),
    Peer("triton", "Triton, gRPC", *TRITON, "triton_grpc", triton),
    Peer("mosec", "mosec, HTTP", ["numpy", "mosec==0.9.8"], ["mosec"], "http", mosec),
    Peer("litserve", "LitServe, HTTP", ["numpy", "litserve==0.2.19"], ["litserve", "fastapi", "uvicorn"], "http",
        http_server("litserve_server.py")),
    Peer("ray", "Ray Serve, HTTP", ["numpy", "ray[serve]==2.60.0"], ["ray"], "http", http_server("ray_server.py")),
    Peer("bentoml", "BentoML, HTTP", ["numpy", "bentoml==1.4.39"], ["bentoml"], "http", bentoml, waits_ms=(-1,)),
]

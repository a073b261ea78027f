# SPDX-License-Identifier: Apache-2.0
"""Runs the commands and programs of the manuals."""

from __future__ import annotations

import ast
import asyncio
import functools
import os
import re
import runpy
import shutil
import signal
import socket as sockets
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, broker_at, eventually, free_port, program, rb_wait, serving

import ringbatch as rb

DOCS, EXAMPLES = REPOSITORY / "docs", REPOSITORY / "examples"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="no manuals here")
PAGES = sorted(p for p in [REPOSITORY / "README.md", *DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")] if p.exists())


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M)
    return [text for language, text in found if language in languages]


def patient(program: str) -> str:
    """The program with a longer deadline, for a busy machine."""
    assert "timeout=0.1" in program
    return program.replace("timeout=0.1", "timeout=60")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_python_block_is_python(page):
    for text in blocks(page, "python"):
        inside = "async def f(model, x):\n" + textwrap.indent(textwrap.dedent(text).replace("…", "..."), "    ")
        ast.parse(inside, str(page))


@pytest.mark.parametrize("page", [*sorted(DOCS.glob("tutorials/*.md")), DOCS / "state.md"], ids=lambda p: p.stem)
def test_a_tutorial_shows_lines_of_examples_that_the_tests_run(page):
    linked = [(page.parent / link).resolve() for link in re.findall(r"\]\(((?:\.\./)+examples/[^)]+)\)", page.read_text())]
    sources = [f.read_text() for f in linked]
    assert sources
    for text in [*blocks(page, "python", "go", "toml"), *(t for t in blocks(page, "sh") if '"$ringbatch"' in t)]:
        assert any(text in s for s in sources), f"{page.name} shows what no example has:\n{text}"


def test_the_index_for_programs_and_the_gallery_leave_nothing_out():
    index, gallery = (REPOSITORY / "llms.txt").read_text(), (EXAMPLES / "README.md").read_text()
    assert not [p for p in PAGES if p.name != "README.md" and f"/docs/{p.relative_to(DOCS)})" not in index]
    programs = [p.relative_to(EXAMPLES) for end in ("py", "go", "c", "rs", "sh") for p in EXAMPLES.rglob(f"*.{end}")]
    assert not [p for p in programs if f"({p})" not in gallery and not p.name.endswith("_test.go") and p.name != "net.py"]


def test_the_sites_reference_has_every_public_name_of_python_and_c():
    site = runpy.run_path(str(REPOSITORY / "hack" / "mksite.py"))
    python, c = site["python_reference"](), site["c_reference"]()
    assert not [name for name in rb.__all__ if f"## ringbatch.{name}\n" not in python and f"| `{name}` |" not in python]
    of_batches = {name for kind in rb.Batch.__mro__[:-1] for name, member in vars(kind).items()
        if name[0] != "_" and (callable(member) or isinstance(member, property))}  # fmt: skip
    assert not [name for name in of_batches if f"- `{name}" not in python]
    declared = set(re.findall(r"^[^/*#\n]*\b(rb_\w+)\(", "".join(h.read_text() for h in (REPOSITORY / "cbindings").glob("ringbatch*.h")), re.M))
    assert declared and not [name for name in declared if name not in c]


@functools.cache
def help_of(command: str = "") -> str:
    env = {**os.environ, "PYTHON": sys.executable}  # for the commands in Python
    p = subprocess.run([rb.binary_path(), *command.split(), "--help"], capture_output=True, text=True, timeout=200, env=env)
    return p.stdout + p.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_that_a_page_shows_has_the_flags_it_shows(page):
    commands = help_of()
    for text in blocks(page, "sh", "console", ""):
        for line in text.splitlines():
            m = re.match(r"(?:\$ )?(?:bin/)?ringbatch(?:-cuda)? ([a-z]+)\b([^#|&]*)", line.strip())
            if not m:
                continue
            assert re.search(rf"^  {m[1]}\b", commands, re.M), f"{page.name}: there is no `ringbatch {m[1]}`"
            if m[1] in ("torch", "worker") and ("--gpu" in line or "--ptx" in line or m[1] == "torch"):
                continue  # a flag of another build, or of a command in Python
            known = help_of(m[1])
            for flag in re.findall(r"\s--([a-z_-]+)", m[2]):
                assert f"--{flag}" in known, f"{page.name}: `ringbatch {m[1]}` has no --{flag}"


@pytest.fixture(scope="module")
def go_tool() -> str:
    return shutil.which("go") or pytest.skip("no Go here")


INSTALLS = ("git clone https://github.com/ringbatch/ringbatch", "python3 -m venv ringbatch-venv && . ringbatch-venv/bin/activate",
    "pip install ./ringbatch/python")  # fmt: skip


@pytest.fixture(scope="module")
def installed() -> Path:
    """The commands of the environment of these tests. deploy/packaging/wheels_test.sh installs from a copy of this tree."""
    folder = Path(sys.executable).parent
    return folder if (folder / "ringbatch").exists() else pytest.skip("the package is not installed here")


class Reader:
    """A reader who follows a page: writes its files, types its commands, and compares the output."""

    def __init__(self, folder: Path, installed: Path):
        folder.chmod(0o700)
        self.folder, self.servers, self.printed = folder, [], ""
        self.env = {**os.environ, "RINGBATCH_SOCKET": str(folder / "b.sock"), "PATH": f"{installed}:{os.environ['PATH']}"}
        self.env.pop("PYTHONUNBUFFERED", None)  # else lines of several processes mix

    def follow(self, page: Path) -> None:
        """Blocks in their order. A file's name stands in backquotes in the paragraph before its block."""
        self.port = free_port()
        for before, language, text in re.findall(r"((?:[^\n]+\n)*)\n?^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M):
            name = re.findall(r"`(\w+\.(?:py|go|c))`", before)
            if language in ("python", "go", "c"):
                (self.folder / name[-1]).write_text(text)
            elif language == "sh":
                self.printed = "".join(self.type(line) for line in text.replace("8000", str(self.port)).splitlines())
            elif language == "text":
                self.compare(text)

    def type(self, line: str) -> str:
        if line.partition(" #")[0].strip() in INSTALLS:
            return ""
        if line.endswith("# terminal 1"):
            self.leave()
            self.servers.append(subprocess.Popen(["bash", "-c", "exec " + line], cwd=self.folder, env=self.env))
            return ""
        if assigned := re.match(r"(\w+)=\$\((.*)\)$", line):
            self.env[assigned[1]] = self.run(assigned[2]).strip()
            return ""
        if "curl" in line:
            eventually(self.listens)
        return self.run(line)

    def run(self, line: str) -> str:
        p = subprocess.run(["bash", "-c", line], cwd=self.folder, env=self.env, stdout=subprocess.PIPE, text=True, timeout=200, check=True)
        return p.stdout + "\n"

    def listens(self) -> bool:
        with sockets.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def compare(self, text: str) -> None:
        printed = {" ".join(line.split()) for line in self.printed.splitlines()}
        for line in text.splitlines():
            assert line == "…" or " ".join(line.split()) in printed, f"not printed: {line!r}, but:\n{self.printed}"

    def leave(self) -> None:
        for p in self.servers:
            p.send_signal(signal.SIGINT)
            p.wait(60)
        self.servers.clear()


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", DOCS / "quickstart.md"], ids=lambda p: p.stem)
def test_somebody_who_follows_the_page_is_answered_from_a_batch_of_eight(page, tmp_path, installed):
    reader = Reader(tmp_path, installed)
    try:
        reader.follow(page)
    finally:
        reader.leave()
    text = page.read_text()
    assert "from a batch of 8" in text and all(line in text for line in INSTALLS)


def test_the_quickstarts_go_client_is_answered(tmp_path, go_tool):
    program = blocks(DOCS / "quickstart.md", "go")[0]
    (tmp_path / "one.go").write_text(program)
    tmp_path.chmod(0o700)
    socket = str(tmp_path / "b.sock")

    @rb.worker("double", inputs={"x": ("float32", (4,))}, outputs={"y": ("float32", (4,))})
    def run(batch):
        return 2 * batch.inputs["x"]

    with broker_at(socket), serving(run, socket):
        env = {**os.environ, "RINGBATCH_SOCKET": socket}
        out = subprocess.check_output([go_tool, "run", str(tmp_path / "one.go")], cwd=REPOSITORY, env=env, text=True, timeout=250)
    assert out == "[2 4 6 8]\n"


def test_the_producers_of_the_python_manual_are_answered(socket, monkeypatch):
    connect, in_place, in_flight = blocks(DOCS / "python.md", "python")[:3]
    monkeypatch.setenv("RINGBATCH_SOCKET", socket)

    @rb.worker("resnet50", inputs={"x": ("float32", (3, 224, 224))}, outputs={"y": ("float32", (1000,))}, max_batch_size=32, slots=64)
    def run(batch):
        batch.outputs["y"][...] = batch.inputs["x"][:, 0, 0, :1]

    program = "async def program(np, raw, mean, x):\n" + textwrap.indent(
        connect + textwrap.indent(patient(in_place), "    ") + "        assert y[0] == raw[0, 0, 0] - mean\n"
        + textwrap.indent(in_flight, "    ") + "    assert y[0] == future.result()[0] == x[0, 0, 0]\n", "    "
    )
    names: dict = {}
    exec(compile(program, "docs/python.md", "exec"), names)
    x = np.random.rand(3, 224, 224).astype("float32")
    with serving(run, socket):
        rb_wait(socket, "resnet50")
        asyncio.run(names["program"](np, x, np.float32(0.5), x))


def test_the_worker_of_the_python_manual_serves(tmp_path, at, env):
    worker = blocks(DOCS / "python.md", "python")[3]
    before = "import numpy as np\nimport ringbatch as rb\n\n\ndef net(x):\n    return np.repeat(x[:, 0, 0, :1], 1000, axis=1)\n\n\n"
    (tmp_path / "worker.py").write_text(before + worker)
    with program(env, tmp_path / "worker.py"), rb.connect("resnet50", socket=at, wait=60) as m:
        x = np.random.rand(3, 224, 224).astype("float32")
        assert (m(x) == x[0, 0, 0]).all()


def test_the_video_pipeline_sees_every_frame(env):
    out = subprocess.check_output([sys.executable, str(EXAMPLES / "python" / "video_pipeline.py"), "3", "8"], env=env, text=True,
        timeout=120)
    right, late = map(int, re.match(r"(\d+) of 24 frames seen rightly, (\d+) too late", out).groups())
    assert right + late == 24 and right > 0  # on a busy machine some are late; none is wrong


def test_the_torch_service_answers_its_callers(env):
    pytest.importorskip("torch")
    service = str(EXAMPLES / "python" / "torch_service.py")
    with program(env, service):
        assert subprocess.check_output([sys.executable, service, "ask", "3"], env=env, text=True, timeout=200) == "3 answers\n"


def test_a_day_of_an_operator():
    out = subprocess.run([str(EXAMPLES / "operations" / "day.sh"), rb.binary_path()], capture_output=True, text=True, timeout=200)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("0 2 4 6 8 10 12 14 16 18 20 22 24 26 28 30\n") == 2 and "restarted" in out.stdout

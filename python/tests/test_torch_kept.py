# SPDX-License-Identifier: Apache-2.0
"""Compiled code that a restart reads: kept with the weights, and only for the same module."""

from __future__ import annotations

import errno
import fcntl
import functools
import importlib
import os
import shutil
import subprocess
import sys
import threading
import time
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ringbatch.torch")

from ringbatch.torch import compiling, kept_code  # noqa: E402
from ringbatch.torch.fingerprint import Untold, fingerprint  # noqa: E402
from ringbatch.worker import code_cache  # noqa: E402


class Scaled(torch.nn.Sequential):
    def __init__(self, by):
        super().__init__(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2))
        self.by = by


def made(by=2.0):
    torch.manual_seed(0)
    return Scaled(by).eval()


def test_a_fingerprint_changes_with_weights_statistics_mode_and_settings():
    assert fingerprint(made()) == fingerprint(made())
    weight, statistic, training = made(), made(), made()
    weight[0].weight.data[0] += 1e-6
    statistic[1].running_mean += 1e-6
    training[1].train()
    others = [weight, statistic, training, made().half(), made().to(memory_format=torch.channels_last), torch.nn.Sequential(*made())]
    functions = [torch.relu, len, functools.partial(torch.relu, inplace=True)]
    settings = [3.0, "2.0", [2.0], {2.0}, {"by": 2.0}, None, torch.float16, torch.ones(2), torch.zeros(2), *functions]
    found = [fingerprint(m) for m in [made(), *others, *map(made, settings)]]
    assert all(isinstance(f, str) for f in found) and len(set(found)) == len(found)


LIMIT = 1.0


class Limited(torch.nn.Module):
    most = 1.0

    def forward(self, x):
        return x.clamp(max=LIMIT)


def test_a_fingerprint_changes_with_functions_globals_and_class_attributes(monkeypatch):
    on_one_line = [made(lambda x: x), made(lambda x: x.relu())]
    a, b = torch.nn.ReLU(), torch.nn.Tanh()
    found = [fingerprint(m) for m in (*on_one_line, torch.nn.Sequential(a, b, a), torch.nn.Sequential(a, b, b), Limited())]
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 2.0)
    found.append(fingerprint(Limited()))
    monkeypatch.setattr(Limited, "most", 2.0)
    found.append(fingerprint(Limited()))
    assert all(isinstance(f, str) for f in found) and len(set(found)) == len(found)


def test_a_fingerprint_does_not_change_with_modules_of_ringbatch():
    before = fingerprint(made())
    sys.modules.pop("ringbatch.serve.child", None)
    importlib.import_module("ringbatch.serve.child")
    assert fingerprint(made()) == before


def test_a_module_with_opaque_parts_has_no_fingerprint():
    hooked, outside = made(), 2.0
    hooked.register_forward_hook(object().__init__)
    untold = [hooked, made({}.get), made(object()), made(lambda: outside), made([torch.nn.Linear(2, 2)]), made(iter(()))]
    assert all(isinstance(fingerprint(m), Untold) for m in untold)
    assert str(fingerprint(torch.nn.Sequential(made(object())))) == "0.by is a thing of type object, which may be another at the next start"


def test_an_exported_program_has_a_fingerprint():
    def exported(by):
        return torch.export.export(torch.nn.Sequential(made(), torch.nn.LeakyReLU(by)), (torch.rand(2, 3, 4, 4),)).module()

    found = [fingerprint(exported(by)) for by in (0.1, 0.1, 0.2)]
    assert all(isinstance(f, str) for f in found) and found[0] == found[1] != found[2]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.rand(4)) for _ in range(2))

    def forward(self, x, z):
        y = torch.tanh(x * self.weight + self.bias)
        return y, (y - z).sum(1)


class InParts(Net):
    def forward(self, x, z):
        y, s = super().forward(x, z)
        torch._dynamo.graph_break()
        return y + 1, s


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that starts a module, checks its results, and returns whether it was compiled."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()  # the number of compilations of a function is limited
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled, compile = [], kept_code._compile
    monkeypatch.setattr(kept_code, "_compile", lambda *a: compiled.append(1) or compile(*a))

    def start(module, state, of=""):
        compiled.clear()
        xs = [torch.rand(3, 4), torch.rand(3, 4)]
        with torch.inference_mode(), compiling.constant_weights():

            def right(code, given=xs):
                return compiling.differ_at_most(1e-5, list(code(*given)), list(module(*given)))

            code = kept_code.load_or_compile(module.eval(), xs, of, state, str(tmp_path), right)
            assert right(code) and right(code, [x + 1 for x in xs])
        return bool(compiled)

    return start


def test_a_restart_reads_code_with_its_weights_and_compiles_other_modules(start, tmp_path, capfd):
    a, b = Net(), Net()
    starts = [(a, "a"), (a, "a"), (b, "b"), (a, "a"), (b, "b"), (a, "a", "float16")]
    assert [start(*of) for of in starts] == [True, False, True, False, False, True]
    whole = list(tmp_path.glob("whole-*"))
    assert len(whole) == 3
    assert start(b, "a")  # the kept code of a does not compute b
    assert "is of no use: ValueError: it gives other results\n" in capfd.readouterr().err
    for file in whole:
        file.write_bytes(file.read_bytes()[:1000])
    assert [start(a, "a"), start(a, "a")] == [True, False]
    said = capfd.readouterr().err
    assert said.count("compiling anew, since") == 1 and "kept whole" not in said


def test_bytecode_of_torch_is_kept_in_the_cache_folder(tmp_path, monkeypatch):
    class Torch:
        cached = str(tmp_path / "site" / "torch" / "__pycache__" / "__init__.pyc")

    os.makedirs(os.path.dirname(Torch.cached))
    monkeypatch.setattr(code_cache.importlib.util, "find_spec", lambda name: Torch)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setattr(sys, "pycache_prefix", None)

    def prefix(writes):
        monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
        before = sys.pycache_prefix, sys.dont_write_bytecode, dict(os.environ)
        with code_cache.kept_bytecode():
            found = sys.pycache_prefix, sys.dont_write_bytecode, os.environ["PYTHONPYCACHEPREFIX"], "PYTHONDONTWRITEBYTECODE" in os.environ
        environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        assert before == (sys.pycache_prefix, sys.dont_write_bytecode,
            environment | {"TORCHINDUCTOR_CACHE_DIR": before[2]["TORCHINDUCTOR_CACHE_DIR"]})
        return found

    assert prefix(writes=True) == (None, False, "", True)  # Python writes bytecode anyway
    open(Torch.cached, "w").close()
    assert prefix(writes=False) == (None, True, "", True)  # torch has bytecode
    os.unlink(Torch.cached)
    kept = str(tmp_path / "kept" / "bytecode")
    assert prefix(writes=False) == (kept, False, kept, False)


def test_the_files_that_were_used_last_stay(tmp_path):
    files = [tmp_path / f"whole-{i}.pt" for i in range(kept_code.MOST_KEPT + 2)]
    for i, file in enumerate(files[:-1]):
        file.touch()
        os.utime(file, (0, (i + 5) % 7))
    left_behind, being_written = tmp_path / "whole-0.pt.abc", tmp_path / "whole-0.pt.xyz"
    left_behind.touch()
    os.utime(left_behind, (1, 1))
    being_written.touch()
    kept_code._write(files[-1], {"source": "", "constants": {}})
    assert not left_behind.exists() and files[-1].stat().st_mode & 0o77 == 0
    being_written.unlink()
    assert set(tmp_path.iterdir()) == {*files} - {files[2], files[3]}


def test_code_that_is_not_kept_whole_is_served_and_a_line_says_why(start, tmp_path, capfd):
    said = "a restart will trace the module again, since its compiled code cannot be kept whole: "
    parts = InParts()
    for _ in range(2):
        assert start(parts, "a") and capfd.readouterr().err.endswith(f"{said}it is in 2 parts, with Python between them\n")
    assert start(Net(), Untold("a thing")) and capfd.readouterr().err.endswith(f"{said}a thing\n")
    assert not list(tmp_path.glob("whole-*"))
    assert len(list(tmp_path.glob("not-whole-*"))) == 1  # others need not wait for it


def test_a_failure_to_keep_code_whole_is_noted_until_it_succeeds(start, tmp_path, capfd, monkeypatch):
    def fails(*a):
        raise ImportError("another version")

    a = Net()
    with monkeypatch.context() as m:
        m.setattr(kept_code, "_whole", fails)
        assert start(a, "a") and "kept whole: ImportError: another version" in capfd.readouterr().err
    assert kept_code.is_kept("", "a", str(tmp_path)) and not list(tmp_path.glob("whole-*"))  # others need not wait for it
    assert [start(a, "a"), start(a, "a")] == [True, False]
    assert not list(tmp_path.glob("not-whole-*"))


@pytest.fixture
def retrained(tmp_path, monkeypatch):
    """A function that starts a module with new weights, and calls meanwhile() while it waits for another process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    xs = [torch.rand(3, 4)]

    def start(compiled, meanwhile=lambda: None, stopped=lambda: False):
        monkeypatch.setattr(compiling, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: meanwhile()))
        whole = tmp_path / "whole"
        made = {"of": "m", "read": lambda folder: whole.exists(), "stopped": stopped}
        return compiling.choose("on", lambda xs: xs, lambda: compiled(whole) or (lambda xs: xs), [xs], 0.0, **made)

    start(lambda whole: None)
    return start


def test_of_processes_that_start_together_after_a_retraining_one_compiles_and_the_others_wait(retrained, capfd):
    compiling, waiting = threading.Event(), threading.Event()
    found = []

    def compiled(whole):
        compiling.set()
        assert waiting.wait(60)
        found.append(whole.exists())
        whole.touch()

    first = threading.Thread(target=retrained, args=(compiled,))
    first.start()
    assert compiling.wait(60)

    def meanwhile():
        waiting.set()
        first.join(60)

    retrained(lambda whole: found.append(whole.exists()), meanwhile)
    assert found == [False, True]
    assert capfd.readouterr().out.count("another process compiles, in") == 1


def test_if_a_compiling_process_is_killed_the_next_one_compiles(retrained, tmp_path):
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "ringbatch.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"

    def kill():
        holder.kill()
        holder.wait(60)

    found = []
    retrained(lambda whole: found.append(holder.poll()), kill)
    holder.communicate()
    assert found == [-9]


def never():
    raise AssertionError("the process waits")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, None])
def test_without_a_lock_every_process_compiles_at_once(retrained, monkeypatch, tmp_path, number):
    def flock(*a):
        raise OSError(number, "no locks")

    if number:
        monkeypatch.setattr(compiling.fcntl, "flock", flock)
    else:  # the folder cannot be written
        (tmp_path / "ringbatch.lock").unlink()
        (tmp_path / "ringbatch.lock").mkdir()
    found = []
    retrained(found.append, never)
    assert len(found) == 1


@pytest.fixture
def held(tmp_path):
    """The lock of a process that compiles."""
    with open(tmp_path / "ringbatch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_wait_for_another_process_can_be_stopped(retrained, held):
    stop = threading.Event()
    with pytest.raises(compiling.Stopped):
        retrained(lambda whole: never(), stop.set, stop.is_set)


def test_a_module_that_waits_for_another_process_stops_serving(retrained, held, monkeypatch):
    import ringbatch.torch as rt

    stop = threading.Event()
    monkeypatch.setattr(compiling, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: stop.set()))
    rt.serve(torch.nn.Linear(2, 2), "m", inputs=["x:f32[2]"], device="cpu", compile="on", stop=stop)


def test_a_process_that_the_compiler_started_does_not_keep_the_lock(retrained, tmp_path):
    copies = []

    def compiled(whole):
        for fd in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{fd}"
            if os.path.exists(path) and os.path.samefile(path, tmp_path / "ringbatch.lock"):
                copies.append(os.dup(int(fd)))  # as a fork has it

    try:
        retrained(compiled, never)
        retrained(compiled, never)
        assert len(copies) >= 2
    finally:
        for fd in copies:
            os.close(fd)

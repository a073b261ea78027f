# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's client library, unmodified, against the gateway."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import queue
import re
import subprocess
import time
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http
import tritonclient.http.aio as http_aio
import tritonclient.utils.shared_memory as shm
from conftest import Gateway
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

KINDS = ["http", "grpc"]
X = np.arange(32, dtype=np.float32).reshape(2, 16)
IN, OUT = (f"/rb_interop_{os.getpid()}_{part}" for part in ("in", "out"))  # of this run


def client(gateway: Gateway, kind: str):
    if kind == "http":
        return http.InferenceServerClient(gateway.http, concurrency=8)
    return grpc.InferenceServerClient(gateway.grpc)


def module(kind: str):
    return {"http": http, "grpc": grpc}[kind]


def given(kind: str, name: str, array: np.ndarray, **options):
    t = module(kind).InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    t.set_data_from_numpy(array, **options)
    return t


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_and_its_models_describe_themselves(gateway: Gateway, kind: str) -> None:
    with client(gateway, kind) as c:
        assert c.is_server_live() and c.is_server_ready() and c.is_model_ready("affine")
        assert not c.is_model_ready("nobody") and not c.is_model_ready("affine", "7")
        options = {"as_json": True} if kind == "grpc" else {}
        server = c.get_server_metadata(**options)
        assert server["name"] == "ringbatch" and "binary_tensor_data" in server["extensions"]
        about = c.get_model_metadata("affine", **options)
        assert about["inputs"][0]["name"] == "x" and [int(d) for d in about["inputs"][0]["shape"]] == [-1, 16]
        config = c.get_model_config("affine", **options)
        config = config["config"] if kind == "grpc" else config
        assert config["max_batch_size"] == 8 and config["input"][0]["data_type"] == "TYPE_FP32"
        index = c.get_model_repository_index(**options)
        models = index["models"] if kind == "grpc" else index
        assert {m["name"] for m in models} == {"affine", "image", "letters", "nap", "sum", "text", "types"}
        with pytest.raises(InferenceServerException, match="no model"):
            c.get_model_metadata("nothing")
        c.load_model("affine")  # it is
        with pytest.raises(InferenceServerException, match="starts no workers"):
            c.unload_model("affine")


@pytest.mark.parametrize("kind", KINDS)
def test_unload_and_load_end_and_start_a_models_workers(gateway: Gateway, kind: str) -> None:
    with client(gateway, kind) as c:
        for _ in range(2):
            c.unload_model("nap")
            index = c.get_model_repository_index(**({"as_json": True} if kind == "grpc" else {}))
            told = {m["name"]: m for m in (index["models"] if kind == "grpc" else index)}
            assert told["nap"]["reason"].startswith("asleep") and c.is_model_ready("nap")
            c.load_model("nap")
        c.unload_model("nap")
        assert (c.infer("nap", [given(kind, "x", X)]).as_numpy("y") == 3 * X).all()  # a request loads it, too
        with pytest.raises(InferenceServerException, match="as the broker's configuration declares it"):
            c.load_model("nap", config="{}")
        with pytest.raises(InferenceServerException, match="no model"):
            c.load_model("nothing")


@pytest.mark.parametrize("kind", KINDS)
def test_one_inference(gateway: Gateway, kind: str) -> None:
    with client(gateway, kind) as c:
        got = c.infer("affine", [given(kind, "x", X)], request_id="seven", priority=1, timeout=60_000_000, parameters={"nobody": "knows"})
        np.testing.assert_array_equal(got.as_numpy("y"), 2 * X + 1)
        answer = got.get_response()
        assert (answer["id"] if kind == "http" else answer.id) == "seven"


def test_inputs_and_outputs_as_json(gateway: Gateway) -> None:
    with client(gateway, "http") as c:
        got = c.infer("affine", [given("http", "x", X, binary_data=False)], outputs=[http.InferRequestedOutput("y", binary_data=False)])
        np.testing.assert_array_equal(got.as_numpy("y"), 2 * X + 1)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(gateway: Gateway, algorithm: str) -> None:
    with client(gateway, "http") as c:
        got = c.infer("affine", [given("http", "x", X)], request_compression_algorithm=algorithm, response_compression_algorithm=algorithm)
        np.testing.assert_array_equal(got.as_numpy("y"), 2 * X + 1)
    with client(gateway, "grpc") as g:
        got = g.infer("affine", [given("grpc", "x", X)], compression_algorithm=algorithm)
        np.testing.assert_array_equal(got.as_numpy("y"), 2 * X + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_element_type(gateway: Gateway, kind: str) -> None:
    arrays = {
        "bool": np.array([[True, False, True]]),
        "u8": np.array([[0, 7, 255]], np.uint8),
        "i8": np.array([[-128, 0, 127]], np.int8),
        "i16": np.array([[-32768, 0, 32767]], np.int16),
        "i32": np.array([[-(2**31), 0, 2**31 - 1]], np.int32),
        "i64": np.array([[-(2**63), 0, 2**63 - 1]], np.int64),
        "f16": np.array([[0.5, -65504, np.inf]], np.float16),
        "f32": np.array([[0.1, -1e30, np.nan]], np.float32),
        "f64": np.array([[0.1, -1e300, np.inf]], np.float64),
    }
    with client(gateway, kind) as c:
        got = c.infer("types", [given(kind, n, a) for n, a in arrays.items()])
        for name, array in arrays.items():
            np.testing.assert_array_equal(got.as_numpy(f"{name}_out"), array)
        some = [module(kind).InferRequestedOutput("f16_out"), module(kind).InferRequestedOutput("bool_out")]
        got = c.infer("types", [given(kind, n, a) for n, a in arrays.items()], outputs=some)
        np.testing.assert_array_equal(got.as_numpy("f16_out"), arrays["f16"])
        assert got.as_numpy("i8_out") is None


@pytest.mark.parametrize("kind", KINDS)
def test_variable_dimensions_and_two_inputs(gateway: Gateway, kind: str) -> None:
    with client(gateway, kind) as c:
        for n in (1, 17, 128):
            ids = np.arange(3 * n, dtype=np.int64).reshape(3, n)
            mask = ids % 2 == 0
            got = c.infer("text", [given(kind, "mask", mask), given(kind, "ids", ids)])
            np.testing.assert_array_equal(got.as_numpy("ids_out"), ids)
            np.testing.assert_array_equal(got.as_numpy("mask_out"), mask)


@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_than_a_batch_and_a_large_message(gateway: Gateway, kind: str) -> None:
    with client(gateway, kind) as c:
        x = np.random.default_rng(1).random((100, 16), np.float32)
        np.testing.assert_allclose(c.infer("affine", [given(kind, "x", x)]).as_numpy("y"), 2 * x + 1, rtol=1e-6)
        x = np.random.default_rng(1).random((200, 3, 64, 64), np.float32)  # 9.8 MB
        np.testing.assert_array_equal(c.infer("image", [given(kind, "x", x)]).as_numpy("y"), x)


@pytest.mark.parametrize("kind", KINDS)
def test_many_at_once(gateway: Gateway, kind: str) -> None:
    with client(gateway, kind) as c:
        answers: queue.Queue = queue.Queue()
        for i in range(64):
            x = np.full((1, 16), i, np.float32)
            if kind == "http":
                answers.put((i, c.async_infer("affine", [given(kind, "x", x)])))
            else:
                c.async_infer("affine", [given(kind, "x", x)], callback=lambda result, error, i=i: answers.put((i, result, error)))
        for _ in range(64):
            if kind == "http":
                i, pending = answers.get()
                got, error = pending.get_result(), None
            else:
                i, got, error = answers.get(timeout=60)
            assert error is None
            np.testing.assert_array_equal(got.as_numpy("y"), np.full((1, 16), 2 * i + 1, np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_asyncio(gateway: Gateway, kind: str) -> None:
    async def run() -> None:
        c = http_aio.InferenceServerClient(gateway.http) if kind == "http" else grpc_aio.InferenceServerClient(gateway.grpc)
        try:
            xs = [np.full((1, 16), i, np.float32) for i in range(32)]
            got = await asyncio.gather(*(c.infer("affine", [given(kind, "x", x)]) for x in xs))
            for x, g in zip(xs, got):
                np.testing.assert_array_equal(g.as_numpy("y"), 2 * x + 1)
        finally:
            await c.close()

    asyncio.run(run())


def test_a_stream_is_answered_one_by_one_in_order(gateway: Gateway) -> None:
    with client(gateway, "grpc") as c:
        answers: queue.Queue = queue.Queue()
        c.start_stream(lambda result, error: answers.put((result, error)))
        for i in range(50):
            shape = (1, 16) if i != 20 else (1, 15)
            c.async_stream_infer("affine", [given("grpc", "x", np.full(shape, i, np.float32))], request_id=str(i))
        for i in range(50):
            got, error = answers.get(timeout=60)
            if i == 20:
                assert "shape" in str(error)
                continue
            assert error is None and got.get_response().id == str(i)
            np.testing.assert_array_equal(got.as_numpy("y"), np.full((1, 16), 2 * i + 1, np.float32))
        c.stop_stream()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequence", [7, "seven"])
def test_a_sequence(gateway: Gateway, kind: str, sequence: int | str) -> None:
    with client(gateway, kind) as c:

        def step(value: float, **options) -> float:
            x = np.full((1, 16), value, np.float32)
            return float(c.infer("sum", [given(kind, "x", x)], **options).as_numpy("y")[0, 15])

        assert step(1, sequence_id=sequence, sequence_start=True) == 1
        assert [step(i, sequence_id=sequence) for i in (2, 3)] == [3, 6]
        assert step(10) == 10
        assert step(4, sequence_id=sequence, sequence_end=True) == 10
        with pytest.raises(InferenceServerException, match="begin it with sequence_start"):
            step(1, sequence_id=sequence)


def test_a_decoupled_stream(gateway: Gateway) -> None:
    with client(gateway, "grpc") as c:
        answers: queue.Queue = queue.Queue()
        c.start_stream(lambda result, error: answers.put((result, error)))
        n = given("grpc", "n", np.array([5], np.int32))
        c.async_stream_infer("letters", [n], request_id="five", enable_empty_final_response=True)
        text, parts, last = b"", 0, False
        while not last:
            got, error = answers.get(timeout=60)
            assert error is None and got.get_response().id == "five"
            last = got.get_response().parameters["triton_final_response"].bool_param
            if not last:
                text, parts = text + got.as_numpy("text").tobytes(), parts + 1
        assert text == b"abcde" and parts > 1 and not got.get_response().outputs
        c.async_stream_infer("letters", [n])
        got, error = answers.get(timeout=60)
        assert error is None and got.as_numpy("text").tobytes() == b"abcde"
        c.stop_stream()


def test_the_generate_extension(gateway: Gateway) -> None:
    def post(how: str):
        url, body = f"http://{gateway.http}/v2/models/letters/{how}", json.dumps({"n": 5, "parameters": {"priority": 1}}).encode()
        return urllib.request.urlopen(urllib.request.Request(url, body), timeout=60)

    assert json.load(post("generate")) == {"model_name": "letters", "model_version": "1", "text": [97, 98, 99, 100, 101]}
    events = [json.loads(line[6:]) for line in post("generate_stream") if line.strip()]
    assert len(events) > 1 and sum((e["text"] for e in events), []) == [97, 98, 99, 100, 101]


def test_sequences_of_a_stream(gateway: Gateway) -> None:
    with client(gateway, "grpc") as c:
        answers: queue.Queue = queue.Queue()
        c.start_stream(lambda result, error: answers.put((result, error)))
        for i in range(100):
            for sequence in (1, "one"):
                x = given("grpc", "x", np.full((1, 16), 1, np.float32))
                c.async_stream_infer("sum", [x], sequence_id=sequence, sequence_start=i == 0, sequence_end=i == 99)
        for i in range(200):
            got, error = answers.get(timeout=60)
            assert error is None
            assert got.as_numpy("y")[0, 0] == i // 2 + 1
        c.stop_stream()


@pytest.mark.parametrize("kind", KINDS)
def test_system_shared_memory(gateway: Gateway, kind: str) -> None:
    given_region = shm.create_shared_memory_region("in", IN, X.nbytes)
    taken_region = shm.create_shared_memory_region("out", OUT, X.nbytes + 64)
    try:
        with client(gateway, kind) as c:
            c.unregister_system_shared_memory()
            shm.set_shared_memory_region(given_region, [X])
            c.register_system_shared_memory("in", IN, X.nbytes)
            c.register_system_shared_memory("out", OUT, X.nbytes + 64)
            x = module(kind).InferInput("x", [2, 16], "FP32")
            x.set_shared_memory("in", X.nbytes)
            y = module(kind).InferRequestedOutput("y")
            y.set_shared_memory("out", X.nbytes, offset=64)
            got = c.infer("affine", [x], outputs=[y])
            assert got.get_output("y") is not None
            np.testing.assert_array_equal(shm.get_contents_as_numpy(taken_region, np.float32, [2, 16], offset=64), 2 * X + 1)
            known = c.get_system_shared_memory_status(**({"as_json": True} if kind == "grpc" else {}))
            names = set(known["regions"]) if kind == "grpc" else {r["name"] for r in known}
            assert names == {"in", "out"}
            with pytest.raises(InferenceServerException, match="already"):
                c.register_system_shared_memory("in", IN, X.nbytes)
            with pytest.raises(InferenceServerException, match="out of range"):
                c.register_system_shared_memory("far", IN, 1 << 20)
            far = module(kind).InferInput("x", [2, 16], "FP32")
            far.set_shared_memory("in", X.nbytes, offset=4)
            with pytest.raises(InferenceServerException, match="out of range"):
                c.infer("affine", [far])
            c.unregister_system_shared_memory("in")
            c.unregister_system_shared_memory()
            with pytest.raises(InferenceServerException, match="no shared-memory region"):
                c.infer("affine", [x], outputs=[y])
            with pytest.raises(InferenceServerException, match="CUDA shared memory is not supported"):
                c.register_cuda_shared_memory("gpu", base64.b64encode(bytes(64)), 0, 64)
    finally:
        shm.destroy_shared_memory_region(given_region)
        shm.destroy_shared_memory_region(taken_region)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_count_alike(gateway: Gateway, kind: str) -> None:
    with client(gateway, kind) as c:

        def stats() -> dict:
            s = c.get_inference_statistics("affine", **({"as_json": True} if kind == "grpc" else {}))
            return s["model_stats"][0]["inference_stats"]

        before = int(stats()["success"].get("count", 0))
        for _ in range(5):
            c.infer("affine", [given(kind, "x", X)])
        deadline, counted = time.monotonic() + 60, before
        while counted < before + 5:  # an answer is counted when it was sent, a moment after its caller has it
            assert time.monotonic() < deadline
            after = stats()
            (counted,) = {int(after[k].get("count", 0)) for k in ("success", "queue", "compute_input", "compute_infer", "compute_output")}


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_the_clients_own_exceptions(gateway: Gateway, kind: str) -> None:
    with client(gateway, kind) as c:
        with pytest.raises(InferenceServerException, match="FP32"):
            c.infer("affine", [given(kind, "x", X.astype(np.float64))])
        with pytest.raises(InferenceServerException, match="no input"):
            c.infer("affine", [given(kind, "z", X)])
        with pytest.raises(InferenceServerException, match="priority"):
            c.infer("affine", [given(kind, "x", X)], priority=5)


def test_the_line_that_it_prints_works(gateway: Gateway) -> None:
    line = re.search(r"^try: (.*)$", gateway.greeting, re.M)[1]  # type: ignore[index]
    out = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
    assert json.loads(out)["outputs"][0]["data"] == [1] * 16

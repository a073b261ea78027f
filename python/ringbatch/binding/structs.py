# SPDX-License-Identifier: Apache-2.0
"""The structs and functions of ringbatch.h, as ctypes sees them."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p

ABI_VERSION = 1
MAX_VARIABLE_DIMS = 8
MAX_RANK = 8
NOTIFY, PARTS = 1, 4
INPUT, OUTPUT, STATE = 0, 1, 2


class Tensor(Structure):
    _fields_ = [
        ("name", c_char * 129), ("on_device", c_uint8), ("dtype", c_uint32), ("rank", c_uint32), ("variable", c_uint32),
        ("shape", c_uint64 * MAX_RANK), ("row_bytes", c_uint64), ("offset", c_uint64), ("stride", c_uint64),
        ("dim", c_char * 32 * MAX_RANK),
    ]  # fmt: skip


class View(Structure):
    _fields_ = [
        ("data", c_void_p), ("bytes", c_uint64), ("stride", c_uint64), ("dtype", c_uint32), ("rank", c_uint32),
        ("shape", c_uint64 * (1 + MAX_RANK)),
    ]  # fmt: skip


class Model(Structure):
    _fields_ = [
        ("name", c_char * 129), ("inputs", c_uint32), ("outputs", c_uint32), ("max_batch_size", c_uint32),
        ("slots", c_uint32), ("window", c_uint32), ("levels", c_uint32), ("wait_time", c_int64),
    ]  # fmt: skip


class Map(Structure):
    _fields_ = [("id", c_uint64), ("base", c_void_p), ("bytes", c_uint64), ("attachment", c_uint32)]


class Device(Structure):
    _fields_ = [
        ("size", c_uint32), ("ordinal", c_int32), ("base", c_uint64), ("bytes", c_uint64), ("context", c_void_p),
        ("gpu", c_char * 48),
    ]  # fmt: skip


class ConnectOptions(Structure):
    _fields_ = [
        ("size", c_uint32), ("window", c_uint32), ("socket", c_char_p), ("name", c_char_p), ("timeout", c_int64),
        ("wait", c_uint32), ("device", c_uint32),
    ]  # fmt: skip


class Request(Structure):
    _fields_ = [("id", c_uint64), ("base", c_void_p), ("slot", c_uint32), ("rows", c_uint32), ("attachment", c_uint32)]


class Timing(Structure):
    _fields_ = [(name, c_int64) for name in ("claim", "write", "queue", "dispatch", "compute", "wake")]


class WorkerOptions(Structure):
    _fields_ = [
        ("size", c_uint32), ("depth", c_uint32), ("socket", c_char_p), ("name", c_char_p), ("gpu", c_char_p),
        ("timeout", c_int64), ("share", c_uint32), ("pad_to", c_uint32), ("pad_preferred", c_uint32),
        ("gather_threads", c_uint32), ("policy", c_char_p), ("pipeline", c_char_p), ("lanes", c_uint32),
        ("run_once", c_uint32), ("version", c_char_p), ("wait", c_uint32),
    ]  # fmt: skip


class Run(Structure):
    _fields_ = [("slot", c_uint32), ("row", c_uint32), ("rows", c_uint32)]


class Member(Structure):
    _fields_ = [
        ("row", c_uint32), ("rows", c_uint32), ("deadline", c_int64), ("committed", c_int64),
        ("dims", c_uint32 * MAX_VARIABLE_DIMS),
    ]  # fmt: skip


class Batch(Structure):
    _fields_ = [
        ("id", c_uint64), ("worker", c_uint64), ("base", c_void_p), ("requests", c_uint32), ("rows", c_uint32),
        ("runs", c_uint32), ("pad_to", c_uint32), ("dims", c_uint32 * MAX_VARIABLE_DIMS), ("request", POINTER(Member)),
        ("slot", POINTER(c_uint32)), ("run", POINTER(Run)), ("place", c_uint32), ("ragged", c_uint32), ("step", c_void_p),
        ("streamed", c_void_p),
    ]  # fmt: skip


# Pointers travel as plain addresses (c_void_p): that is the quickest for
# ctypes, and everything passed here is kept alive by its caller.
_client = _worker = _request = _sequence = c_uint64
_address = c_void_p

PROTOTYPES = {
    "rb_status_name": (c_char_p, [c_int]),
    "rb_status_retryable": (c_int, [c_int]),
    "rb_error": (c_char_p, []),
    "rb_abi_version": (c_int, []),
    "rb_version": (c_char_p, []),
    "rb_cores": (c_uint32, []),
    "rb_map_release": (c_int, [c_uint64]),
    "rb_map_device": (c_int, [c_uint64, _address]),
    "rb_connect": (c_int, [c_char_p, _address, _address]),
    "rb_close": (c_int, [_client]),
    "rb_client_model": (c_int, [_client, _address]),
    "rb_client_tensor": (c_int, [_client, c_int, c_uint32, _address]),
    "rb_client_map": (c_int, [_client, _address]),
    "rb_claim": (c_int, [_client, c_uint32, _address, c_uint32, c_int64, _address]),
    "rb_input": (c_int, [_client, _request, c_uint32, _address]),
    "rb_output": (c_int, [_client, _request, c_uint32, _address]),
    "rb_output_row": (c_int, [_client, _request, c_uint32, c_uint32, _address]),
    "rb_set_priority": (c_int, [_client, _request, c_uint32]),
    "rb_set_cost": (c_int, [_client, _request, c_uint32]),
    "rb_commit": (c_int, [_client, _request, c_int64, c_uint32]),
    "rb_commit_all": (c_int, [_client, _address, c_uint32, c_int64, c_uint32]),
    "rb_commit_on_stream": (c_int, [_client, _address, c_uint32, _address, c_int64, c_uint32]),
    "rb_next_part": (c_int, [_client, _request, _address, c_uint64, c_int64, _address, _address]),
    "rb_wait": (c_int, [_client, _request, c_int64]),
    "rb_poll": (c_int, [_client, _request]),
    "rb_cancel": (c_int, [_client, _request]),
    "rb_release": (c_int, [_client, _request]),
    "rb_release_on_stream": (c_int, [_client, _request, _address]),
    "rb_request_map": (c_int, [_client, _request, _address]),
    "rb_request_timing": (c_int, [_client, _request, _address]),
    "rb_sequence_open": (c_int, [_client, c_uint32, c_int64, _address]),
    "rb_sequence_request": (c_int, [_client, _sequence, _address, c_uint32, c_int64, _address]),
    "rb_sequence_reset": (c_int, [_client, _sequence, _address, c_uint32]),
    "rb_sequence_state": (c_int, [_client, _sequence, c_uint32, _address, _address]),
    "rb_sequence_copy": (c_int, [_client, _sequence, c_int64, _address]),
    "rb_sequence_undo": (c_int, [_client, _sequence, _request]),
    "rb_sequence_close": (c_int, [_client, _sequence]),
    "rb_client_fd": (c_int, [_client, _address]),
    "rb_reap": (c_int, [_client, _address, c_uint32, _address]),
    "rb_reap_wait": (c_int, [_client, c_int64, _address, c_uint32, _address]),
    "rb_worker_attach": (c_int, [c_char_p, c_char_p, _address, _address]),
    "rb_worker_close": (c_int, [_worker]),
    "rb_worker_notes": (c_int, [_worker, _address]),
    "rb_worker_model": (c_int, [_worker, _address]),
    "rb_worker_tensor": (c_int, [_worker, c_int, c_uint32, _address]),
    "rb_worker_map": (c_int, [_worker, _address]),
    "rb_worker_next": (c_int, [_worker, c_int64, _address]),
    "rb_worker_wait": (c_int, [_worker, c_int64]),
    "rb_worker_unwanted": (c_int, [_worker, _address, c_uint32, _address]),
    "rb_batch_set_row_dims": (c_int, [_address, c_uint32, _address, c_uint32]),
    "rb_batch_show": (c_int, [_address, c_uint32, c_uint32]),
    "rb_batch_gather": (c_int, [_address, c_int, c_uint32, _address, c_uint64]),
    "rb_batch_prefetch": (c_int, [_address, c_uint32, _address, c_uint64]),
    "rb_batch_scatter": (c_int, [_address, c_uint32, _address, c_uint64]),
    "rb_batch_pack": (c_int, [_address, c_uint32, _address, c_uint64, _address]),
    "rb_batch_unpack": (c_int, [_address, c_uint32, _address, c_uint64]),
    "rb_batch_set_state": (c_int, [_address, c_uint32, _address, c_uint64]),
    "rb_batch_fail": (c_int, [_address, c_uint32, c_char_p]),
    "rb_batch_fail_as": (c_int, [_address, c_uint32, c_int, c_char_p]),
    "rb_batch_fail_all": (c_int, [_address, c_char_p]),
    "rb_batch_waiting": (c_int, [_address, c_uint32]),
    "rb_batch_complete": (c_int, [_address]),
    "rb_batch_set_version": (c_int, [_address, c_uint32]),
    "rb_batch_set_rounds": (c_int, [_address, c_uint32]),
    "rb_publish_open": (c_int, [c_char_p, c_char_p, _address, _address]),
    "rb_publish_tensor": (c_int, [c_uint64, c_uint32, _address]),
    "rb_publish_device": (c_int, [c_uint64, _address]),
    "rb_publish_begin": (c_int, [c_uint64, c_int64, _address]),
    "rb_publish_commit": (c_int, [c_uint64, _address]),
    "rb_publish_withdrawn": (c_int, [c_uint64, _address, _address, c_uint32]),
    "rb_publish_check": (c_int, [c_uint64]),
    "rb_publish_close": (c_int, [c_uint64]),
    "rb_follow_open": (c_int, [c_char_p, _address, _address]),
    "rb_follow_tensor": (c_int, [c_uint64, c_uint32, _address]),
    "rb_follow_device": (c_int, [c_uint64, _address]),
    "rb_follow_enter": (c_int, [c_uint64, _address, _address, _address]),
    "rb_follow_current": (c_int, [c_uint64, _address]),
    "rb_follow_loaded": (c_int, [c_uint64]),
    "rb_follow_refuse": (c_int, [c_uint64, c_char_p]),
    "rb_follow_exit": (c_int, [c_uint64]),
    "rb_follow_close": (c_int, [c_uint64]),
    "rb_request_version": (c_int, [_client, _request, _address]),
    "rb_stats": (c_int, [c_char_p, c_int64, _address]),
    "rb_free": (None, [_address]),
}

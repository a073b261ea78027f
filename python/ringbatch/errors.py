# SPDX-License-Identifier: Apache-2.0
"""Exceptions: one for each status, with the names of the Go errors.

An exception is also of Python's own kind if there is one: ``except TimeoutError``
catches :class:`Expired`, and ``except ValueError`` a wrong :class:`Shape`.
"""

from __future__ import annotations


class Error(Exception):
    """Any error of ringbatch. ``status`` is its number in the C ABI."""

    status: int = -1
    retryable: bool = False  # the same request may succeed if sent again
    retry_attach: bool = False  # a peer that could not attach for this reason may succeed later

    def __init_subclass__(cls, **status: int) -> None:
        for name, value in status.items():
            setattr(cls, name, value)


# BEGIN statuses: written by `go generate ./status` from status/table.go


class Failed(Error, status=1):
    """The model's function failed this request; the text says why."""


class Expired(Error, TimeoutError, status=2):
    """Its deadline passed."""


class Canceled(Error, status=3):
    """Its client canceled it."""


class QueueFull(Error, status=4, retryable=True):
    """Its priority level's queue is full."""


class QueueTimeout(Error, TimeoutError, status=5):
    """It waited for longer than its priority level allows."""


class TooLarge(Error, ValueError, status=6):
    """More rows than max_batch_size."""


class WorkerDied(Error, status=7):
    """It was in a batch that killed its worker, every time it was tried, or hung two of them."""


class WorkerHung(Error, status=8):
    """Its worker outlived its lease and could not be killed."""


class Draining(Error, ConnectionError, status=9, retryable=True, retry_attach=True):
    """The broker is shutting down and takes no new requests."""


class BrokerGone(Error, ConnectionError, status=10, retryable=True, retry_attach=True):
    """The broker went away; safe to retry."""


class NoBroker(Error, ConnectionError, status=11, retryable=True, retry_attach=True):
    """Nothing listens on the socket."""


class UnknownModel(Error, LookupError, status=12, retry_attach=True):
    """The broker has no model of that name."""


class Version(Error, RuntimeError, status=13):
    """The peer speaks another version of the protocol."""


class Layout(Error, status=14):
    """Segment geometry does not match its description."""


class Forbidden(Error, PermissionError, status=15):
    """This uid may not use this broker."""


class NoMemory(Error, MemoryError, status=16, retry_attach=True):
    """The kernel refused the memory."""


class SignatureMismatch(Error, status=17):
    """The model exists with another signature."""


class RingFull(Error, status=18, retryable=True, retry_attach=True):
    """No window of that many slots is free for a new client."""


class BrokerRunning(Error, status=19):
    """Another broker serves this socket."""


class Protocol(Error, status=20):
    """A peer broke the protocol and was disconnected."""


class Invalid(Error, ValueError, status=21):
    """An argument or configuration value is not acceptable."""


class DType(Error, TypeError, status=22):
    """Tensor has another element type."""


class Shape(Error, ValueError, status=23):
    """Tensor has another shape."""


class Rows(Error, ValueError, status=24):
    """Inputs disagree on rows, or rows outside 1..max."""


class Size(Error, ValueError, status=25):
    """Byte length does not fit the shape."""


class OutputTooSmall(Error, status=26):
    """The caller's buffer cannot hold the output."""


class Full(Error, status=27, retryable=True):
    """Every slot of the client's window is in use."""


class Closed(Error, RuntimeError, status=28):
    """The client or worker was closed."""


class Released(Error, RuntimeError, status=29):
    """The request was released; its views are gone."""


class Committed(Error, status=30):
    """The request was committed already."""


class NotCommitted(Error, status=31):
    """The request was not committed yet."""


class NotDone(Error, status=32):
    """The request has not ended yet."""


class NoLevel(Error, ValueError, status=33):
    """No such priority level."""


class Timeout(Error, TimeoutError, status=34, retry_attach=True):
    """The caller's wait ended before the request did."""


class Forked(Error, RuntimeError, status=35):
    """This process was forked from the process that connected."""


class NoGPU(Error, status=36):
    """This needs a GPU and there is none."""


class TooManyConnections(Error, ConnectionError, status=37, retryable=True, retry_attach=True):
    """The broker serves as many connections as it may."""


class NoDescriptors(Error, OSError, status=38, retryable=True, retry_attach=True):
    """The broker or this process has no file descriptor left."""


class NoWorker(Error, status=39, retryable=True, retry_attach=True):
    """No worker is attached, and the model's policy says no_worker=refuse."""


class Quota(Error, status=40, retry_attach=True):
    """This user or process has as much of the broker as one may have; the text says of what, and which setting raises it."""


class Namespace(Error, status=41):
    """The peer lives in another time namespace, or in a PID namespace in which the broker cannot watch it."""


class Overloaded(Error, status=42, retryable=True):
    """Refused on arrival: it could not be answered within its deadline or the model's latency_goal."""


class WrongGPU(Error, status=43):
    """The model's device memory is on a GPU that this process does not see."""


class StateLost(Error, status=44):
    """The sequence's state is gone with its broker; reset the sequence."""


class Busy(Error, status=45, retry_attach=True):
    """Another process publishes the weights of this model."""


class Restarted(Error, status=46, retryable=True):
    """A stream that must not begin again did."""


__all__ = [
    "BrokerGone", "BrokerRunning", "Busy", "Canceled", "Closed", "Committed", "DType", "Draining", "Error", "Expired",
    "Failed", "Forbidden", "Forked", "ForkedClient", "Full", "Invalid", "Layout", "Namespace", "NoBroker",
    "NoDescriptors", "NoGPU", "NoLevel", "NoMemory", "NoWorker", "NotCommitted", "NotDone", "OutputTooSmall",
    "Overloaded", "Protocol", "QueueFull", "QueueTimeout", "Quota", "Released", "Restarted", "RingFull", "Rows",
    "Shape", "SignatureMismatch", "Size", "StateLost", "Timeout", "TooLarge", "TooManyConnections", "UnknownModel",
    "Version", "WorkerDied", "WorkerHung", "WrongGPU",
]

# END statuses

ForkedClient = Forked

BY_STATUS: dict[int, type[Error]] = {cls.status: cls for cls in Error.__subclasses__()}


def error_for(status: int, text: str) -> Error:
    """The exception for a status of the C ABI, with its text."""
    cls = BY_STATUS.get(status)
    if cls is None:
        return Error(f"status {status}: {text}")
    return cls(text)

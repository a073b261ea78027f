# SPDX-License-Identifier: Apache-2.0
"""Exceptions: one for each status, with the names of the Go errors.

Where Python has a word for it the exception is also of that kind, so that
``except TimeoutError`` catches :class:`Expired`, and ``except ValueError`` a
wrong :class:`Shape`.
"""

from __future__ import annotations


class Error(Exception):
    """Any error of ringbatch. ``status`` is its number in the C ABI."""

    status: int = -1
    retryable: bool = False  # the same request may succeed if sent again
    retry_attach: bool = False  # a worker that could not attach for this reason tries again


# BEGIN statuses: written by `go generate ./status` from status/table.go


class Failed(Error):
    """The model's function failed this request; the text says why."""

    status = 1


class Expired(Error, TimeoutError):
    """Its deadline passed."""

    status = 2


class Canceled(Error):
    """Its client canceled it."""

    status = 3


class QueueFull(Error):
    """Its priority level's queue is full."""

    status = 4
    retryable = True


class QueueTimeout(Error, TimeoutError):
    """It waited for longer than its priority level allows."""

    status = 5


class TooLarge(Error, ValueError):
    """More rows than max_batch_size."""

    status = 6


class WorkerDied(Error):
    """It was in a batch that killed its worker, every time it was tried, or hung two of them."""

    status = 7


class WorkerHung(Error):
    """Its worker outlived its lease and could not be killed."""

    status = 8


class Draining(Error, ConnectionError):
    """The broker is shutting down and takes no new requests."""

    status = 9
    retryable = True
    retry_attach = True


class BrokerGone(Error, ConnectionError):
    """The broker went away; safe to retry."""

    status = 10
    retryable = True
    retry_attach = True


class NoBroker(Error, ConnectionError):
    """Nothing listens on the socket."""

    status = 11
    retryable = True
    retry_attach = True


class UnknownModel(Error, LookupError):
    """The broker has no model of that name."""

    status = 12


class Version(Error, RuntimeError):
    """The peer speaks another version of the protocol."""

    status = 13


class Layout(Error):
    """Segment geometry does not match its description."""

    status = 14


class Forbidden(Error, PermissionError):
    """This uid may not use this broker."""

    status = 15


class NoMemory(Error, MemoryError):
    """The kernel refused the memory."""

    status = 16
    retry_attach = True


class SignatureMismatch(Error):
    """The model exists with another signature."""

    status = 17


class RingFull(Error):
    """No window of that many slots is free for a new client."""

    status = 18
    retryable = True
    retry_attach = True


class BrokerRunning(Error):
    """Another broker serves this socket."""

    status = 19


class Protocol(Error):
    """A peer broke the protocol and was disconnected."""

    status = 20


class Invalid(Error, ValueError):
    """An argument or configuration value is not acceptable."""

    status = 21


class DType(Error, TypeError):
    """Tensor has another element type."""

    status = 22


class Shape(Error, ValueError):
    """Tensor has another shape."""

    status = 23


class Rows(Error, ValueError):
    """Inputs disagree on rows, or rows outside 1..max."""

    status = 24


class Size(Error, ValueError):
    """Byte length does not fit the shape."""

    status = 25


class OutputTooSmall(Error):
    """The caller's buffer cannot hold the output."""

    status = 26


class Full(Error):
    """Every slot of the client's window is in use."""

    status = 27
    retryable = True


class Closed(Error, RuntimeError):
    """The client or worker was closed."""

    status = 28


class Released(Error, RuntimeError):
    """The request was released; its views are gone."""

    status = 29


class Committed(Error):
    """The request was committed already."""

    status = 30


class NotCommitted(Error):
    """The request was not committed yet."""

    status = 31


class NotDone(Error):
    """The request has not ended yet."""

    status = 32


class NoLevel(Error, ValueError):
    """No such priority level."""

    status = 33


class Timeout(Error, TimeoutError):
    """The caller's wait ended before the request did."""

    status = 34
    retry_attach = True


class Forked(Error, RuntimeError):
    """This process is a fork of the one that connected."""

    status = 35


class NoGPU(Error):
    """This needs a GPU and there is none."""

    status = 36


class TooManyConnections(Error, ConnectionError):
    """The broker serves as many connections as it may."""

    status = 37
    retryable = True
    retry_attach = True


class NoDescriptors(Error, OSError):
    """The broker or this process has no file descriptor left."""

    status = 38
    retryable = True
    retry_attach = True


class NoWorker(Error):
    """No worker is attached, and the model's policy says no_worker=refuse."""

    status = 39
    retryable = True


class Quota(Error):
    """This user or process has as much of the broker as one may have; the text says of what, and which setting raises it."""

    status = 40
    retry_attach = True


class Namespace(Error):
    """The peer lives in another time namespace, or in a PID namespace in which the broker cannot watch it."""

    status = 41


class Overloaded(Error):
    """Refused on arrival: it could not be answered within its deadline or the model's latency_goal."""

    status = 42
    retryable = True


class WrongGPU(Error):
    """The model's device memory is on a GPU that this process does not see."""

    status = 43


__all__ = [
    "BrokerGone", "BrokerRunning", "Canceled", "Closed", "Committed", "DType", "Draining", "Error", "Expired", "Failed",
    "Forbidden", "Forked", "ForkedClient", "Full", "Invalid", "Layout", "Namespace", "NoBroker", "NoDescriptors",
    "NoGPU", "NoLevel", "NoMemory", "NoWorker", "NotCommitted", "NotDone", "OutputTooSmall", "Overloaded", "Protocol",
    "QueueFull", "QueueTimeout", "Quota", "Released", "RingFull", "Rows", "Shape", "SignatureMismatch", "Size",
    "Timeout", "TooLarge", "TooManyConnections", "UnknownModel", "Version", "WorkerDied", "WorkerHung", "WrongGPU",
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

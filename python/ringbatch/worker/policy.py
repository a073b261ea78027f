# SPDX-License-Identifier: Apache-2.0
"""Settings of a model's policy, checked before a broker sees them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from .. import errors
from ..binding.library import seconds

# The values that each key takes.
# BEGIN policy keys: written by `go generate ./status` from policy/keys.go
KEYS = {
    "max_batch_size": "number",
    "max_batch_cost": "number",
    "cost": "dimension",
    "wait_time": "duration or auto",
    "latency_goal": "duration",
    "preferred_batch_sizes": "list",
    "slots": "number",
    "max_window": "number",
    "private": "bool",
    "lease": "duration",
    "max_attempts": "number",
    "no_worker": "wait or refuse",
    "ragged": "bool",
    "preserve_order": "bool",
    "default_priority": "number",
    "ageing": "duration",
    "max_queue": "number",
    "default_timeout": "duration",
    "max_timeout": "duration",
    "on_timeout": "reject or delay",
    "priorities": "number",
    "buckets": "list",
}
# END policy keys


def policy_text(settings: Mapping[str, Any]) -> str:
    """Settings as C takes them: key=value, one a line. Raises Invalid for an unknown key or a wrong value."""
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):  # of single inputs or priority levels
            pairs += [(f"{key}.{part}", v) for part, v in value.items()]
        elif value is not None:
            pairs.append((key, value))
    for key, value in pairs:
        _check(key, value)
    return "\n".join(f"{key}={_text(value)}" for key, value in pairs)


def _check(key: str, value: Any) -> None:
    name = key.partition(".")[0]
    if name not in KEYS:
        near = difflib.get_close_matches(name, KEYS, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise errors.Invalid(f'unknown key "{name}"{meant}; known are {", ".join(sorted(KEYS))}')
    kind, text = KEYS[name], _text(value)
    if key == "buckets" or (text, name) == ("auto", "wait_time"):  # the broker knows the inputs
        return
    if kind.startswith("duration"):
        try:
            if seconds(value) >= 0:
                return
            why = "must not be negative"
        except errors.Invalid as e:
            why = f"{e}{', or auto' * kind.endswith('auto')}"
        raise errors.Invalid(f"{key}={text}: {why}")
    patterns = {"number": r"\d+", "list": r"\[?\d*(,\d+)*\]?", "bool": "true|false|[tTfF10]", "dimension": r"\S+"}
    if not re.fullmatch(patterns.get(kind, kind.replace(" or ", "|")), text if kind != "bool" else text.lower()):
        want = {"number": "a number", "list": "numbers, like 8,16,32", "bool": "true or false"}.get(kind, kind)
        raise errors.Invalid(f"{key}={text}: must be {want}")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, timedelta):
        return str(value.total_seconds())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "[" + ",".join(map(_text, value)) + "]"
    return "".join(str(value).split())  # blanks separate pairs

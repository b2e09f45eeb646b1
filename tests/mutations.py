"""Mutations of files: JSON values by structure, anything by bytes; what has to hold of whatever reads them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rotor.errors import RotorError

CASES = {"header": 2000, "index": 1500, "config": 700, "quantization": 1500, "recipe": 800, "override": 500}
CASES |= {"run": 1000, "table": 1200, "checkpoint": 700, "kernels": 300, "bases": 500}
"""Mutations of each kind of file."""

SHARES = [pytest.param(0.4, id="some"), pytest.param(1.0, id="all", marks=pytest.mark.slow)]
"""Of them that are made: the first ones, and among the slow tests all."""


def mutations(kind: str, share: float) -> settings:
    return settings(
        max_examples=round(share * CASES[kind]),
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


NUMBERS = [0, 1, -1, 2, 7, 2**31, 2**40, 2**63 - 1, 2**63, 10**30, -(2**63), 1 << 2000, 0.5, -1.5, 1e308]
NUMBERS += [math.nan, math.inf, -math.inf]
TEXTS = ["", "x", "..", "../model.safetensors", "/etc/passwd", "a/b.safetensors", "\0", "\ud800", "F8_E4M3", "I64"]
TEXTS += ["BOOL", "y" * 5000, "line\nline\x1b[31m", "post", "pre", "model.safetensors", "float16", "${x}"]
TEXTS += ["!!python/name:os.system"]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"": {}}, deep(50), deep(900), [0] * 300, [1, 2]]
OTHERS += [[2**62, 2**62]]
VALUES = st.one_of(st.sampled_from([*NUMBERS, *TEXTS, *OTHERS]), st.integers(-5, 300), st.floats(), st.text(max_size=4))
CHANGES = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from(["replace", "replace", "remove", "rename", "repeat"]), VALUES),
    min_size=1,
    max_size=3,
)
BYTES = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.sampled_from(["flip", "insert", "cut", "end"]), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        node = stack.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            found.append((node, key))
            if isinstance(node[key], (dict, list)):
                stack.append(node[key])
    return found


def changed(value: Any, changes: list[tuple[int, str, Any]]) -> Any:
    value = copy.deepcopy(value)
    for number, kind, new in changes:
        known = places(value)
        if not known:
            return value
        node, key = known[number % len(known)]
        if kind == "remove":
            del node[key]
        elif kind == "rename" and isinstance(node, dict):
            node[str(new)[:200] if not isinstance(new, int) or abs(new) < 2**64 else "big"] = node.pop(key)
        elif kind == "repeat" and isinstance(node, list):
            node.extend([node[key]] * 3)
        else:
            node[key] = copy.deepcopy(new)
    return value


def garbled(data: bytes, changes: list[tuple[int, str, int]]) -> bytes:
    for number, kind, byte in changes:
        at = number % max(len(data), 1)
        if kind == "flip":
            data = data[:at] + bytes([data[at] ^ (1 << byte % 8)]) + data[at + 1 :] if data else data
        elif kind == "insert":
            data = data[:at] + bytes([byte]) * (1 + byte % 3) + data[at:]
        else:
            data = data[:at] if kind == "end" else data[:at] + data[at + 1 + byte :]
    return data


def clean(action: Callable[[], Any]) -> Any:
    """The result of an action; an error of rotor's, of bounded and printable text, is as good."""
    caught: RotorError | None = None
    try:
        return action()
    except RotorError as error:
        caught = error
    assert caught.message
    assert caught.message.isprintable()
    assert len(str(caught)) < 5000
    return None


def both(kind: str, base: Any, check: Callable[[bytes], None], share: float) -> None:
    """Run `check` on mutations of a JSON value: two thirds by structure, one third by bytes."""
    text = json.dumps(base).encode()

    @mutations(kind, share)
    @given(st.one_of(CHANGES, CHANGES, BYTES))
    def run(changes: Any) -> None:
        by_bytes = changes[0][1] in ("flip", "insert", "cut", "end")
        check(garbled(text, changes) if by_bytes else json.dumps(changed(base, changes)).encode())

    run()

"""Where two JSON values differ: one walk for settings, fingerprints and reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator


def differences(
    old: object, new: object, name: str = "", *, optional: Callable[[str], bool] = lambda name: False
) -> Iterator[tuple[str, object, object]]:
    """(dotted name, old value, new value) of everything that is not the same, in the order of the old value.

    Objects are compared key by key, lists of one length entry by entry; tuples count as lists. Values of different
    types differ, so that 1 is not 1.0 and not true.

    Args:
        optional: whether in the object of that name only keys that both have are compared.
    """
    old, new = (list(value) if isinstance(value, tuple) else value for value in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        shared_only = optional(name)
        for key in [key for key in old if key in new] if shared_only else dict.fromkeys([*old, *new]):
            below = f"{name}.{key}" if name else str(key)
            yield from differences(old.get(key), new.get(key), below, optional=optional)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (first, second) in enumerate(zip(old, new, strict=True)):
            yield from differences(first, second, f"{name}[{index}]", optional=optional)
    elif type(old) is not type(new) or old != new:
        yield name, old, new


def shorten_json(value: object) -> str:
    """A value on one line of at most 40 characters; a hash keeps its end."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-6:]}"

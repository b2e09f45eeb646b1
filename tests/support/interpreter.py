"""A plugin of pytest that makes Triton's interpreter quicker, for checks that it runs (`-p support.interpreter`).

What it computes stays as it is:

- It maps triton.language to its own functions anew for each call of a device function, which takes longer than most
  such functions. Here that happens once for each module in a launch: nothing takes back what is mapped before a launch
  ends.
- It computes for every sum and product of integers whether it overflows, and asserts that only with `debug`, which is
  off. Here it computes nothing that it does not look at.
- It makes the table from Triton's types to NumPy's for every number that it casts. Here once for each type.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture(scope="session", autouse=True)
def quicker() -> Any:
    mapped: set[int] = set()
    known: dict[str, Any] = {}
    launch, numpy_type = interpreter.GridExecutor.__call__, interpreter._get_np_dtype
    builder = interpreter.interpreter_builder

    def launching(self: Any, *arguments: Any, **keywords: Any) -> None:
        mapped.clear()
        launch(self, *arguments, **keywords)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in mapped:
            interpreter._patch_lang(self.fn)
            mapped.add(module)
        return self.rewrite()(*arguments, **keywords)

    def remembered(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = numpy_type(kind)
        return known[kind.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launching)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=builder.options.debug))
        patch.setattr(interpreter, "_get_np_dtype", remembered)
        yield

"""A plugin of pytest that makes Triton's interpreter quicker, for checks that it runs (`-p interpreter`).

It maps triton.language to its own functions anew for each call of a device function, which takes longer than most such
functions. Here that happens once for each module in a launch: nothing takes back what is mapped before a launch ends.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture(scope="session", autouse=True)
def mapped_once_a_launch() -> Any:
    mapped: set[int] = set()
    launch = interpreter.GridExecutor.__call__

    def launching(self: Any, *arguments: Any, **keywords: Any) -> None:
        mapped.clear()
        launch(self, *arguments, **keywords)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in mapped:
            interpreter._patch_lang(self.fn)
            mapped.add(module)
        return self.rewrite()(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launching)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield

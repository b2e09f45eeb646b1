"""A plugin of pytest that makes Triton's interpreter quicker, for checks that it runs (`-p support.interpreter`).

What it computes stays as it is:

- It maps triton.language to its own functions anew for each call of a device function, which takes longer than most
  such functions. Here that happens once for each module in a launch: nothing takes back what is mapped before a launch
  ends.
- It computes for every sum and product of integers whether it overflows, and asserts that only with `debug`, which is
  off. Here it computes nothing that it does not look at.
- It makes the table from Triton's types to NumPy's for every number that it casts. Here once for each type.
- It checks the shape of every tensor and wraps its numbers anew. Here once for each shape, which tensors then share;
  two that share theirs are not broadcast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
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
        share_shapes(patch)
        patch.setattr(interpreter.GridExecutor, "__call__", launching)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=builder.options.debug))
        patch.setattr(interpreter, "_get_np_dtype", remembered)
        yield


def share_shapes(patch: pytest.MonkeyPatch) -> None:
    """Make what a shape looks like to types and to tensors once, by Triton's own code, for all that have it."""
    shapes: dict[tuple[int, ...], tuple[Any, Any, Any, Any]] = {}
    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value

    def typed(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([n.value if isinstance(n, core.constexpr) else n for n in shape])
        if key not in shapes:
            block_init(self, element_ty, shape)
            probe = core.tensor.__new__(core.tensor)
            tensor_init(probe, None, self)
            shapes[key] = self.shape, self.numel, probe.shape, probe.numel
        self.element_ty = element_ty
        self.shape, self.numel, self.shape_of_tensors, self.numel_of_tensors = shapes[key]

    def made(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        own = type if isinstance(type, core.block_type) else scalar
        self.shape, self.numel = own.shape_of_tensors, own.numel_of_tensors

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    scalar = core.tensor(None, core.int32)
    scalar.shape_of_tensors, scalar.numel_of_tensors = scalar.shape, scalar.numel
    name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
    patch.setattr(core.block_type, "name", name, raising=False)
    patch.setattr(core.block_type, "__init__", typed)
    patch.setattr(core.tensor, "__init__", made)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_unless_alike)

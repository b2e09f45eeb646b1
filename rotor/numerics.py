"""Find NaN and Inf and the module or tensor they come from, and make factorisations reproducible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .errors import NumericsError


@contextmanager
def one_thread() -> Iterator[None]:
    """Run products and factorisations in one thread, for results that do not depend on the number of threads.

    LAPACK sums in another order with more threads, which changes the last digits of eigenvectors. The work done here
    is a small part of any command's time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def is_finite(tensor: Tensor) -> bool:
    """Tell whether a tensor has neither NaN nor Inf. Its minimum and maximum show both, far faster than `isfinite`."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:  # torch has no aminmax for 8-bit floats
        tensor = tensor.float()
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor.detach()))


def check_parameters(module: nn.Module, where: str, prefix: str = "") -> None:
    """Check weights for NaN and Inf after a cast.

    Args:
        where: name of the model or layer for errors.
        prefix: put before the names of the parameters.
    Raises:
        NumericsError: a parameter has a NaN or Inf; names it, with its dtype.
    """
    for name, parameter in module.named_parameters():
        if not is_finite(parameter):
            bad = int((~torch.isfinite(parameter)).sum())
            raise NumericsError(
                f"{where}: tensor {prefix}{name} has {bad} elements that are NaN or Inf in {parameter.dtype}.",
                "Give --dtype bfloat16 or float32, whose numbers reach further."
                if parameter.dtype == torch.float16
                else "The checkpoint is damaged: fetch or write it again.",
            )


def first_not_finite(model: nn.Module, run: Callable[[], object]) -> str:
    """Name the first module whose output is not finite when `run` is called, as the end of an error's sentence.

    Inner modules finish before the modules that contain them, so this is the innermost one.

    Returns:
        `; the first is the output of model.layers.3.mlp.down_proj`, or an empty text if all outputs are finite.
    """
    names: list[str] = []

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not names and isinstance(tensor, Tensor) and not is_finite(tensor):
                names.append(name)

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in model.named_modules() if name]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return f"; the first is the output of {names[0]}" if names else ""

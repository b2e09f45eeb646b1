"""What the compiler makes of the kernels of column sums: matrix products, and no spills."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from rotor.kernels.ahead import Variant, compile_variant
from rotor.kernels.scores.column_sums import ClassProducts
from rotor.kernels.scores.kernel import column_sums_kernel, launch_constants, log_sums_kernel

REALS = ("scaling", "softcap", "inverse_temperature")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", [log_sums_kernel, column_sums_kernel], ids=["log_sums", "column_sums"])
@pytest.mark.parametrize("softened", [False, True])
def test_products_are_of_matrices_and_nothing_spills(kernel, capability: int, softened: bool) -> None:
    queries = torch.empty(1, 1, 4, 1, 128, dtype=torch.bfloat16)
    some = queries if softened else None
    products = ClassProducts(queries, queries[0], 1.0, 30.0 if softened else None, 1.0, some, some, not softened, None)
    constants = launch_constants(products, 2)
    options = {"num_warps": constants.pop("num_warps")}
    pointers = {"query": torch.bfloat16, "key": torch.bfloat16, "bias": torch.float32, "mask": torch.uint8}
    pointers |= {"log_sums": torch.float32, "sums": torch.float32}
    names = {name: dtype for name, dtype in pointers.items() if name in kernel.arg_names}
    resources = compile_variant(Variant(kernel.__name__, kernel, names, constants, REALS, options), capability)
    assert resources.matrix_products > 0
    assert resources.spill_bytes == 0

#!/bin/sh
# Triton 3.9.0: compiling ahead of time for a named GPU does not say that the kernel needs more shared memory than that
# GPU gives a program.
#
# triton.compile(..., target=GPUTarget("cuda", 89, 32)) returned a finished cubin whose metadata asked for 163,840 bytes.
# Compute capabilities 8.6, 8.9 and 12.0 give a program 101,376 (99 KB; CUDA C++ Programming Guide, compute
# capabilities), 9.0 232,448 (227 KB), where the same kernel asked for 262,144. Only the launch compares the two, on the
# GPU itself (OutOfResources in triton/compiler/compiler.py). So a build that compiles for GPUs it does not have is
# green, and the first step of a model on such a GPU is not: compare metadata.shared with the limit.
#
# Holds while: for each of these the compiler returns a cubin that asks for more than the limit.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet triton==3.9.0
cat > "$folder/compile.py" <<'END'
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LIMITS = {86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}


@triton.jit
def project(x, basis, out, count, DIM: tl.constexpr, WIDTH: tl.constexpr):
    row, dim, column = tl.arange(0, 64), tl.arange(0, DIM), tl.arange(0, WIDTH)
    matrix = tl.load(basis + dim[:, None] * WIDTH + column[None, :])
    for start in range(0, count, 64):
        numbers = tl.load(x + (start + row)[:, None] * DIM + dim[None, :])
        tl.store(out + (start + row)[:, None] * WIDTH + column[None, :], tl.dot(numbers, matrix))


types = {"x": "*fp16", "basis": "*fp16", "out": "*fp32", "count": "i32", "DIM": "constexpr", "WIDTH": "constexpr"}
source = ASTSource(project, types, {"DIM": 128, "WIDTH": 512})
for capability, limit in LIMITS.items():
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 8, "num_stages": 1})
    asked = compiled.metadata.shared
    print(f"sm_{capability}: {asked:,} bytes of shared memory, {limit:,} there are; cubin {len(compiled.asm['cubin']):,}")
    if asked <= limit:
        sys.exit(f"changed: for sm_{capability} the kernel fits now")
END
if ! "$folder/venv/bin/python" -W ignore "$folder/compile.py"; then
    echo "changed: the compiler refuses a kernel that does not fit, or it fits now" >&2
    exit 1
fi

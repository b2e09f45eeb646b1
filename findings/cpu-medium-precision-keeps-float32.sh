#!/bin/sh
# torch 2.13.0, CPU build: the precision "medium" of float32 matrix products changes which library multiplies, and on
# CPUs without AMX not one digit of the result.
#
# Documentation says that "medium" computes float32 products in bfloat16. On a CPU it sends them from MKL to oneDNN
# with permission to round to bfloat16. oneDNN used that permission only with AMX: on an AMD EPYC with AVX512_BF16 the
# relative error of a product of 512 x 512 normal numbers stayed at 4e-7 (bfloat16 has 2e-3).
# There MKL reached 97 GFLOPS a core and oneDNN 208, so "medium" halved the time of a language model's forward pass
# (times are not checked here).
#
# Holds while: "highest" runs no oneDNN product and "medium" runs one, and without AMX its error stays that of float32.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat > "$folder/product.py" <<'END'
import sys

import torch

torch.set_float32_matmul_precision(sys.argv[1])
generator = torch.Generator().manual_seed(0)
left, right = (torch.randn(512, 512, generator=generator) for _ in range(2))
expected = left.double() @ right.double()
print("error", float((left @ right - expected).norm() / expected.norm()))
END
for precision in highest medium; do
    ONEDNN_VERBOSE=1 "$folder/venv/bin/python" "$folder/product.py" "$precision" > "$folder/$precision"
    echo "$precision: $(grep -c 'exec,cpu,matmul' "$folder/$precision" || true) oneDNN product(s), $(grep error "$folder/$precision")"
done
if grep -q 'exec,cpu,matmul' "$folder/highest"; then
    echo "changed: 'highest' multiplies by oneDNN, too" >&2
    exit 1
fi
if ! grep -q 'exec,cpu,matmul' "$folder/medium"; then
    echo "changed: 'medium' does not multiply by oneDNN" >&2
    exit 1
fi
if grep -q amx /proc/cpuinfo; then
    echo "this CPU has AMX: the digits of 'medium' are not checked"
    exit 0
fi
"$folder/venv/bin/python" - "$folder/medium" <<'END'
import sys

error = next(float(line.split()[1]) for line in open(sys.argv[1]) if line.startswith("error"))
if error > 1e-5:
    sys.exit(f"changed: 'medium' has an error of {error}, more than float32's")
END

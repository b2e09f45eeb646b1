#!/bin/sh
# zstandard 0.25.0 (libzstd 1.5.7): the fast levels, those below 0, leave quantised codes of a KV cache as large as they
# are, and the slow ones gain nothing over level 1.
#
# Codes of 4 bits of a normal channel have 3.6 bits of entropy. Two of them in a byte repeat nowhere, so that all there
# is to gain is in the frequencies of bytes, and that is what levels below 0 leave out: they store literals as they are.
# Level 1 codes them by Huffman, within 1 % of the entropy; level 19 makes no fewer bytes in a hundred times the time
# (times are not checked here). So who picks a level below 0 for speed in a tier of a KV cache packs nothing.
#
# Holds while: levels -5 and -1 leave at least 0.999 of the bytes; levels 1 and 19 leave at most 1.01 of the entropy.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet zstandard==0.25.0 numpy==2.2.6
cat > "$folder/levels.py" <<'END'
import numpy as np
import zstandard

codes = np.clip(np.floor(np.random.default_rng(0).normal(0, 3, 1 << 20)) + 8, 0, 15).astype(np.uint8)
packed = codes[::2] | codes[1::2] << 4
share = np.bincount(codes) / len(codes)
entropy = -(share * np.log2(share)).sum() / 4
print(f"libzstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}, entropy {entropy:.4f} of the bytes")
left = {}
for level in (-5, -1, 1, 3, 19):
    left[level] = len(zstandard.ZstdCompressor(level=level).compress(packed.tobytes())) / packed.size
    print(f"level {level:3}: {left[level]:.4f}")
assert min(left[-5], left[-1]) >= 0.999, "levels below 0 pack codes now"
assert max(left[1], left[19]) <= 1.01 * entropy, "levels 1 and 19 are further from the entropy now"
END
"$folder/venv/bin/python" "$folder/levels.py"
# Seen: libzstd 1.5.7, entropy 0.9025 of the bytes; 1.0000 at -5 and -1; 0.9072, 0.9072 and 0.9078 at 1, 3 and 19.

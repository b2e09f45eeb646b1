#!/bin/sh
# transformers' QuantizedCache: the same axis means opposite groups in its two backends, and groups of one channel
# hold only at some lengths.
#
# Versions: transformers 5.23.0, hqq 0.2.8.post1, optimum-quanto 0.2.7, torch 2.13.0, Python 3.11.
#
# Keys [1, 2 heads, tokens, 64 channels] of random numbers, one channel 100 times as loud (keys have such channels). They
# are quantised to 4 bits in groups of 64 as a layer of the cache does. Where a group holds one channel, the quiet
# channels keep an error of about 0.09; where it holds one token's channels, the loud one spoils them all. Seen:
#
#   backend, axis       256 tokens     255 tokens
#   quanto, 0           1.77           1.78             groups of one token
#   quanto, -1          0.09           ValueError       groups of one channel
#   hqq, 0              0.09           1.60             groups of one channel, or of mixed ones at 255 tokens
#   hqq, 1              1.19           1.19             groups of one token
#
# So axis_key=0, the default of both, is by token in quanto and by channel in hqq. By channel, as the paper that the
# class names does for keys, heads times tokens must be a multiple of the group's 64: at other lengths quanto raises
# "Group size (64) must be a divisor of (510)", and hqq quantises mixed groups without a word.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "transformers==5.23.0" "hqq==0.2.8.post1" "optimum-quanto==0.2.7" "torch==2.13.0"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer


def error_of_quiet_channels(kind, axis, tokens):
    torch.manual_seed(0)
    keys = torch.randn(1, 2, tokens, 64)
    keys[..., 7] *= 100
    quiet = torch.arange(64) != 7
    layer = kind(nbits=4, axis_key=axis, axis_value=axis, q_group_size=64)
    layer.lazy_initialization(keys, keys)
    try:
        back = layer._dequantize(layer._quantize(keys, axis=axis))
    except ValueError as error:
        return str(error)
    return (back - keys)[..., quiet].pow(2).mean().sqrt().item()


quanto, hqq = QuantoQuantizedLayer, HQQQuantizedLayer
seen = {
    (kind.__name__, axis, tokens): error_of_quiet_channels(kind, axis, tokens)
    for kind, axis in ((quanto, 0), (quanto, -1), (hqq, 0), (hqq, 1))
    for tokens in (256, 255)
}
for case, error in seen.items():
    print(*case, error if isinstance(error, str) else f"{error:.2f}")
spoilt = [seen[quanto.__name__, 0, 256], seen[hqq.__name__, 1, 256], seen[hqq.__name__, 0, 255]]
kept = [seen[quanto.__name__, -1, 256], seen[hqq.__name__, 0, 256]]
refused = seen[quanto.__name__, -1, 255]
if not (min(spoilt) > 1 and max(kept) < 0.15 and "must be a divisor" in str(refused)):
    sys.exit("QuantizedCache's axes have changed: read the lines above against the table in this file.")
print("still so: axes are opposite, and groups of one channel hold only at multiples of the group")
PYTHON

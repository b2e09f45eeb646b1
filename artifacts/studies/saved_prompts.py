"""A prompt that is kept in a file: seconds and bytes to read it anew, or to load its cache, and what that costs.

    python artifacts/studies/saved_prompts.py MODEL OUT --text FILE --tokens 8192 -o RESULT.json

MODEL reads a prompt, and OUT, which `rotor export` wrote of it, does. The caches are written to files and loaded again:
MODEL's in 16 bits and in fp8 (a scale a layer, head and tensor), OUT's at each level of `rotor.save_cache`. What
follows the prompt in the text is then read behind each of them, in one pass, and compared with MODEL's own logits (KL
divergence in nats, mean over these tokens). Files lie in the system's memory when they are read.

Beside it stands what general compressors make of OUT's rows, and the bound of what is coded channel by channel: the
entropy of each channel's codes. Everything runs in one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import rotor
from rotor.checkpoint.row_channels import Widths, spots_of, unpacked
from rotor.checkpoint.row_codec import RowCodec
from rotor.checkpoint.row_prediction import entropies
from rotor.models.sequences import text_sequences
from rotor.runtime.attention import RotorAttention
from rotor.tools.bench.records import describe_device, provenance

FP8_LARGEST = 448.0

Made = TypeVar("Made")


def timed(
    make: Callable[[], Made], repeats: int = 5, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Made]:
    """Seconds of the fastest of some calls, and what the last of them gave."""
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        made = make()
        best = min(best, clock() - start)
    return best, made


def read(model: Any, ids: Tensor, cache: Any = None) -> tuple[float, Any]:
    start = time.perf_counter()
    output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1 if cache is None else 0)
    return time.perf_counter() - start, output


def divergence(expected: Tensor, got: Tensor) -> float:
    expected, got = (logits.float().log_softmax(-1) for logits in (expected, got))
    return float((expected.exp() * (expected - got)).sum(-1).mean())


class PlainFile:
    """A source model's cache in a file, in 16 bits or in fp8."""

    def __init__(self, path: Path, fp8: bool) -> None:
        self.path, self.fp8 = path, fp8

    def save(self, cache: Any) -> None:
        tensors = {}
        for index, layer in enumerate(cache.layers):
            for name, side in (("keys", layer.keys), ("values", layer.values)):
                if self.fp8:
                    scale = side.abs().amax((0, 2, 3), keepdim=True).float() / FP8_LARGEST
                    tensors[f"{index}.{name}.scale"] = scale
                    side = (side / scale).to(torch.float8_e4m3fn)
                tensors[f"{index}.{name}"] = side.contiguous()
        save_file(tensors, self.path)

    def load(self, config: Any) -> DynamicCache:
        tensors, cache = load_file(self.path), DynamicCache(config=config)
        for index, layer in enumerate(cache.layers):
            sides = []
            for name in ("keys", "values"):
                side = tensors[f"{index}.{name}"]
                if self.fp8:
                    side = (side.float() * tensors[f"{index}.{name}.scale"]).to(torch.bfloat16)
                sides.append(side)
            layer.update(*sides)
        return cache


def of_source(folder: str, prompt: Tensor, rest: Tensor, place: Path) -> tuple[list[dict[str, Any]], Tensor]:
    """Rows of the table of MODEL, and its logits of the rest."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    anew_s, output = read(model, prompt)
    cache = output.past_key_values
    files = {"16 bits": PlainFile(place / "16", False), "fp8": PlainFile(place / "fp8", True)}
    saving = {name: timed(lambda file=file: file.save(cache))[0] for name, file in files.items()}  # before it grows
    expected = read(model, rest, cache)[1].logits[0]
    rows = [{"cache": "read anew by the source", "seconds": anew_s, "kl_div": 0.0}]
    for name, file in files.items():
        load_s, loaded = timed(lambda file=file: file.load(model.config))
        kl = divergence(expected, read(model, rest, loaded)[1].logits[0])
        sizes = {"file_bytes": file.path.stat().st_size, "save_s": saving[name], "seconds": load_s}
        rows.append({"cache": name, **sizes, "kl_div": kl})
    return rows, expected


def of_rotor(folder: str, prompt: Tensor, rest: Tensor, expected: Tensor, place: Path) -> dict[str, Any]:
    """Rows of the table of OUT, and what compresses its rows by how much."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    anew_s, output = read(model, prompt)
    cache, file = output.past_key_values, place / "rotor"
    layouts = [module.layout for module in model.modules() if isinstance(module, RotorAttention)]
    stored = [layer.keys[0, 0].numpy().copy() for layer in cache.layers]
    levels = {}
    for level in ("none", "fast", "small"):
        path = file.with_suffix(f".{level}")
        save_s, _ = timed(lambda path=path, level=level: rotor.save_cache(cache, path, model, level=level))
        levels[level] = {"cache": f"rotor, {level}", "file_bytes": path.stat().st_size, "save_s": save_s}
    logits = read(model, rest, cache)[1].logits[0]
    kl = divergence(expected, logits)
    rows = [{"cache": "read anew by rotor", "seconds": anew_s, "kl_div": kl}]
    for level, row in levels.items():
        path = file.with_suffix(f".{level}")
        load_s, loaded = timed(lambda path=path: rotor.load_cache(path, model))
        if not torch.equal(read(model, rest, loaded)[1].logits[0], logits):
            raise SystemExit(f"level {level}: the loaded cache does not go on as the saved one")
        rows.append({**row, "seconds": load_s, "kl_div": kl})
    return {"rows": rows, "codecs": codecs(stored, layouts)}


def codecs(stored: list[np.ndarray], layouts: list[Any]) -> list[dict[str, Any]]:
    """Share of the rows' bytes, and MB of rows a second of processor time to pack and to unpack, of each way."""
    plain, spots = sum(rows.nbytes for rows in stored), [*map(spots_of, layouts)]
    found = []

    def row(name: str, size: float, pack_s: float = 0.0, unpack_s: float = 0.0) -> None:
        speed = {"pack_mb_s": plain / pack_s / 1e6, "unpack_mb_s": plain / unpack_s / 1e6} if pack_s else {}
        found.append({"codec": name, "share": float(size / plain), **speed})

    bound = 0.0
    for rows, own in zip(stored, spots, strict=True):
        channels, widths = unpacked(rows, own), Widths(own)
        bound += len(rows) * (entropies(channels.codes).sum() / 8)
        bound += sum(
            len(line) * (4 if bits == 12 else 8) / 8 for line, bits in zip(channels.low, low_bits(own), strict=True)
        )
        assert len(widths.bits) == len(channels.codes)
    row("entropy of each channel's codes", bound)
    for level in ("fast", "small"):

        def pack(level: Any = level) -> list[bytes]:
            codec = RowCodec(level)
            return [codec.pack(rows, own) for rows, own in zip(stored, spots, strict=True)]

        pack_s, data = timed(pack, clock=time.process_time)

        def unpack(data: list[bytes] = data) -> list[Any]:
            codec = RowCodec()
            every = zip(data, spots, stored, strict=True)
            return [codec.unpack(memoryview(part), own, *rows.shape) for part, own, rows in every]

        unpack_s, back = timed(unpack, clock=time.process_time)
        assert all(np.array_equal(a, b) for a, b in zip(stored, back, strict=True))
        row(f"rotor, {level}", sum(map(len, data)), pack_s, unpack_s)
    whole = b"".join(rows.tobytes() for rows in stored)
    ways: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        "zstandard, level 3": (zstandard.ZstdCompressor(level=3).compress, zstandard.ZstdDecompressor().decompress),
        "zstandard, level 19": (zstandard.ZstdCompressor(level=19).compress, zstandard.ZstdDecompressor().decompress),
        "deflate, as KVTC has it": (zlib.compress, zlib.decompress),
    }
    for name, (compress, decompress) in ways.items():
        pack_s, data = timed(lambda compress=compress: compress(whole), 1, time.process_time)
        unpack_s, _ = timed(lambda decompress=decompress, data=data: decompress(data), 1, time.process_time)
        row(name, len(data), pack_s, unpack_s)
    return found


def low_bits(spots: Any) -> list[int]:
    """Bits of the channels that have more than 8."""
    return [bits for _, row in spots for bits in row.bits if bits > 8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--rest", type=int, default=256, help="tokens behind it, by which the loss is measured")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = text_sequences([given.text.read_text("utf-8")], tokenizer, given.tokens + given.rest, 1)[:1]
    prompt, rest = ids[:, : given.tokens], ids[:, given.tokens :]
    with torch.inference_mode(), TemporaryDirectory() as place:
        rows, expected = of_source(given.model, prompt, rest, Path(place))
        print(json.dumps(rows), flush=True)
        own = of_rotor(given.out, prompt, rest, expected, Path(place))
    record = {
        **provenance(" ".join(["python", *sys.argv])),
        "device": describe_device(torch.device("cpu")),
        "tokens": given.tokens,
        "rest": given.rest,
        "rows": [*rows, *own["rows"]],
        "codecs": own["codecs"],
    }
    given.output.write_text(f"{json.dumps(record, indent=2)}\n")
    for row in [*record["rows"], *record["codecs"]]:
        print(row)


if __name__ == "__main__":
    main()

"""rotor beside caches that people run today: the same packed model, the same windows of unread text, the same measure.

    python artifacts/studies/side_by_side.py windows MODEL HELD-OUT -o WINDOWS.json
    python artifacts/studies/side_by_side.py llama PACKED.gguf WINDOWS.json --cache q4_0 -o DISTRIBUTIONS/q4_0.npz
    python artifacts/studies/side_by_side.py torch MODEL-OR-OUT WINDOWS.json [--hqq 4] -o DISTRIBUTIONS/NAME.npz
    python artifacts/studies/side_by_side.py compare REFERENCE.npz DISTRIBUTIONS/*.npz -o CSV

Each window is the beginning of a document of its own, articles and source files in turn. Its last tokens are predicted
through the cache: llama.cpp's server (`pip install xllamacpp`, with numpy alone) and transformers' quantised caches
(`pip install hqq`) take them one by one; rotor reads the whole window as if all its tokens had come one by one, as when
it measures accuracy (a prompt that is served is read exactly). Of every
distribution the most likely tokens are kept, and the rest as one. KL and perplexity of all sides are of that.

llama.cpp multiplies packed weights by 8-bit activations, torch the widened weights in float32, so the two uncompressed
models differ a little. Each cache is compared with its own side's.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LENGTH, SCORED, WINDOWS = 2_048, 256, 8
"""Tokens of a window, how many of its last ones are predicted, and windows."""

KEPT = 2_000
"""Most likely tokens of a distribution that are kept."""

BLOCK_BYTES = {"f32": 128, "f16": 64, "q8_0": 34, "q4_0": 18}
"""Bytes of 32 numbers in llama.cpp's caches; a quantised block has one scale of 16 bits."""


class Distributions:
    """The most likely tokens behind each position, with their logarithms of probability, and what the sizes are.

    tokens: [positions, KEPT] int32. log_p: [positions, KEPT] float32, natural logarithms, falling. labels: [positions],
    the tokens that come. facts: bytes, settings and seconds.
    """

    def __init__(self, tokens: np.ndarray, log_p: np.ndarray, labels: np.ndarray, facts: dict) -> None:
        self.tokens, self.log_p, self.labels, self.facts = tokens, log_p.astype(np.float64), labels, facts

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path, tokens=self.tokens, log_p=self.log_p, labels=self.labels, facts=json.dumps(self.facts)
        )

    @classmethod
    def load(cls, path: Path) -> Distributions:
        with np.load(path) as file:
            return cls(file["tokens"], file["log_p"], file["labels"], json.loads(str(file["facts"])))

    def rest(self, position: int) -> float:
        """Probability of all tokens that are not kept."""
        return max(1 - np.exp(self.log_p[position]).sum(), 1e-12)

    def nll(self) -> np.ndarray:
        """Nats by which each label surprises; one that is not kept has its part of the rest, as if all were alike."""
        found = self.tokens == self.labels[:, None]
        inside = np.where(found, self.log_p, 0).sum(1)
        outside = [np.log(self.rest(n) / (self.facts["vocabulary"] - KEPT)) for n in range(len(found))]
        return -np.where(found.any(1), inside, outside)

    def kl_div(self, other: Distributions) -> np.ndarray:
        """KL(self || other) in nats, [positions], over the tokens that both keep and the rest as one."""
        values = []
        for n in range(len(self.labels)):
            _, mine, theirs = np.intersect1d(self.tokens[n], other.tokens[n], return_indices=True)
            log_p, log_q = self.log_p[n][mine], other.log_p[n][theirs]
            p, q = np.exp(log_p), np.exp(log_q)
            rest_p, rest_q = max(1 - p.sum(), 1e-12), max(1 - q.sum(), 1e-12)
            values.append((p * (log_p - log_q)).sum() + rest_p * np.log(rest_p / rest_q))
        return np.array(values)


def write_windows(model: Path, texts: Path, out: Path) -> None:
    """The first LENGTH tokens of each kind of document in turn, of those that are long enough."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def long_ones(kind: str) -> Iterator[list[int]]:
        for path in sorted(texts.glob(f"*-{kind}.txt")):
            tokens = tokenizer(path.read_text(), add_special_tokens=False)["input_ids"]
            if len(tokens) >= LENGTH:
                yield tokens[:LENGTH]

    pairs = zip(long_ones("article"), long_ones("source"), strict=False)
    windows = [window for pair in pairs for window in pair][:WINDOWS]
    if len(windows) < WINDOWS:
        sys.exit(f"{texts}: {len(windows)} documents of {LENGTH} tokens, in pairs; {WINDOWS} are needed.")
    out.write_text(json.dumps({"vocabulary": len(tokenizer), "windows": windows}))


def of_llama(packed: Path, windows: list[list[int]], cache: str, ubatch: int) -> tuple[list, list]:
    """Tokens and log-probabilities of llama.cpp's server, whose cache holds one type of numbers."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(packed)
    params.n_ctx, params.n_parallel, params.n_ubatch = LENGTH + 8, 1, ubatch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.cache_ram_mib = False, 0
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
    params.verbosity = 4  # names the cache's types and whether it is rotated, on standard error
    server = xllamacpp.Server(params)
    tokens, log_p = [], []
    for number, window in enumerate(windows):
        for end in range(LENGTH - SCORED, LENGTH):
            request = {"prompt": window[:end], "max_tokens": 1, "n_probs": KEPT, "temperature": 0, "id_slot": 0}
            answer = server.handle_completions(request | {"cache_prompt": True, "post_sampling_probs": False})
            if "choices" not in answer:
                sys.exit(f"{packed}: window {number}, {end} tokens: {answer}")
            likely = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            tokens.append([entry["id"] for entry in likely])
            log_p.append([entry["logprob"] for entry in likely])
        print(f"{cache}: window {number + 1} of {len(windows)}", flush=True)
    return tokens, log_p


def numbers_of_token(config: Path) -> int:
    """Numbers that an uncompressed cache holds of a token."""
    shape = json.loads(config.read_text())
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim


def of_torch(
    model_path: Path, windows: list[list[int]], hqq_bits: int, keys_axis: int, dtype: str
) -> tuple[list, list, list]:
    """The same of transformers, and each label's nll by whole distributions.

    hqq_bits: of transformers' quantised cache by HQQ: 64 numbers have a scale and a zero, and up to 127 of the newest
    tokens are exact. 0: the model's own cache. keys_axis: 0 puts one channel of 64 tokens into a group, as KIVI does,
    but only where KV heads times tokens are a multiple of 64, as here; 1 puts one token's channels into it.
    """
    import torch
    from transformers import AutoModelForCausalLM, QuantizedCache

    from rotor.runtime.decoded import decoding_without_cache  # lets transformers load exports, too

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
    tokens, log_p, nll = [], [], []

    def keep(logits: torch.Tensor, labels: torch.Tensor) -> None:
        full = logits.float().log_softmax(-1)
        likely = full.topk(KEPT)
        tokens.extend(likely.indices.tolist())
        log_p.extend(likely.values.tolist())
        nll.extend((-full.gather(1, labels[:, None])[:, 0]).tolist())

    with torch.inference_mode(), decoding_without_cache(model):
        for number, window in enumerate(windows):
            row, start = torch.tensor([window]), LENGTH - SCORED
            if hqq_bits:
                cache = QuantizedCache("hqq", model.config, nbits=hqq_bits, axis_key=keys_axis, axis_value=1)
                prompt = model(row[:, :start], past_key_values=cache, logits_to_keep=1)  # reads nothing quantised yet
                keep(prompt.logits[:, -1], row[0, start : start + 1])
                for end in range(start + 1, LENGTH):
                    step = model(row[:, end - 1 : end], past_key_values=cache)
                    keep(step.logits[:, -1], row[0, end : end + 1])
            else:
                keep(model(row[:, :-1], logits_to_keep=SCORED).logits[0], row[0, start:])
            print(f"{model_path}: window {number + 1} of {len(windows)}", flush=True)
    return tokens, log_p, nll


def bytes_of_torch(folder: Path, hqq_bits: int) -> dict[str, float]:
    """Bytes of a token in a sequence of LENGTH tokens and in one of 32,768, with all that is exact; numbers of 16 bits.

    HQQ: a scale and a zero of 16 bits for 64 numbers; 64 tokens are exact on the average of 0 to 127.
    """
    numbers = numbers_of_token(folder / "config.json")
    if hqq_bits:
        row, exact = numbers * (hqq_bits / 8 + 4 / 64), 64 * numbers * 2
    elif (folder / "rotor.json").exists():
        from rotor.tools.compare import compare as facts_of

        (export,) = facts_of([folder])
        row = export.info["kv_bytes_per_token"]["after"]
        sequence = export.info["kv_bytes_of_sequence"]
        exact = sequence["after"] - sequence["tokens"] * row
    else:
        row, exact = 2 * numbers, 0
    return {"bytes": row + exact / LENGTH, "bytes_32k": row + exact / 32_768}


def compare(reference: Path, others: list[Path], out: Path) -> None:
    """One line a file: bytes, perplexity, and KL with its standard error over windows."""
    truth, rows = Distributions.load(reference), []
    for path in others:
        found = Distributions.load(path)
        kl = truth.kl_div(found).reshape(-1, SCORED).mean(1)
        rows.append(
            {
                "cache": path.stem,
                "bytes_at_2048": round(found.facts["bytes"]),
                "bytes_at_32768": round(found.facts["bytes_32k"]),
                "perplexity": round(float(np.exp(found.nll().mean())), 4),
                "kl_div": round(float(kl.mean()), 6),
                "kl_error": round(float(kl.std(ddof=1) / len(kl) ** 0.5), 6),
                "top1_agreement": round(float((truth.tokens[:, 0] == found.tokens[:, 0]).mean()), 4),
                "rest": round(float(np.mean([found.rest(n) for n in range(len(found.labels))])), 5),
            }
        )
        print(rows[-1])
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("windows")
    step.add_argument("model", type=Path)
    step.add_argument("texts", type=Path)
    step = steps.add_parser("llama")
    step.add_argument("model", type=Path, help="a packed file")
    step.add_argument("windows", type=Path)
    step.add_argument("--config", type=Path, required=True, help="the same model's config.json")
    step.add_argument("--cache", default="f16", choices=tuple(BLOCK_BYTES))
    step.add_argument("--ubatch", type=int, default=512, help="tokens that the prompt is read by")
    step = steps.add_parser("torch")
    step.add_argument("model", type=Path, help="a source model, or an export")
    step.add_argument("windows", type=Path)
    step.add_argument("--hqq", type=int, default=0, metavar="BITS")
    step.add_argument("--keys-axis", type=int, default=0, choices=(0, 1), help="of HQQ")
    step.add_argument("--dtype", default="float32")
    step = steps.add_parser("compare")
    step.add_argument("reference", type=Path)
    step.add_argument("others", type=Path, nargs="+")
    for step in steps.choices.values():
        step.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    if given.step == "windows":
        write_windows(given.model, given.texts, given.out)
        return
    if given.step == "compare":
        compare(given.reference, given.others, given.out)
        return
    text, began, facts = json.loads(given.windows.read_text()), time.monotonic(), {}
    windows = text["windows"]
    if given.step == "llama":
        tokens, log_p = of_llama(given.model, windows, given.cache, given.ubatch)
        row = numbers_of_token(given.config) * BLOCK_BYTES[given.cache] / 32
        facts = {"bytes": row, "bytes_32k": row}
    else:
        tokens, log_p, nll = of_torch(given.model, windows, given.hqq, given.keys_axis, given.dtype)
        facts = bytes_of_torch(given.model, given.hqq) | {"full_nll": float(np.mean(nll))}
    facts |= {"vocabulary": text["vocabulary"], "seconds": round(time.monotonic() - began)}
    labels = [token for window in windows for token in window[-SCORED:]]
    Distributions(np.array(tokens, np.int32), np.array(log_p, np.float32), np.array(labels), facts).save(given.out)


if __name__ == "__main__":
    main()

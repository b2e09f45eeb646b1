"""Train the reference model: a decoder whose hidden size is twice its keys and values, as in Llama 3 8B.

    python artifacts/train.py --state state.pt --out artifacts/reference-model

It is grown from the bundled model, so that it looks things up from the first step: the weights of 192 channels lie in
those of 512, the rest is small noise, and training goes on from there. The text is Python source of installed packages
without the modules that rotor measures on; a share of every batch is synthetic: runs of tokens that repeat, and keys
that are looked up again, half of them behind other text. AdamW trains it, as it did the models in use; with --muon Muon
trains the matrices. The same command goes on from --state; with --init artifacts/reference-model a new one goes on from
its weights.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import random
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

HELD_OUT = (
    *("argparse.py", "asyncio/", "email/", "json/", "http/", "statistics.py", "zipfile.py", "tarfile.py", "typing.py"),
    *("unittest/", "logging/", "difflib.py"),
)


def config(vocabulary: int, hidden: int, base: float) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        hidden_size=hidden,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": base, "rope_type": "default"},
        tie_word_embeddings=True,
    )


@torch.no_grad()
def grow(small: torch.nn.Module, large: torch.nn.Module) -> None:
    """Put a model into a larger one, which then computes nearly the same: the rest is noise, and small.

    RMSNorm's mean is over more numbers, so that its weights are smaller by the root of the ratio of widths. Each KV
    head gets one query head more.
    """
    width, wide = small.config.hidden_size, large.config.hidden_size
    dim = small.config.head_dim
    few, many = (m.config.num_attention_heads // m.config.num_key_value_heads for m in (small, large))
    heads = torch.arange(small.config.num_attention_heads)
    queries = ((heads // few * many + heads % few)[:, None] * dim + torch.arange(dim)).flatten()
    kept = small.state_dict()
    for name, new in large.state_dict().items():
        old = kept[name]
        if old.dim() == 1:
            new.fill_((width / wide) ** 0.5)
            new[:width] = old * (width / wide) ** 0.5
            continue
        new.normal_(0, 0.02)
        rows = queries if "q_proj" in name else torch.arange(old.shape[0])
        columns = queries if "o_proj" in name else torch.arange(old.shape[1])
        new[rows[:, None], columns] = old.float()


def corpus(limit: float) -> list[str]:
    """Python files of the standard library, without the held-out modules, and of the installed packages, shuffled."""
    standard = sysconfig.get_paths()["stdlib"]
    files = [
        file
        for file in sorted(glob.glob(f"{standard}/**/*.py", recursive=True))
        if "site-packages" not in file and not os.path.relpath(file, standard).startswith(HELD_OUT)
    ]
    for site in sorted({sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}):
        files += sorted(glob.glob(f"{site}/**/*.py", recursive=True))
    random.Random(0).shuffle(files)
    texts, size = [], 0
    for file in files:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        if 200 < len(text) < 200_000 and size < limit:
            texts.append(text)
            size += len(text)
    return texts


class Synthetic:
    """Rows whose continuation can only be known by attending far back. text: tokens to stand between."""

    def __init__(self, tokenizer: Tokenizer, seed: int, text: np.ndarray):
        self.tokenizer, self.random, self.text = tokenizer, random.Random(seed), text
        words = (word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and word.islower())
        self.words = sorted(word for word in words if 3 <= len(word) <= 9)

    def lookup(self, keys: int, questions: int) -> tuple[str, list[tuple[str, str]]]:
        """(prompt, [(question, answer), ...]): keys with values of two digits, then questions about them."""
        draw = self.random
        table = {key: draw.randint(10, 99) for key in draw.sample(self.words, keys)}
        asked = [draw.choice(list(table)) for _ in range(questions)]
        if draw.random() < 0.5:
            return "".join(f"{k}: {v}\n" for k, v in table.items()), [(f"{k}:", f" {table[k]}") for k in asked]
        name = draw.choice(["table", "config", "index", "codes", "names"])
        lines = "".join(f'    "{k}": {v},\n' for k, v in table.items())
        return f"{name} = {{\n{lines}}}\n", [(f'assert {name}["{k}"] ==', f" {table[k]}") for k in asked]

    def row(self, kind: str, length: int) -> list[int]:
        draw, out = self.random, []
        while len(out) <= length:
            if kind == "repeat":
                run = [draw.randrange(300, 900) for _ in range(draw.randint(4, 32))]
                out += [0, *run, *self.between(), *run * draw.randint(1, 6)]
            else:
                keys = draw.randint(2, 16)
                prompt, asked = self.lookup(keys, 2 * keys)
                out += [0, *self.tokenizer.encode(prompt).ids, *self.between()]
                out += self.tokenizer.encode("".join(f"{a}{b}\n" for a, b in asked)).ids
        return out[: length + 1]

    def between(self) -> list[int]:
        """Nothing, or as often up to 256 tokens of text."""
        count = self.random.choice([0, self.random.randint(16, 256)])
        at = self.random.randrange(len(self.text) - count)
        return self.text[at : at + count].tolist()


@torch.no_grad()
def lookup_accuracy(model: torch.nn.Module, synthetic: Synthetic, prompts: int = 32) -> float:
    """Share of answer tokens predicted right in prompts of 8 keys and 16 questions."""
    right = total = 0
    for _ in range(prompts):
        prompt, asked = synthetic.lookup(8, 16)
        ids = [0, *synthetic.tokenizer.encode(prompt).ids]
        answer = [0] * len(ids)
        for question, value in asked:
            for part, marked in ((question, 0), (value, 1), ("\n", 0)):
                tokens = synthetic.tokenizer.encode(part).ids
                ids += tokens
                answer += [marked] * len(tokens)
        row = torch.tensor(ids)[None]
        hit = model(row).logits[0, :-1].argmax(-1) == row[0, 1:]
        chosen = torch.tensor(answer[1:]) == 1
        right, total = right + hit[chosen].sum().item(), total + chosen.sum().item()
    return right / total


def optimisers(model: torch.nn.Module, rate: float, by_muon: bool) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and "embed" not in name]
    rest = [p for name, p in named.items() if p.dim() != 2 or "embed" in name]
    adamw = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    if not by_muon:
        adamw.add_param_group({"params": matrices, "weight_decay": 0.1})
        return [adamw]
    muon = torch.optim.Muon(
        matrices, lr=rate, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw", ns_steps=4
    )
    return [muon, adamw]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="artifacts/demo-model/tokenizer.json")
    parser.add_argument("--init", default="artifacts/demo-model", help="a smaller model to grow from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=60e6, help="the rate falls over the last half of them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="the same, of time")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--base", type=float, default=500_000, help="of RoPE; another than --init's is soon learned")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--muon", action="store_true", help="matrices by Muon; a rate of 3e-3 suits it")
    given = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(given.tokenizer)
    texts = corpus(100e6)
    parts = (tokenizer.encode_batch(texts[i : i + 200]) for i in range(0, len(texts), 200))
    data = np.concatenate([np.array([0, *row.ids], dtype=np.uint16) for part in parts for row in part])
    model = AutoModelForCausalLM.from_config(config(tokenizer.get_vocab_size(), given.hidden, given.base))
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.1f} M parameters, {len(data) / 1e6:.1f} M tokens of text", flush=True)
    if not given.state.exists():
        grow(AutoModelForCausalLM.from_pretrained(given.init, dtype=torch.float32), model)
    steps = optimisers(model, given.rate, given.muon)
    step, tokens, seconds, log = 0, 0, 0.0, []
    if given.state.exists():
        kept = torch.load(given.state, weights_only=True)
        model.load_state_dict(kept["model"])
        for optimiser, state in zip(steps, kept["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        step, tokens, seconds, log = kept["step"], kept["tokens"], kept["seconds"], kept["log"]
        print(f"goes on at {tokens / 1e6:.1f} M tokens", flush=True)
    draw, synthetic = np.random.default_rng(step), Synthetic(tokenizer, step, data)

    short = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # elsewhere a CPU takes a hundred times as long for bfloat16

    def losses(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=short):
            logits = model(ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")

    run = torch.compile(losses, dynamic=False)

    def keep() -> None:
        new = given.state.with_suffix(".new")
        states = [optimiser.state_dict() for optimiser in steps]
        done = {"step": step, "tokens": tokens, "seconds": spent(), "log": log}
        torch.save({"model": model.state_dict(), "optimisers": states, **done}, new)
        new.replace(given.state)

    def spent() -> float:
        return seconds + time.monotonic() - started

    started = saved = time.monotonic()
    batch, length = 16, 512
    while (done := max(tokens / given.tokens, spent() / 60 / given.minutes)) < 1:
        kinds = [str(kind) for kind in draw.choice(["text", "repeat", "lookup"], batch, p=[0.65, 0.16, 0.19])]
        rows = []
        for kind in kinds:
            at = int(draw.integers(0, len(data) - length - 1))
            rows.append(data[at : at + length + 1].tolist() if kind == "text" else synthetic.row(kind, length))
        rate = given.rate * min(1, (step + 1) / 100) * min(1, max(0.02, (1 - done) / 0.5))
        for optimiser in steps:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.zero_grad(set_to_none=True)
        loss = run(torch.tensor(rows)).view(batch, length)
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in steps:
            optimiser.step()
        step, tokens = step + 1, tokens + batch * length
        if step % 20 == 0:
            of_kind = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in sorted(set(kinds))}
            by = {kind: round(loss[rows].mean().item(), 3) for kind, rows in of_kind.items()}
            log.append({"step": step, "tokens": tokens, "seconds": round(spent()), **by})
            print(json.dumps(log[-1]), flush=True)
        if time.monotonic() - saved > 420:
            keep()
            saved = time.monotonic()
    keep()
    model.eval()
    accuracy = lookup_accuracy(model, Synthetic(tokenizer, 10_000, data))
    model.to(torch.bfloat16).save_pretrained(given.out, max_shard_size="15MB")
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(given.out)
    before = Path(given.init, "train.json")
    earlier = json.loads(before.read_text())["tokens"] if before.exists() else 0
    about = {"steps": step, "tokens": earlier + tokens, "lookup_accuracy": accuracy, "log": log[-3:]}
    (given.out / "train.json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"{step} steps, {tokens / 1e6:.1f} M tokens, look-up accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()

"""Continue a prompt with a model folder, compressed or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TextStreamer

from ..errors import CheckpointError, DataError, UsageError
from ..models.compressed import open_model
from ..models.device_plan import DevicePlan
from ..models.hardware import fit_threads
from ..models.hub import find_model
from ..models.loading import load_model
from ..models.projections import bounded_seq_len
from ..models.tokenizer import as_chat, check_ids
from ..models.tokens import synthetic_tokens
from ..models.weights import Weights
from ..options import DeviceOptions
from ..parallel import sequence_parallel
from ..parallel.launch import join_processes
from ..policies import Policy, find_policy, stored_bytes, use_cache_policy
from ..policies.fitting import fit_cache_policy
from ..progress import Progress

FITTED_TOKENS, FITTED_SEQ_LEN = 2048, 256
"""Tokens that a cache policy is fitted to, and those of a sequence."""

DEFAULT_DEVICE = DeviceOptions()


def continue_prompt(
    folder: str | Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    compute: DeviceOptions = DEFAULT_DEVICE,
    *,
    cache: str | None = None,
    raw: bool = False,
    on_text: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    parallel: bool = False,
) -> dict[str, Any]:
    """Generate with transformers' generate() and its dynamic cache; greedy below temperature 0.001.

    A tokenizer with a chat template gets the prompt as what a user says, and the text is the answer to it.

    Args:
        cache: the policy that the cache follows, by name; None is the checkpoint's own, if it has one. One that is
            fitted to text is fitted here to what the model writes.
        raw: continue the prompt as it is, whatever the tokenizer has.
        on_text: gets the text as it is written, some words at a time.
        parallel: split the prompt and its cache over the processes that torchrun started.
    Returns:
        `text` (the prompt with its continuation, or the answer), `chat_template` (whether one was applied),
        `prompt_tokens`, `new_tokens`, and `kv_cache_bytes` at the end; of a split cache also what each process had of
        it, and the bytes that this process sent, by kind.
    Raises:
        UsageError: the prompt is not UTF-8, or torchrun did not start this process. CheckpointError: no tokenizer, or a
            chat template that fails. DataError: no tokens, or one that the model does not have.
    """
    progress = progress or Progress()
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # bytes of a command line, which is no UTF-8
        raise UsageError(f"the prompt is not UTF-8: {prompt!a:.80}.", "Write it in UTF-8, or give --prompt-file.")
    folder = find_model(folder).folder
    checkpoint = open_model(folder)
    fit_threads(checkpoint.total_bytes())
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{folder}: no tokenizer in it.", "Add tokenizer.json.")
    if parallel:
        compute = replace(compute, device=join_processes(compute.device))
    place = DevicePlan.choose(compute, checkpoint.config.dtype or torch.float32)
    chat = bool(tokenizer.chat_template) and not raw
    text = as_chat(folder, prompt) if chat else prompt
    inputs = tokenizer(text, add_special_tokens=not chat, return_tensors="pt").to(place.device)
    if inputs["input_ids"].shape[1] == 0:
        raise DataError("the prompt is empty.", "Give some text to continue.")
    check_ids(inputs["input_ids"], checkpoint.config.get_text_config().vocab_size)
    policy = None if cache is None else find_policy(cache)  # whose module a checkpoint may name
    with progress.task("load model", None, ""):
        model = load_model(folder, place.device, place.dtype)
    if policy is not None and policy.needs_samples:
        policy = _fitted(model, policy, tokenizer, progress)
    if cache is not None:
        use_cache_policy(model, policy)
    torch.manual_seed(seed)  # transformers samples from the global generator
    sampling = {"do_sample": True, "temperature": temperature} if temperature >= 0.001 else {"do_sample": False}
    streamer = None if on_text is None else _Streamer(tokenizer, on_text, skip_prompt=chat)
    waiting = progress.task("generate", None, "") if on_text is None else nullcontext()
    with waiting, sequence_parallel(model) if parallel else nullcontext() as group:
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            return_dict_in_generate=True,
            streamer=streamer,
            **sampling,
        )
        size_bytes = stored_bytes(output.past_key_values)
        sizes = [size_bytes] if group is None else group.of_each(size_bytes)
    tokens, prompt_tokens = output.sequences[0], inputs["input_ids"].shape[1]
    result = {
        "text": tokenizer.decode(tokens[prompt_tokens:] if chat else tokens, skip_special_tokens=True),
        "chat_template": chat,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(tokens) - prompt_tokens,
        "kv_cache_bytes": sum(sizes),
    }
    if group is not None:
        dist.destroy_process_group()
        result |= {"kv_cache_bytes_by_process": sizes, "sent_bytes": dict(sorted(group.wire.sent.items()))}
    return result


def _fitted(model: Any, policy: Policy, tokenizer: Any, progress: Progress) -> Policy:
    """The policy, fitted to text that the model writes, as nothing else is at hand."""
    config = model.config.get_text_config()
    seq_len = bounded_seq_len(FITTED_SEQ_LEN, config)
    count = FITTED_TOKENS // seq_len
    progress.message(f"cache policy {policy.method}: fits its levels to {count * seq_len} tokens that the model writes")
    with progress.task("fit cache policy", count * seq_len, "tokens") as advance:
        sequences = synthetic_tokens(Weights(model), count, seq_len, config, tokenizer, 0, advance)
        return fit_cache_policy(model, policy, sequences)


class _Streamer(TextStreamer):
    """Decodes tokens as they come, whole words at a time, and passes the text on."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], *, skip_prompt: bool) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)

"""Continue a prompt with a model folder, compressed or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache, TextStreamer
from typing_extensions import NotRequired, TypedDict

from ..checkpoint.rewritten import source_at
from ..errors import CheckpointError, DataError, UsageError
from ..models.compressed import open_model
from ..models.hardware import DevicePlan, fit_threads
from ..models.hub import find_model
from ..models.loading import load_model
from ..models.sequences import bounded_seq_len
from ..models.tokenizer import as_chat, check_ids
from ..models.tokens import synthetic_tokens
from ..models.weights import Weights
from ..options import DeviceOptions, with_fields_of
from ..parallel import sequence_parallel
from ..parallel.launch import join_processes
from ..policies import Policy, find_policy, stored_bytes, use_cache_policy
from ..policies.fitting import fit_cache_policy
from ..progress import Progress
from ..recipe.requests import GenerationOptions, GenerationRequest
from ..runtime.saved_cache import check_saving, load_cache, save_cache, saved_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..models.source import Checkpoint

FITTED_TOKENS, FITTED_SEQ_LEN = 2048, 256
"""Tokens that a cache policy is fitted to, and those of a sequence."""


class Continuation(TypedDict):
    """Text that a model wrote.

    text: the prompt with its continuation, or the answer. chat_template: whether one was applied. cached_tokens: of the
    prompt, from a saved cache, where one was given. kv_cache_bytes: at the end; of a split cache also what each process
    had of it, and the bytes that this process sent, by kind.
    """

    text: str
    chat_template: bool
    prompt_tokens: int
    cached_tokens: NotRequired[int]
    new_tokens: int
    kv_cache_bytes: int
    kv_cache_bytes_by_process: NotRequired[list[int]]
    sent_bytes: NotRequired[dict[str, int]]


def run_generation(request: GenerationRequest) -> Continuation:
    """Generate with transformers' generate() and its dynamic cache; greedy below temperature 0.001.

    A tokenizer with a chat template gets the prompt as what a user says, and the text is the answer to it.

    Raises:
        UsageError: the prompt is not UTF-8, or torchrun did not start this process. CheckpointError: no tokenizer, or a
            chat template that fails. DataError: no tokens, or one that the model does not have.
    """
    with source_at(request.source):
        return _generate(request, request.progress or Progress())


continue_prompt = with_fields_of(GenerationRequest, run_generation, "continue_prompt")


def _generate(request: GenerationRequest, progress: Progress) -> Continuation:
    prompt, cache, on_text = request.prompt, request.cache, request.on_text
    _check_files(request)
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # bytes of a command line, which is no UTF-8
        raise UsageError(f"the prompt is not UTF-8: {prompt!a:.80}.", "Write it in UTF-8, or give --prompt-file.")
    folder = find_model(request.folder).folder
    checkpoint, tokenizer = with_tokenizer(folder)
    compute: DeviceOptions = request
    if request.parallel:
        compute = replace(request, device=join_processes(request.device))
    place = DevicePlan.choose(compute, checkpoint.dtype)
    chat = bool(tokenizer.chat_template) and not request.raw
    text = as_chat(folder, prompt) if chat else prompt
    inputs = tokenizer(text, add_special_tokens=not chat, return_tensors="pt").to(place.device)
    if inputs["input_ids"].shape[1] == 0:
        raise DataError("the prompt is empty.", "Give some text to continue.")
    check_ids(inputs["input_ids"], checkpoint.config.get_text_config().vocab_size)
    model = load_with_policy(folder, place, cache, tokenizer, progress)
    if request.save_cache is not None:
        check_saving(request.save_cache, model, request.cache_level)
    torch.manual_seed(request.seed)  # transformers samples from the global generator
    streamer = None if on_text is None else Streamer(tokenizer, on_text, skip_prompt=chat)
    waiting = progress.task("generate", None, "") if on_text is None else nullcontext()
    past = None if request.cache_file is None else _loaded(request.cache_file, model, inputs["input_ids"])
    cached_tokens = 0 if past is None else past.get_seq_length()
    with waiting, sequence_parallel(model) if request.parallel else nullcontext() as group:
        output = model.generate(
            input_ids=inputs["input_ids"],
            past_key_values=past,
            attention_mask=inputs["attention_mask"],
            streamer=streamer,
            **generation_settings(request, tokenizer),
        )
        size_bytes = stored_bytes(output.past_key_values)
        sizes = [size_bytes] if group is None else group.of_each(size_bytes)
    if request.save_cache is not None:
        named = {"input_ids": output.sequences, "level": request.cache_level}
        save_cache(output.past_key_values, request.save_cache, model, **named)
    tokens, prompt_tokens = output.sequences[0], inputs["input_ids"].shape[1]
    result: Continuation = {
        "text": tokenizer.decode(tokens[prompt_tokens:] if chat else tokens, skip_special_tokens=True),
        "chat_template": chat,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(tokens) - prompt_tokens,
        "kv_cache_bytes": sum(sizes),
    }
    if past is not None:
        result["cached_tokens"] = cached_tokens
    if group is not None:
        dist.destroy_process_group()
        result["kv_cache_bytes_by_process"] = sizes
        result["sent_bytes"] = dict(sorted(group.wire.sent.items()))
    return result


def _check_files(request: GenerationRequest) -> None:
    """Check the options of saved caches; raises UsageError where they contradict each other."""
    if request.save_cache is None and request.cache_level != "none":
        raise UsageError(f"--cache-level {request.cache_level}: nothing is saved.", "Give --save-cache FILE, too.")
    for name in ("cache_file", "save_cache"):
        if getattr(request, name) is not None and request.parallel:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: the cache of several processes is not in one file.", "Leave --parallel out.")


def _loaded(file: Path, model: PreTrainedModel, prompt: Tensor) -> DynamicCache:
    """As much of a saved cache as the prompt begins with, but for its last token, which is always read.

    Raises:
        UsageError: the file has no ids, those of several sequences, or another beginning; also as `load_cache` does.
    """
    saved = saved_inputs(file).get("input_ids")
    if saved is None or len(saved) != 1:
        what = "no ids of its tokens" if saved is None else f"{len(saved)} sequences"
        raise UsageError(f"--cache-file {file}: it has {what}.", "Save one by rotor generate --save-cache.")
    count = min(saved.shape[1], prompt.shape[1] - 1)
    alike = saved[0, :count] == prompt[0, :count].cpu()
    count = int(alike.int().cumprod(0).sum())
    if not count:
        raise UsageError(
            f"--cache-file {file}: its first token is not that of the prompt.",
            "Give a prompt that begins with the text that was saved, or leave the file out.",
        )
    return load_cache(file, model, count)


def with_tokenizer(folder: Path) -> tuple[Checkpoint, Any]:
    """Open a model that writes text; raises CheckpointError where it has no tokenizer."""
    checkpoint = open_model(folder)
    fit_threads(checkpoint.total_bytes())
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{folder}: no tokenizer in it.", "Add tokenizer.json.")
    return checkpoint, tokenizer


def load_with_policy(folder: Path, place: DevicePlan, cache: str | None, tokenizer: Any, progress: Progress) -> Any:
    """Load a model, with the cache policy of that name if one is given, fitted if it has to be."""
    policy = None if cache is None else find_policy(cache)  # whose module a checkpoint may name
    with progress.task("load model", None, ""):
        model = load_model(folder, place.device, place.dtype)
    if policy is not None and policy.needs_samples:
        policy = _fitted(model, policy, tokenizer, progress)
    if cache is not None:
        use_cache_policy(model, policy)
    return model


def generation_settings(options: GenerationOptions, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Arguments of transformers' generate(): how long, and by which choice of tokens."""
    sampled = options.temperature >= 0.001
    sampling = {"do_sample": True, "temperature": options.temperature} if sampled else {"do_sample": False}
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    named = {"max_new_tokens": options.max_new_tokens, "pad_token_id": padding, "return_dict_in_generate": True}
    return named | sampling


def _fitted(model: PreTrainedModel, policy: Policy, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> Policy:
    """The policy, fitted to text that the model writes, as nothing else is at hand."""
    config = model.config.get_text_config()
    seq_len = bounded_seq_len(FITTED_SEQ_LEN, config)
    count = FITTED_TOKENS // seq_len
    progress.message(f"cache policy {policy.method}: fits its levels to {count * seq_len} tokens that the model writes")
    with progress.task("fit cache policy", count * seq_len, "tokens") as advance:
        sequences = synthetic_tokens(Weights(model), count, seq_len, config, tokenizer, 0, advance)
        return fit_cache_policy(model, policy, sequences)


class Streamer(TextStreamer):
    """Decodes tokens as they come, whole words at a time, and passes the text on."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None], *, skip_prompt: bool
    ) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)

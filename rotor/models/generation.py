"""Continue a prompt with a model folder, compressed or not."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, DataError, UsageError
from ..parallel import sequence_parallel
from ..parallel.launch import Launched, launched
from ..runtime.cache_size import cache_bytes
from .compressed import CompressedCheckpoint, open_model
from .hardware import pick_device, pick_dtype
from .hub import find_model
from .loading import load_model


def continue_prompt(
    folder: str | Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    profile: str | None = None,
    parallel_timeout_s: float | None = None,
) -> dict[str, Any]:
    """Generate with transformers' generate() and its dynamic cache; greedy at temperature 0.

    Args:
        profile: of an elastic checkpoint, the rank profile to load; None is its default.
        parallel_timeout_s: with it the prompt and its cache are spread over the processes that torchrun started, of
            which each waits so long for another.

    Returns:
        `text` (prompt and continuation), `new_tokens`, and `kv_cache_bytes` of the cache at the end; of a spread one
        also what each process had of it, and the bytes that the first sent to the others, by kind.
    Raises:
        UsageError: processes are asked for, and torchrun did not start this one.
        CheckpointError: the folder has no tokenizer. DataError: the prompt has no tokens.
    """
    folder = find_model(folder).folder
    checkpoint = open_model(folder)
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{folder}: no tokenizer in it.", "Add tokenizer.json.")
    processes = None
    if parallel_timeout_s is not None:
        processes = _join(timedelta(seconds=parallel_timeout_s))
        device = processes.device(device)
    target = pick_device(device)
    compute_dtype = pick_dtype(dtype, checkpoint.config.dtype or torch.float32, target)
    elastic = isinstance(checkpoint, CompressedCheckpoint) and checkpoint.elastic
    if profile is not None and not elastic:
        raise UsageError(f"--profile {profile}: {folder} is not elastic.", "Export it with --elastic.")
    model = load_model(folder, target, compute_dtype, {} if profile is None else {"rank_profile": profile})
    inputs = tokenizer(prompt, return_tensors="pt").to(target)
    if inputs["input_ids"].shape[1] == 0:
        raise DataError("the prompt is empty.", "Give some text to continue.")
    torch.manual_seed(seed)  # transformers samples from the global generator
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    with ExitStack() as stack:
        spread = stack.enter_context(sequence_parallel(model)) if processes is not None else None
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            return_dict_in_generate=True,
            **sampling,
        )
        size_bytes = cache_bytes(output.past_key_values)
        sizes = [size_bytes] if spread is None else spread.of_each(size_bytes)
    if processes is not None:
        processes.leave()
    result = {
        "text": tokenizer.decode(output.sequences[0], skip_special_tokens=True),
        "new_tokens": output.sequences.shape[1] - inputs["input_ids"].shape[1],
        "kv_cache_bytes": sum(sizes),
    }
    if spread is not None:
        result |= {"kv_cache_bytes_by_process": sizes, "sent_bytes": dict(sorted(spread.wire.sent.items()))}
    return result


def _join(timeout: timedelta) -> Launched:
    """This process, after it has found the others."""
    found = launched()
    if found is None:
        raise UsageError(
            "the prompt is to be spread over processes, and torchrun did not start this one.",
            "torchrun --nproc-per-node N -m rotor generate OUT ... --parallel sequence",
        )
    found.join(timeout)
    return found

"""Scores of a model that reads the past through a cache: prefill, then the rest in chunks (teacher forcing).

Whole-sequence scoring never reads what a quantising or evicting cache has stored. Here every scored prediction does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from ..errors import DataError, UsageError
from ..models.layerwise import LayerwiseModel
from ..policies import Policy, cache_policy, stored_bytes
from ..progress import Advance
from .scoring import Scores, finite, position_scores

REFERENCE_LOGIT_BYTES = 1 << 28
"""Memory that the reference's float32 logits of a batch may take."""

PREFILL_SHARE = 4
"""One part in so many of a row of text is the prompt; the rest is scored behind it."""

LONGEST_CHUNK = 64
"""Tokens of a step where any number would do."""


def prefill_of(answers: Tensor) -> int:
    """The longest prefill after which every answer is read through the cache, for answers [rows, seq_len] bool.

    The token before an answer predicts it, and must come after the prefill.

    Raises:
        DataError: there is no answer, or one of the first two tokens is one.
    """
    positions = answers.any(0).nonzero()
    if len(positions) == 0 or int(positions[0]) < 2:
        raise DataError("cached scoring needs answers, and at least two tokens before the first.")
    return int(positions[0]) - 1


@torch.no_grad()
def score_through_cache(
    model: Any,
    rows: Tensor,
    make_cache: Callable[[], Cache],
    prefill: int,
    chunk: int = 1,
    *,
    reference: Any = None,
    batch_size: int = 16,
    advance: Advance = lambda done: None,
) -> Scores:
    """Score tokens prefill + 1 ... seq_len - 1 of each row; each is predicted by a token that came after the prefill.

    Args:
        model: a causal model of transformers. rows: [n, seq_len] int64, of equal length, padded on the right if at all.
        make_cache: makes an empty cache for one batch.
        prefill: tokens of the first step.
        chunk: tokens of each later step. Tokens of a step may see each other as they came, so that 1 is exact for every
            cache; Policy.longest_step is as exact, and faster.
        reference: the model that KL is measured against, over whole rows, without a cache.
        batch_size: rows at a time. advance: gets the tokens that are done.
    Raises:
        DataError: there are no rows, or fewer than two tokens behind the prefill.
        NumericsError: logits that are not finite.
    """
    seq_len = rows.shape[-1]
    if rows.numel() == 0 or not 1 <= prefill <= seq_len - 2:
        raise DataError(
            f"cached scoring: rows of shape {list(rows.shape)} and a prefill of {prefill} tokens; expected rows, and "
            "two tokens or more behind the prefill."
        )
    if reference is not None:
        vocab_size = reference.config.get_text_config().vocab_size
        batch_size = min(batch_size, max(1, REFERENCE_LOGIT_BYTES // (4 * seq_len * vocab_size)))
    found: dict[str, list[Tensor]] = {}
    stored = 0
    for batch in rows.split(batch_size):
        cache, inputs = make_cache(), batch.to(model.device)
        expected = None if reference is None else reference(input_ids=inputs).logits
        parts = []
        _step(model, inputs[:, :prefill], cache, keep=1)
        advance(len(batch) * prefill)
        for start in range(prefill, seq_len, chunk):
            labels = batch[:, start + 1 : start + 1 + chunk]
            logits = _step(model, inputs[:, start : start + chunk], cache, keep=0)
            count = labels.shape[1]  # the last token of a row completes the cache and predicts nothing
            if count:
                theirs = None if expected is None else expected[:, start : start + count].float().flatten(0, 1)
                of_step = position_scores(logits[:, :count].float().flatten(0, 1), labels.flatten(), theirs)
                parts.append({name: values.reshape(labels.shape) for name, values in of_step.items()})
            advance(len(batch) * logits.shape[1])
        stored += stored_bytes(cache)
        for name in parts[0]:
            found.setdefault(name, []).append(torch.cat([part[name] for part in parts], dim=1))
    columns = {name: torch.cat(values) for name, values in found.items()}
    return Scores(first=prefill + 1, kv_bytes_per_token=stored / rows.numel(), **columns)


@torch.no_grad()
def greedy_through_cache(
    model: Any, rows: Tensor, make_cache: Callable[[], Cache], prefill: int, tokens: int, batch_size: int = 16
) -> Tensor:
    """What a model writes behind each row's first `prefill` tokens, choosing the likeliest, [n, tokens] int64.

    Args:
        model, make_cache, batch_size: as for `score_through_cache`. rows: [n, seq_len] int64.
    """
    found = []
    for batch in rows[:, :prefill].split(batch_size):
        cache, inputs, written = make_cache(), batch.to(model.device), []
        for _ in range(tokens):
            inputs = _step(model, inputs, cache, keep=1)[:, -1:].argmax(-1)
            written.append(inputs.cpu())
        found.append(torch.cat(written, dim=1))
    return torch.cat(found)


def same_beginning(first: Tensor, second: Tensor) -> float:
    """The share of [n, tokens] before the first that differs, the mean over rows."""
    return float((first == second).long().cumprod(-1).double().mean())


def _step(model: Any, inputs: Tensor, cache: Cache, keep: int) -> Tensor:
    """Logits of the last `keep` positions (0: of all), [batch_size, keep, vocab_size]."""
    return finite(model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits)


def check_in_memory(network: LayerwiseModel, policy: Policy) -> None:
    """Raises UsageError where weights are read layer by layer: what a policy does shows only step by step."""
    if network.source.streamed:
        raise UsageError(
            f"cache policy {policy.method}: is measured step by step, which needs all weights in memory.",
            "Give --offload never on a machine that can hold them, or --cache none.",
        )


@torch.inference_mode()
def final_states_through_cache(
    network: LayerwiseModel, rows: Tensor, policy: Policy, prefill: int, advance: Advance = lambda done: None
) -> Tensor:
    """Hidden states that leave the last layer, as `LayerwiseModel.final_states`, where the cache follows a policy.

    Tokens behind the prefill read what is stored of those before them.

    Args:
        rows: [n, seq_len]. prefill: tokens of the first step; later ones have as many as the policy allows.
    Raises:
        UsageError: weights are read layer by layer.
    """
    check_in_memory(network, policy)
    states, found = network.states_like(rows), []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).cpu())

    handle = network.layers[-1].register_forward_hook(keep)
    chunk = policy.longest_step or LONGEST_CHUNK
    steps = [slice(0, prefill)]
    steps += [slice(start, min(start + chunk, rows.shape[1])) for start in range(prefill, rows.shape[1], chunk)]
    try:
        with cache_policy(network.model, policy):
            for part in network.batches(rows):
                cache = DynamicCache(config=network.config)
                for step in steps:
                    inputs = rows[part, step].to(network.device)
                    network.decoder(input_ids=inputs, past_key_values=cache, use_cache=True)
                    states[part, step] = found.pop()
                    advance(inputs.numel())
    finally:
        handle.remove()
    return states

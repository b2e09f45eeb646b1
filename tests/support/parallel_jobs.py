"""Jobs of the processes of `parallel_processes`."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import rotor  # noqa: F401  registers compressed checkpoints
from rotor.parallel import sequence_parallel
from rotor.policies import stored_bytes


@lru_cache(maxsize=2)
def load(folder: str, dtype: torch.dtype = torch.float64) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def positions_of(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def answers(model: Any, ids: Tensor, mask: Tensor | None, new_tokens: int) -> dict[str, Tensor]:
    """Logits of a whole prompt, greedy tokens with their logits, and logits of a chunk over a filled cache."""
    more = {} if mask is None else {"attention_mask": mask, "position_ids": positions_of(mask)}
    found = {"logits": model(ids, use_cache=False, **more).logits}
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    found["tokens"], found["steps"] = output.sequences, torch.stack(output.logits)
    cache = model(ids, use_cache=True, logits_to_keep=1, **more).past_key_values
    chunk = ids[:, -3:].contiguous()
    if mask is not None:
        mask = torch.cat([mask, torch.ones_like(chunk)], 1)
        more = {"attention_mask": mask, "position_ids": positions_of(mask)[:, -3:]}
    found["chunk"] = model(chunk, past_key_values=cache, **more).logits
    return found


def sharded_answers(group: Any, folder: str, ids: Tensor, mask: Tensor | None, new_tokens: int) -> dict[str, Any]:
    """`answers` of a model that is split."""
    model = load(folder)
    with sequence_parallel(model, group):
        return answers(model, ids, mask, new_tokens)


@torch.no_grad()
def traffic(group: Any, folder: str, ids: Tensor) -> dict[str, Any]:
    """Traffic of a prompt and one more token, and the bytes and tokens of this process's part of the cache."""
    model = load(folder)
    with sequence_parallel(model, group) as parallel:
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        model(ids[:, -1:].contiguous(), past_key_values=cache)
        sizes = parallel.of_each(stored_bytes(cache))
    tokens = [len(layer.indices) for layer in cache.layers]
    return {"sent": dict(parallel.wire.sent), "sizes": sizes, "tokens": tokens}


def different_inputs(group: Any, folder: str, ids: Tensor) -> None:
    model = load(folder)
    with sequence_parallel(model, group) as parallel:
        model(ids + parallel.rank)


def without_last(group: Any, folder: str, ids: Tensor, dies: bool) -> str:
    """All processes but the last run a prompt; that one does nothing, or, in the group of all, ends."""
    model, group = load(folder), None if dies else group
    if torch.distributed.get_rank(group) == torch.distributed.get_world_size(group) - 1:
        if dies:
            os._exit(1)
        return "absent"
    with sequence_parallel(model, group):
        model(ids)
    return "finished"

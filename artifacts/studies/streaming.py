"""Loss far beyond the training length where StreamingLLM keeps its tokens' places, and where it counts them anew.

    python artifacts/studies/streaming.py artifacts/demo-model --length 2048 --tokens 256

Each row is held-out text (the report split, documents one behind the other). The prompt has as many tokens as the
budget; every token behind it is read by itself through the cache. `positions: cache` counts positions among the tokens
that are kept, as the paper does; `sequence` leaves each key at the place where it came; `full` drops nothing. Printed
is the mean loss in nats by blocks of tokens, and how far apart the two ways are in each row.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rotor.models.layerwise import LayerwiseModel
from rotor.models.sequences import evenly_spaced, text_sequences
from rotor.models.splits import held_out_documents
from rotor.policies import find_policy
from rotor.recipe.sections import Evaluation
from rotor.search.evaluation.cached import final_states_through_cache
from rotor.search.evaluation.scoring import score

EDGES = (256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=256, help="budget, and tokens of the prompt")
    parser.add_argument("--rows", type=int, default=8)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    held_out = held_out_documents(Evaluation())
    rows = evenly_spaced(
        text_sequences(held_out.texts("report"), tokenizer, given.length), given.rows, held_out.description
    )
    streaming = replace(find_policy("streaming-50"), tokens=given.tokens)
    network, first, losses = LayerwiseModel.of(model), given.tokens + 1, {}
    for name, policy in {
        "full": None,
        "sequence": replace(streaming, positions="sequence"),
        "cache": replace(streaming, positions="cache"),
    }.items():
        states = final_states_through_cache(network, rows, given.tokens, policy, step=1 if policy else None)
        losses[name] = score(network, rows[:, given.tokens :], states=states[:, given.tokens :]).nll
        print(f"{name:>8}: done", flush=True)
    print(f"{'tokens':>14}" + "".join(f"{name:>10}" for name in losses) + "   sequence - cache, rows")
    for start, end in pairwise(edge for edge in EDGES if edge <= given.length):
        block = {name: loss[:, max(0, start - first) : end - first].double() for name, loss in losses.items()}
        apart = (block["sequence"] - block["cache"]).mean(1)
        means = "".join(f"{loss.mean():>10.3f}" for loss in block.values())
        print(f"{f'{start} to {end}':>14}{means}   " + " ".join(f"{value:+.3f}" for value in apart))


if __name__ == "__main__":
    main()

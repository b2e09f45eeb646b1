"""Texts that the uncompressed and the compressed model write to a few prompts, for the card and the report.

Prompts are fixed, so that no text of the user's is published, but for those that are given for that. Fixed ones are
longer than the tokens that the cache keeps exactly: what is asked for stands at their beginning, and is read from
compressed rows.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ...checkpoint.schemas import TextInfo
from ...models.sequences import bounded_seq_len
from ...models.tokenizer import as_chat
from ..point import Point
from .search import RankSearch

log = logging.getLogger("rotor")

NEW_TOKENS = 40
"""Most tokens that a model writes to a prompt."""

HARBOUR = """\
The harbour of Velmora has three lighthouses. The oldest, Grey Anna, was built in 1764 by a widow called Ilse \
Marrow, who paid for it with the price of two fishing boats. It burns whale oil to this day. The second, the \
Needle, is made of iron, and was brought in pieces from another coast. Nobody lives in it; a clock lights it at \
dusk. The third is called Little Brother. It stands on the end of the pier, it is painted red and white, and \
children climb it in summer to jump into the water. Ships that come in at night look for all three. When Grey \
Anna is to the left of the Needle, the channel is deep enough; when it is to the right, there are rocks. \
Captains learn a rhyme about it before they learn to read a chart, and old sailors say it when they cannot \
sleep. Last winter a storm broke the glass of the Needle, and for nine nights the fishermen took turns to stand \
in its lamp room with a lantern, so that no ship would miss it. On the tenth day the glass was replaced, and the \
mayor gave every one of them a new coat.

Question: In which year was the oldest lighthouse built, and by whom?
Answer:"""

SHOP = '''\
def price_with_tax(net: float, rate: float = 0.19) -> float:
    """Price that a customer pays, rounded to cents."""
    return round(net * (1 + rate), 2)


def shipping_cost(weight_kg: float, express: bool = False) -> float:
    """Cost of a parcel: five for each started ten kilograms, twice that for express."""
    parcels = max(1, math.ceil(weight_kg / 10))
    return parcels * (10.0 if express else 5.0)


class Basket:
    """Order of a customer: names of articles, with their net prices and weights."""

    def __init__(self) -> None:
        self.articles: dict[str, tuple[float, float]] = {}

    def add(self, name: str, net: float, weight_kg: float) -> None:
        """Put an article into the basket; a second one of the same name takes its place."""
        self.articles[name] = (net, weight_kg)

    def weight(self) -> float:
        """Weight of all articles in kilograms."""
        return sum(weight_kg for _, weight_kg in self.articles.values())

    def total(self, express: bool = False) -> float:
        """Price of all articles with tax, and of shipping them."""
'''

PROMPTS = (HARBOUR, SHOP)


def texts_before_and_after(search: RankSearch, point: Point) -> list[TextInfo]:
    """Continue each prompt by both models, greedily; a prompt longer than the model's positions is left out."""
    request = search.job.request
    network, checkpoint = search.network, search.job.checkpoint
    tokenizer: Any = checkpoint.tokenizer
    chat = bool(tokenizer.chat_template)
    inputs = []
    for prompt in (*(PROMPTS if request.texts else ()), *request.prompts):
        text = as_chat(checkpoint.folder, prompt) if chat else prompt
        ids = tokenizer(text, add_special_tokens=not chat, return_tensors="pt")["input_ids"].to(network.device)
        if bounded_seq_len(ids.shape[1] + NEW_TOKENS, checkpoint.config) == ids.shape[1] + NEW_TOKENS:
            inputs.append((prompt, ids))
        else:
            log.warning("a prompt of %d tokens is left out: the model has too few positions for it", ids.shape[1])

    def written(model: Any) -> list[str]:
        texts = []
        for _, ids in inputs:
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            )  # fmt: skip
            texts.append(str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)))
        return texts

    with search.times.stage("texts"), search.progress.task("texts", None, ""):
        with network.uncompressed() as model:
            before = written(model)
        search.compress(point)
        after = written(network.model)
    return [
        {"prompt": prompt, "prompt_tokens": ids.shape[1], "before": old, "after": new}
        for (prompt, ids), old, new in zip(inputs, before, after, strict=True)
    ]

"""The part `zdc`: which tokens layers find important, what bases lose on other text, bytes between processes, seconds,
and ratios per token beside eviction and codes (ZDC figures 4 to 9, 14 and 19 to 23 in shape).

    rotor study MODEL --recipes zdc --parts artifacts/studies/parts/zdc.py:Zdc -o STUDY
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from scores import SEQUENCES, measure_scores, observe, tables_of_scores
from torch import Tensor

from rotor.calibration.pruning import prune_sequences
from rotor.checkpoint.bases import LayerBases
from rotor.checkpoint.folding import model_layouts
from rotor.checkpoint.layout import POST_ROPE, AttentionShape, GroupLayout, LayerLayout, ordered_by_class
from rotor.checkpoint.rows import NumberRow
from rotor.errors import UnsupportedModelError, UsageError
from rotor.models.compressible import CompressibleModel
from rotor.models.tokenizer import chat_opening
from rotor.models.tokens import calibration_tokens
from rotor.parallel.heads import travel
from rotor.policies import GEAR, H2O, Policy, Tiers, find_policy
from rotor.search.evaluation.cached import final_states_through_cache
from rotor.search.ratio_search import rising_shares
from rotor.tools.study.cache_part import CachePart, StudiedCache, cache_records
from rotor.tools.study.caches import PROMPT_SHARE, CacheRecord
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Table, Task, number
from rotor.tools.study.parts.methods import at_equal_bytes
from rotor.tools.study.store import Record, StudyStore

RATIOS = (0.1, 0.3, 0.5, 0.7)
"""p of figure 14."""

SIDES = ("QK", "VW_L")
"""Sides that are compressed alone in figure 14."""

PROCESSES = (2, 4, 8)
AT = 0.3
"""Share of the cache that the recipe removes where H2O, GEAR, or the exchange between processes build on it."""

LENGTHS = (128, 256, 512)
"""Tokens of a request whose seconds are measured, three quarters of them the prompt."""

SHARES, SCALES, BITS = (0.75, 0.5, 0.25), (0.25, 0.5, 1.0), (4, 2)
"""Shares of the tokens that H2O keeps, factors of the ratios of --cache zdc, and widths of GEAR's codes."""

LOSS = 0.1
"""Q_d, the loss of perplexity at which caches are compared (ZDC section 6.3)."""

EQUAL = (0.75, 0.5, 0.3)
"""Shares of the uncompressed bytes at which the loss is compared."""


class Zdc(CachePart):
    name = "zdc"
    title = "Ratios per token beside eviction and codes (ZDC figures 19, 20, 22 and 23)"
    text = (
        "Bytes stand for the time of a request. ZDC: shares of important tokens that rise with the layers; /DL: one "
        f"share for all; /DT: one ratio for all tokens; `H2O-ZDC`, `GEAR-ZDC`: on rows of which {AT:g} is removed."
    )

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        yield Task(f"{self.name}/scores", partial(measure_scores, study))
        for name in study.inputs.recipes:
            yield Task(f"{self.name}/degradation/{name}", partial(_degradation, study, name))
            yield Task(f"{self.name}/travel/{name}", partial(_travel, study, name))
        yield Task(f"{self.name}/seconds", partial(_seconds, study))
        yield from super().tasks(study)

    def caches(self, study: StudyContext) -> dict[str, StudiedCache]:
        found = {f"H2O, {share:g} of the tokens": StudiedCache("H2O", H2O(share)) for share in SHARES}
        found |= {f"GEAR, {bits} bits": StudiedCache("GEAR", GEAR(bits)) for bits in BITS}
        for recipe in study.inputs.recipes:
            for label, ratios in tiers(study.network.shape.num_layers).items():
                for scale in SCALES:
                    family = f"{recipe}: {label}"
                    found[f"{family}, {scale:g}"] = StudiedCache(family, ratios.scaled(scale), recipe)
            both: dict[str, Policy] = {f"H2O-ZDC, {share:g} of the tokens": H2O(share) for share in SHARES[:2]}
            both |= {f"GEAR-ZDC, {bits} bits": GEAR(bits) for bits in BITS}
            for name, policy in both.items():
                family = f"{recipe}: {name.split(',')[0]}"
                found[f"{recipe}: {name}"] = StudiedCache(family, policy, recipe, AT)
        return found

    def tables(self, store: StudyStore) -> Iterator[Table]:
        yield from super().tables(store)
        records = [record for record in cache_records(store, self.name) if not record.skipped]
        if records:
            whole = records[0].kv_bytes_per_token / (1 - records[0].compression)
            sizes = [share * whole for share in EQUAL]
            rows = at_equal_bytes(records, sizes, lost_perplexity)
            text = "Figures 20 and 23: the least loss of perplexity, Q_d, of a cache that takes no more bytes."
            yield Table(["cache", *(f"{size:.0f} bytes" for size in sizes)], rows, text=text)
            text = f"Figures 19 and 22: the fewest bytes whose Q_d is at most {LOSS:g}."
            yield Table(["cache", "bytes", "Q_d"], fewest_bytes(records), text=text)
        if record := store.records.get(f"{self.name}/scores"):
            yield from tables_of_scores(record)
        for name, record in store.part(f"{self.name}/degradation").items():
            rows = [[side, *(_of_texts(record[side][f"{ratio:g}"]) for ratio in RATIOS)] for side in SIDES]
            text = (
                f"Figure 14, `{name}`: D, how far attention's outputs are off in sum over their size in sum, in the "
                "mean over layers, each by itself: of text that was calibrated on, and of each sequence of other text."
            )
            yield Table(["p", *(f"{ratio:g}" for ratio in RATIOS)], rows, text=text)
        for name, record in store.part(f"{self.name}/travel").items():
            text = f"Figures 9 and 18, `{name}` at {AT:g} removed: bytes of a prompt's token that processes send."
            rows = [[count, *(f"{size:.0f}" for size in sizes)] for count, sizes in record.items()]
            yield Table(["processes", "uncompressed", "compressed", "rows to all"], rows, text=text)
        if seconds := store.records.get(f"{self.name}/seconds"):
            text = (
                "Figures 4 and 5: seconds of a request on this machine, in PyTorch, by the model alone, with caches "
                "that are coded or cut on line, and of the SVD of its queries with keys and of its values, on line."
            )
            names = next(iter(seconds.values()))
            rows = [[tokens, *(f"{value:.3f}" for value in of.values())] for tokens, of in seconds.items()]
            yield Table(["tokens", *names], rows, text=text)


def tiers(layers: int) -> dict[str, Tiers]:
    """ZDC's ratios, and its ablations /DL and /DT with the same mean ratios."""
    given = find_policy("zdc")
    assert isinstance(given, Tiers)
    policy = replace(given, search=False)
    g = policy.important
    qk = g * policy.qk_important + (1 - g) * policy.qk_unimportant
    v = g * policy.v_important + (1 - g) * policy.v_unimportant
    alike = replace(policy, qk_important=qk, qk_unimportant=qk, v_important=v, v_unimportant=v)
    return {"ZDC": next(rising_shares(policy, layers), policy), "/DL": policy, "/DT": alike}


def lost_perplexity(record: CacheRecord) -> float:
    """Q_d: the growth of perplexity over the perplexity (ZDC section 5.2)."""
    return 1 / record.ppl_ratio - 1


def fewest_bytes(records: Sequence[CacheRecord]) -> list[list[str]]:
    """The cache of each family with the fewest bytes of those that lose at most LOSS."""
    rows = []
    for family in dict.fromkeys(record.family for record in records):
        kept = [record for record in records if record.family == family and lost_perplexity(record) <= LOSS]
        best = min(kept, key=lambda record: record.mean_kv_bytes_per_token, default=None)
        cells = [number(best.mean_kv_bytes_per_token, 0), number(lost_perplexity(best), 3)] if best else ["none", ""]
        rows.append([best.name if best else family, *cells])
    return rows


def _degradation(study: StudyContext, name: str) -> Record:
    """Figure 14: D by side and ratio, of text that was calibrated on and of each sequence of other text."""
    recipe, checkpoint, network = study.inputs.recipes[name], study.checkpoint, study.network
    if recipe.groups.joint or recipe.coded:
        raise UsageError(
            f"{name}: the part zdc compares keys and values by themselves, in numbers.", "Give --recipes zdc."
        )
    bases = study.run(name, recipe).bases()
    writes = recipe.tokens.source == "synthetic"
    opening = chat_opening(checkpoint.folder, checkpoint.tokenizer) if writes else []
    config, tokenizer, held_out = checkpoint.config, checkpoint.tokenizer, recipe.evaluation
    own = calibration_tokens(recipe.tokens, config, tokenizer, network.source, None, held_out, opening)
    texts = [
        prune_sequences(own.sequences, recipe.prune, own.topics)[:SEQUENCES],
        *study.data.report[:SEQUENCES].split(1),
    ]
    found: Record = {side: {f"{ratio:g}": [0.0] * len(texts) for ratio in RATIOS} for side in SIDES}
    for place, text in enumerate(texts):
        with network.uncompressed():
            states = network.embed(text)
            for index, of_layer in enumerate(bases):
                with network.layer(index):
                    for side, ratio, lost in _lost(network, index, of_layer, text, states):
                        found[side][f"{ratio:g}"][place] += lost / len(bases)
                    network.run(index, text, states, states)
    return found


def _lost(
    network: CompressibleModel, index: int, bases: LayerBases, text: Tensor, states: Tensor
) -> Iterator[tuple[str, float, float]]:
    """Side, ratio, and how far the outputs of one layer's attention are off, over their size; the layer is loaded."""
    exact = attention_output(network, index, text, states)
    shape = network.shape.layer(index)
    columns = bases.group_size * shape.head_dim
    for ratio in RATIOS:
        kept = max(1, round((1 - ratio) * columns))
        for side, ranks in zip(SIDES, ((kept, columns), (columns, kept)), strict=True):
            groups = [ranks] * (shape.num_kv_heads // bases.group_size)
            with network.compressed_layer(index, bases, groups):
                off = attention_output(network, index, text, states) - exact
            yield side, ratio, float(off.abs().sum() / exact.abs().sum())


@torch.inference_mode()
def attention_output(network: CompressibleModel, index: int, text: Tensor, states: Tensor) -> Tensor:
    """Output of a layer's attention for hidden states [batch_size, seq_len, hidden_size] of tokens, behind W_o."""
    kept: list[Tensor] = []
    module = network.family.attention_module(network.model, index)
    handle = module.register_forward_hook(lambda _, inputs, output: kept.append(output[0]))
    try:
        network.through(index, text, states.to(network.device))
    finally:
        handle.remove()
    return kept[0].double().cpu()


def _of_texts(lost: Sequence[float]) -> str:
    return f"{lost[0]:.4f}, other {min(lost[1:]):.4f} to {max(lost[1:]):.4f}"


def _travel(study: StudyContext, name: str) -> Record:
    """Bytes of a token, all layers, by the number of processes: of the uncompressed model by heads, of a plan by heads
    or rows, and by rows alone."""
    evaluator, path = study.path(name, study.inputs.recipes[name])
    plan, shape = path.at_compression(AT), study.network.shape
    if plan is None:
        raise UsageError(f"{name} cannot remove {AT:g} of the rows.", "Leave this recipe out of the part zdc.")
    element_bytes = study.cache_dtype.itemsize
    layouts = model_layouts(evaluator.run.bases(plan.channels), plan.ranks)
    found = {}
    for count in PROCESSES:
        ways = [travel(layout, shape.layer(n), count, element_bytes) for n, layout in enumerate(layouts)]
        whole = ((number, travel(_whole(own), own, count, element_bytes)) for own, number in shape.sizes.items())
        before = sum(number * (way.heads or 0.0) for number, way in whole)
        found[str(count)] = [before, sum(way.bytes_per_token for way in ways), sum(way.rows for way in ways)]
    return found


def _whole(shape: AttentionShape) -> LayerLayout:
    """A layer that keeps all numbers of each head."""
    heads = (GroupLayout((head,), *[NumberRow(shape.head_dim)] * 2) for head in range(shape.num_kv_heads))
    return ordered_by_class(heads, POST_ROPE)


def _seconds(study: StudyContext) -> Record:
    """Figures 4 and 5: seconds of requests of each of LENGTHS, by what is done to its cache."""
    policies: dict[str, Policy | None] = {"model": None, "with H2O": H2O(SHARES[1]), "with GEAR": GEAR(BITS[0])}
    network, found = study.network, Record()
    spent: list[float] = []

    def svd(layer: int, tensors: dict[str, Tensor]) -> None:
        query, key, value = (tensors[name][0].float() for name in ("query", "key_post", "value"))
        both = torch.cat([query.unflatten(0, (len(key), -1)).flatten(1, 2), key], dim=1)
        start = time.perf_counter()
        for matrix in (both, value):
            torch.linalg.svd(matrix, full_matrices=False)
        spent.append(time.perf_counter() - start)

    for length in (length for length in LENGTHS if length <= study.data.report.shape[1]):
        request, seconds = study.data.report[:1, :length], {}
        for name, policy in policies.items():
            with network.uncompressed(), suppress(UnsupportedModelError):  # sliding windows have no policy
                start = time.perf_counter()
                final_states_through_cache(network, request, round(PROMPT_SHARE * length), policy, step=1)
                seconds[name] = time.perf_counter() - start
        spent.clear()
        observe(study, request, svd)
        seconds["SVD"] = sum(spent)
        found[str(length)] = seconds
    return found

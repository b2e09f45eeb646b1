"""The part `gear`: what codes of keys and values lose, and of what a cache consists (GEAR figures 1a, 2a, 2b and 6).

rotor study MODEL --parts artifacts/studies/parts/gear.py:Gear -o STUDY
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rotor.errors import UsageError
from rotor.policies import GEAR, KCVT, KIVI, PerToken, Quantiser
from rotor.policies.store import Side, Stream, heads_together, tensor_bytes
from rotor.tools.study.cache_part import GROUP
from rotor.tools.study.caches import PROMPT_SHARE
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Part, Table, Task, number
from rotor.tools.study.plots import draw_line
from rotor.tools.study.store import Record, StudyStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

States = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [1, num_kv_heads, tokens, head_dim] float32."""

BITS = (4, 2)
SINGLE_BITS = (8, 4, 3, 2)
"""Widths of the codes at whose sizes techniques are compared alone."""

CUTS = 4
"""Lengths of figure 6: the whole groups of a sequence, and so many parts of a group fewer, so that what waits for a
group is its mean (KIVI, and GEAR on it, wait for a group, KCVT for 20 tokens)."""

VALUES = (1, 2, 4, 8, 16, 32)
"""Singular values in the table of spectra, counted from one."""

PARTS = ("codes", "scales and zeros", "low rank", "outliers", "waiting")
PART_OF = ("codes", "scales and zeros", "scales and zeros", "low rank", "low rank", "outliers", "outliers")
"""Part that each stored tensor belongs to: the three of the backbone, then GEAR's."""


def methods(bits: int) -> dict[str, Quantiser]:
    """The caches of GEAR's tables 1 and 2, by name."""
    kivi = GEAR(bits, backbone="kivi", buffer=GROUP, group=GROUP)
    return {
        "per token": PerToken(bits, GROUP),
        "KCVT": KCVT(bits),
        "KIVI": KIVI(bits, GROUP, GROUP),
        "GEAR-L on KCVT": GEAR(bits, sparsity=0.0),
        "GEAR on KCVT": GEAR(bits),
        "GEAR-L on KIVI": GEAR(bits, backbone="kivi", sparsity=0.0, buffer=GROUP, group=GROUP),
        "GEAR on KIVI": kivi,
    }


class Gear(Part):
    name = "gear"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        states: States = []

        def measured(measure: Callable[[States], Record]) -> Record:
            if not states:
                states.extend(_states(study))
            return measure(states)

        for bits in BITS:
            for name, policy in methods(bits).items():
                yield Task(f"{self.name}/{name}, {bits} bits", partial(measured, partial(_cache, policy)))
        yield Task(f"{self.name}/one technique", partial(measured, _single))
        for bits in BITS:
            yield Task(f"{self.name}/residual, {bits} bits", partial(measured, partial(_spectra, bits)))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        records = store.part(self.name)
        caches = {name: record for name, record in records.items() if "parts" in record}
        if caches:
            header = ["cache", "error of keys", "error of values", *PARTS, "all"]
            text = (
                "Figures 1a and 6. Error: the norm of what the codes lose over the norm of the numbers, all layers "
                f"of a sequence of at most {next(iter(caches.values()))['tokens']} tokens of the report split; nothing "
                "waits. Parts: of sequences whose last quarter comes after the prompt, percent of the 16-bit cache, in "
                f"the mean over lengths {', '.join(str(GROUP * n // CUTS) for n in range(CUTS))} tokens shorter."
            )
            rows = [
                [name, *(number(error, 3) for error in record["errors"]), *_percents(record["parts"])]
                for name, record in caches.items()
            ]
            yield Table(header, rows, "Errors and parts of coded caches (GEAR)", text)
        if single := records.get("one technique"):
            text = (
                "Figure 2a: error of the first layer's values by one technique alone at the sizes of plain codes "
                f"({', '.join(map(str, SINGLE_BITS))} bits), and by GEAR on those codes at its own sizes."
            )
            rows = [[name, *(_at(*point) for point in points)] for name, points in single.items()]
            yield Table(["technique", *(f"{bits} bits" for bits in SINGLE_BITS)], rows, text=text)
        spectra = {name: record for name, record in records.items() if "spectra" in record}
        if spectra:
            text = (
                "Figure 2b: singular values of what codes and outliers leave of each head, over the largest, in the "
                "mean over heads and layers."
            )
            rows = [
                [f"{name}: {side}", *(number(values[n - 1], 3) for n in VALUES if n <= len(values))]
                for name, record in spectra.items()
                for side, values in record["spectra"].items()
            ]
            yield Table(["residual", *map(str, VALUES[: len(rows[0]) - 1])], rows, text=text)

    def plots(self, store: StudyStore) -> dict[str, Callable[[Figure], None]]:
        spectra = {name: r["spectra"] for name, r in store.part(self.name).items() if "spectra" in r}
        return {"gear-residual": partial(_draw, spectra)} if spectra else {}


@torch.no_grad()
def _states(study: StudyContext) -> States:
    """The cache of one sequence of the report split: of what each layer holds, the first tokens that make groups.

    Raises:
        UsageError: a layer holds less than a group.
    """
    study.check_in_memory()
    cache = DynamicCache(config=study.network.config)
    with study.network.uncompressed() as model:
        ids = study.data.report[:1].to(study.network.device)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    layers: list[Any] = list(cache.layers)
    least = min(layer.keys.shape[2] for layer in layers)
    if least < GROUP:
        raise UsageError(
            f"--parts gear: a layer holds {least} tokens of a sequence, expected at least a group of {GROUP}.",
            f"Give longer sequences: --set evaluation.seq_len={8 * GROUP}.",
        )
    counts = [layer.keys.shape[2] // GROUP * GROUP for layer in layers]
    return [
        (layer.keys[:, :, :count].float().cpu(), layer.values[:, :, :count].float().cpu())
        for layer, count in zip(layers, counts, strict=True)
    ]


def _cache(policy: Quantiser, states: States) -> Record:
    """Errors of keys and of values, and bytes of each part over those of a 16-bit cache."""
    streams = policy.streams()
    errors = [_error([(pair[side], _coded(streams[side], pair[side])[1]) for pair in states]) for side in (0, 1)]
    parts = dict.fromkeys(PARTS, 0.0)
    for cuts in range(CUTS):
        end = -(GROUP * cuts // CUTS) or None
        cut = [(keys[:, :, :end], values[:, :, :end]) for keys, values in states]
        whole = sum(_bytes_16(numbers) for pair in cut for numbers in pair)
        for pair in cut:
            for stream, numbers in zip(streams, pair, strict=True):
                for name, size in _stored(stream, numbers.half()).items():
                    parts[name] += size / whole / CUTS
    return {"errors": errors, "parts": parts, "tokens": max(keys.shape[2] for keys, _ in states)}


def _stored(stream: Stream, numbers: Tensor) -> dict[str, int]:
    """Bytes by part of one side of a sequence: a prompt, then the tokens behind it."""
    side, prompt = Side(stream, numbers), round(PROMPT_SHARE * numbers.shape[2])
    side.update(numbers[:, :, :prompt])
    side.update(numbers[:, :, prompt:])
    sizes = dict.fromkeys(PARTS, 0)
    sizes["waiting"] = tensor_bytes([side.first, side.waiting])
    for segment in side.segments:
        for name, part in zip(PART_OF, segment, strict=False):
            sizes[name] += tensor_bytes(part)
    return sizes


def _coded(stream: Stream, numbers: Tensor) -> tuple[int, Tensor]:
    """Bytes of numbers that are coded as one prompt, and the numbers as they are read then."""
    parts = (stream.prompt_codec or stream.codec).encode(numbers)
    return tensor_bytes(parts), stream.codec.decode(parts, numbers.shape[1], numbers.shape[3])


def _error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Norm of the differences over the norm of the first of each pair, of all pairs together."""
    lost = sum(float((exact - read).double().square().sum()) for exact, read in pairs)
    return float((lost / sum(float(exact.double().square().sum()) for exact, _ in pairs)) ** 0.5)


def _single(states: States) -> Record:
    """Size over that of 16 bits and least error of the first layer's values, for each of SINGLE_BITS, by technique:
    codes; singular vectors, and the largest numbers with indices of 16 bits, both at the size of the codes; GEAR."""
    values = states[0][1]
    together = heads_together(values)[0, 0].double()
    singular = torch.linalg.svdvals(together).square()
    largest = together.flatten().square().sort(descending=True).values
    found: dict[str, list[tuple[float, float]]] = {"codes": [], "low rank": [], "outliers": [], "GEAR": []}
    for bits in SINGLE_BITS:
        size, read = _coded(KCVT(bits).streams()[1], values)
        rank, count = int(size / 2 / sum(together.shape)), int(size / 4)
        share = size / _bytes_16(values)
        found["codes"].append((share, _error([(values, read)])))
        found["low rank"].append((share, _without(singular, rank)))
        found["outliers"].append((share, _without(largest, count)))
        size, read = _coded(GEAR(bits).streams()[1], values)
        found["GEAR"].append((size / _bytes_16(values), _error([(values, read)])))
    return found


def _without(squares: Tensor, kept: int) -> float:
    """Error where all but the first of these squares are lost."""
    return float((squares[kept:].sum() / squares.sum()) ** 0.5)


def _at(size: float, error: float) -> str:
    return f"{error:.3f} at {100 * size:.0f} %"


def _spectra(bits: int, states: States) -> Record:
    """Singular values of each head's residual over the largest, in the mean over heads and layers, of both sides."""
    streams = GEAR(bits, rank=0, new_rank=0).streams()
    spectra = {}
    for side, name in enumerate(("keys", "values")):
        residuals = [pair[side] - _coded(streams[side], pair[side])[1] for pair in states]
        of_layers = [torch.linalg.svdvals(residual[0].double()) for residual in residuals]
        fewest = min(values.shape[1] for values in of_layers)  # a layer with a window may hold fewer tokens
        values = torch.cat([values[:, :fewest] for values in of_layers])
        spectra[name] = (values / values[:, :1].clamp(min=1e-30)).mean(0).tolist()
    return {"spectra": spectra}


def _bytes_16(numbers: Tensor) -> int:
    return 2 * numbers.numel()


def _percents(parts: dict[str, float]) -> list[str]:
    return [number(100 * share, 1) for share in (*(parts[name] for name in PARTS), sum(parts.values()))]


def _draw(spectra: dict[str, dict[str, list[float]]], figure: Figure) -> None:
    figure.suptitle("singular values of what codes and outliers leave, over the largest")
    axes = figure.subplots()
    lines = {f"{name}: {side}": values for name, sides in spectra.items() for side, values in sides.items()}
    for index, (label, values) in enumerate(lines.items()):
        draw_line(axes, index, list(enumerate(values, 1)), label, markersize=2)
    axes.set(xlabel="singular value", ylabel="over the largest")
    axes.legend(fontsize=8)

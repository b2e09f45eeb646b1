"""The part `fdc`: times of requests, predicted (FDC figures 9 to 13 and table 12 in shape).

A request is a prompt and then steps. A prompt takes its products at the device's rate, a step what `decode_seconds`
says, and everything outside attention takes the products and the bytes of its weights. Nothing is measured.

    rotor study MODEL --recipes fdc,palu --parts artifacts/studies/parts/fdc.py:Fdc -o STUDY
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from prompt_flops import bases_flops, layer_flops, uncompressed_layer_flops

from rotor.calibration.allocation.plan import Plan
from rotor.calibration.prediction.cost import DecodeStep, decode_seconds, uncompressed_decode_seconds
from rotor.calibration.prediction.devices import Device, find_device
from rotor.checkpoint.families import attention_shape
from rotor.checkpoint.folding import model_layouts
from rotor.checkpoint.layout import AttentionShape, GroupLayout, LayerLayout, ordered_by_class
from rotor.checkpoint.rows import NumberRow
from rotor.checkpoint.sizes import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from rotor.checkpoint.tensors import BASES, layer_tensors
from rotor.errors import AccuracyError, UsageError
from rotor.recipe.recipe import Recipe
from rotor.search.plan_choice import find_plan
from rotor.search.plan_evaluator import PlanEvaluator
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Part, Table, Task
from rotor.tools.study.store import Record, StudyStore

AT = 0.5
"""Share of the cache that a recipe removes; FDC's tables 7 to 11 have 0.53 to 0.67."""

ACCURACY = 0.99
"""Share of the accuracy that recipes keep where they are compared at an equal one (FDC section 6.6)."""

AT_ACCURACY = f", accuracy {ACCURACY:g}"
"""End of the names of those records."""

GPU_BYTES = 80 << 30
"""Memory of the paper's A100s."""

SHAPE_8B = AttentionShape(32, 32, 8, 128, 4096, rotary_dim=128)
WEIGHTS_8B = 8_030_261_248
"""Llama 3.1 8B: its attention, and the number of its weights."""

Lengths = tuple[int, int, int]
TRACES: dict[str, tuple[Lengths, Lengths]] = {
    "arXiv": ((6_300, 1_600, 14_100), (243, 29, 464)),
    "Cocktail": ((49_700, 9_400, 104_900), (159, 44, 246)),
    "HumanEval": ((204, 75, 697), (139, 11, 552)),
    "PG-19": ((277, 138, 419), (61_500, 24_300, 97_500)),
}
"""Tokens of prompts and of answers, each in the mean, at least and at most (FDC table 6)."""

LOADS = (0.25, 0.5, 0.75, 0.9)
"""Rates of requests over the most that the uncompressed model serves, at which latency is predicted."""


@dataclass(frozen=True)
class Server:
    """Predicted times of one GPU that serves a model. layouts: of its layers; none of the uncompressed model.

    other_weights: outside attention's projections, all read in a step and multiplied with each token of a prompt.
    """

    shape: AttentionShape
    layouts: Sequence[LayerLayout]
    other_weights: int
    element_bytes: int
    device: Device
    flops_per_s: float

    def prompt_s(self, tokens: int) -> float:
        """Time to the first token."""
        own = [layer_flops(layout, self.shape.layer(n), tokens) for n, layout in enumerate(self.layouts)]
        whole = [count * uncompressed_layer_flops(layer, tokens) for layer, count in self.shape.sizes.items()]
        flops = sum(own or whole)
        return (flops + 2 * tokens * self.other_weights) / self.flops_per_s

    def step_s(self, tokens: int, batch: float) -> float:
        """Time between tokens, of sequences of so many."""
        empty, one = (self._attention_s(DecodeStep(tokens, n, self.element_bytes)) for n in (0, 1))
        return empty + batch * (one - empty) + self.device.read_seconds(self.element_bytes * self.other_weights)

    def _attention_s(self, step: DecodeStep) -> float:
        if self.layouts:
            return decode_seconds(self.layouts, self.shape, self.device, step)
        return uncompressed_decode_seconds(self.shape, self.device, step)

    def bases_s(self, prompt: int, steps: int) -> float:
        """The part of a request's time that compressing on line costs, by the bases."""
        layers = [(layout, self.shape.layer(n)) for n, layout in enumerate(self.layouts)]
        flops = sum(bases_flops(layout, shape, prompt) for layout, shape in layers)
        tensors = (layer_tensors(layout, shape, ()) for layout, shape in layers)
        read = sum(prod(spec.shape) for layer in tensors for name, spec in layer.items() if name in BASES)
        return flops / self.flops_per_s + steps * self.device.read_seconds(self.element_bytes * read)

    def fits(self, tokens: int) -> float:
        """Sequences of so many tokens that fit beside the weights."""
        if self.layouts:
            size = kv_bytes_per_token(self.layouts, self.element_bytes)
        else:
            size = uncompressed_kv_bytes_per_token(self.shape, self.element_bytes)
        weights = self.other_weights + projection_elements(self.shape)
        return (GPU_BYTES - self.element_bytes * weights) / (tokens * size)

    def most_per_s(self, prompt: int, steps: int) -> float:
        """Requests a second that keep a full batch busy: each has its prompt, and its share of the steps."""
        batch = self.fits(prompt + steps)
        return 1 / (self.prompt_s(prompt) + steps * self.step_s(prompt + steps // 2, batch) / batch)

    def latency_s(self, prompt: int, steps: int, per_s: float) -> float | None:
        """Seconds of a request over its tokens at a rate of requests; None beyond what is served.

        In the mean as many are decoded as arrive while one is (Little's law), and prompts take their share of the time.
        """
        if per_s >= self.most_per_s(prompt, steps):
            return None
        tokens, left = prompt + steps // 2, 1 - per_s * self.prompt_s(prompt)
        fixed = self.step_s(tokens, 0)
        each = self.step_s(tokens, 1) - fixed
        batch = per_s * steps * fixed / (left - per_s * steps * each)
        return (self.step_s(tokens, batch) + self.prompt_s(prompt) / steps) / left


class Fdc(Part):
    name = "fdc"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, recipe in study.inputs.recipes.items():
            yield Task(f"{self.name}/{name}", partial(_measure, study, name, recipe))
            yield Task(f"{self.name}/{name}{AT_ACCURACY}", partial(_measure_at_accuracy, study, name, recipe))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        yield from self._tables_at_removal(store)
        records = store.part(self.name)
        found = {name.removesuffix(AT_ACCURACY): of for name, of in records.items() if name.endswith(AT_ACCURACY)}
        if found:
            header = ["recipe", "removed", "model", *(f"{trace}: TTFT, TBT" for trace in TRACES)]
            text = (
                f"Figures 9, 10, 12 and 13 as the papers compare: each recipe removes what keeps {ACCURACY:g} of the "
                "accuracy (the study's metric, on its search split). Over the uncompressed model's times, predicted."
            )
            rows = [row for name, record in found.items() for row in _accuracy_rows(name, record)]
            yield Table(header, rows, "Times of requests at an equal accuracy, predicted (FDC figures 12 and 13)", text)

    def _tables_at_removal(self, store: StudyStore) -> Iterator[Table]:
        rows, latencies = [], []
        for recipe, record in store.part(self.name).items():
            if recipe.endswith(AT_ACCURACY):
                continue
            for model, traces in record["times"].items():
                for trace, of in traces.items():
                    ratios = (of[key] for key in ("prompt", "step", "most"))
                    name = [f"`{recipe}`, {model}", trace]
                    rows.append([*name, *(f"{ratio:.3f}" for ratio in ratios), f"{100 * of['bases']:.2f} %"])
                    cells = ("saturated" if value is None else f"{value:.2f}" for value in of["latency"])
                    latencies.append([*name, *cells])
        if rows:
            header = ["recipe, model", "requests", "TTFT", "TBT", "most requests a second", "compressing, of JCT"]
            text = (
                f"Over the uncompressed model's, at {AT:g} removed, of requests with the mean lengths of FDC's table "
                "6: times of a prompt and of a step (figures 9 and 10), and the most that is served (figure 11), in a "
                "batch that fits into 80 GB. The last column is "
                "table 12: the largest of its mean, shortest and longest lengths in place of the 99th percentile. "
                "`like an 8B`: Llama 3.1 8B, whose heads keep the shares of these."
            )
            yield Table(header, rows, "Times of requests, predicted (FDC figures 9 to 11, table 12)", text)
            text = (
                "Figure 11: latency of a token over the idle uncompressed model's, at rates of requests over the most "
                "that the uncompressed model serves."
            )
            yield Table(["recipe, model", "requests", *(f"{load:g}" for load in LOADS)], latencies, text=text)


def _measure(study: StudyContext, name: str, recipe: Recipe) -> Record:
    evaluator, path = study.path(name, recipe)
    plan = path.at_compression(AT)
    if plan is None:
        raise UsageError(f"{name} cannot remove {AT:g} of the rows.", "Leave this recipe out of the part fdc.")
    return _record(study, evaluator, recipe, plan)


def _measure_at_accuracy(study: StudyContext, name: str, recipe: Recipe) -> Record:
    """The same of the plan that keeps ACCURACY, or why there is none."""
    evaluator, path = study.path(name, recipe)
    try:
        plan = find_plan(path, recipe.search, ACCURACY, evaluator.search)
    except AccuracyError as error:
        return {"out_of_reach": error.message}
    return {**_record(study, evaluator, recipe, plan), "planned": plan.planned}


def _accuracy_rows(name: str, record: Record) -> Iterator[list[str]]:
    if "times" not in record:
        yield [f"`{name}`", "out of reach", *[""] * (1 + len(TRACES))]
        return
    for model, traces in record["times"].items():
        cells = (f"{of['prompt']:.3f}, {of['step']:.3f}" for of in traces.values())
        yield [f"`{name}`", f"{record['stored']:.3f}", model, *cells]


def _record(study: StudyContext, evaluator: PlanEvaluator, recipe: Recipe, plan: Plan) -> Record:
    """Share that a plan removes, and predicted times of this model and of an 8B by it."""
    device = find_device(recipe.objective.device)
    if device.matmul_flops_per_s is None:
        raise UsageError(
            f"device {recipe.objective.device}: its rate of products is not known.", "Name another objective.device."
        )
    shape, element_bytes = attention_shape(study.checkpoint.config), study.cache_dtype.itemsize
    layouts = model_layouts(evaluator.run.bases(plan.channels), plan.ranks, recipe.exact.tokens)
    weights = sum((study.checkpoint.folder / file).stat().st_size for file in study.checkpoint.files) // element_bytes
    served = {"this model": (shape, layouts, weights, element_bytes)}
    if not layouts[0].coded:
        served["like an 8B"] = (SHAPE_8B, like_8b(layouts, shape), WEIGHTS_8B, 2)
    times = {}
    for model, (of, own, count, size) in served.items():
        rates = (count - projection_elements(of), size, device, device.matmul_flops_per_s)
        times[model] = _times(Server(of, own, *rates), Server(of, (), *rates))
    return {"stored": plan.stored, "times": times}


def _times(server: Server, base: Server) -> dict[str, Record]:
    """Predicted times of requests with the lengths of each of TRACES, over those of the uncompressed model."""
    found = {}
    for trace, (prompts, answers) in TRACES.items():
        prompt, steps = prompts[0], answers[0]
        tokens, batch = prompt + steps // 2, base.fits(prompt + steps)
        most = base.most_per_s(prompt, steps)
        idle = base.step_s(tokens, 0) + base.prompt_s(prompt) / steps
        latencies = (server.latency_s(prompt, steps, load * most) for load in LOADS)
        found[trace] = {
            "prompt": server.prompt_s(prompt) / base.prompt_s(prompt),
            "step": server.step_s(tokens, batch) / base.step_s(tokens, batch),
            "most": server.most_per_s(prompt, steps) / most,
            "bases": max(
                server.bases_s(n, m) / (server.prompt_s(n) + m * server.step_s(n + m // 2, 1))
                for n, m in zip(prompts, answers, strict=True)
            ),
            "latency": [None if value is None else value / idle for value in latencies],
        }
    return found


def projection_elements(shape: AttentionShape) -> int:
    """Weights of the projections of all layers."""
    return sum(count * layer.projection_elements for layer, count in shape.sizes.items())


def like_8b(layouts: Sequence[LayerLayout], shape: AttentionShape) -> list[LayerLayout]:
    """Layers of an 8B, of which each KV head keeps the shares of its channels that the groups of these layers keep of
    theirs, one after another; numbers, keys before or after RoPE as in these."""
    layers = [(layout, shape.layer(n).head_dim * layout.group_size) for n, layout in enumerate(layouts)]
    groups = [(group, columns) for layout, columns in layers for group in layout.groups]
    form = layouts[0].form
    found = []
    for layer in range(SHAPE_8B.num_layers):
        own = []
        for head in range(SHAPE_8B.num_kv_heads):
            group, columns = groups[(layer * SHAPE_8B.num_kv_heads + head) % len(groups)]
            ranks = [max(1, round(SHAPE_8B.head_dim * side.rank / columns)) for side in (group.key, group.values)]
            own.append(GroupLayout((head,), *map(NumberRow, ranks)))
        found.append(ordered_by_class(own, form))
    return found

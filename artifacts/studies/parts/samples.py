"""The part `samples` of a study: how many tokens of text, look-ups and copies a search needs, by simulated searches.

A few plans are measured once, by much text and many prompts. Searches are then simulated: each draws its sample of
what was measured, with replacement, searches as `rotor export --accuracy` does, and what it ends at is judged by all
that was measured. Between these plans each score is taken to follow the logarithm of the predicted loss.

rotor study MODEL --recipes rotor --parts artifacts/studies/parts/samples.py:Samples --bytes 4600,4000,3500,3000,2500
    --quick --set evaluation.search_tokens=16384 --set evaluation.lookup_prompts=48 --set evaluation.copy_prompts=96
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial

import numpy as np

from rotor.models.compressible import CompressibleModel
from rotor.search.evaluation.accuracy import Fidelity
from rotor.search.evaluation.measurement import Measurement, smallest, sums_of_runs
from rotor.search.evaluation.prompts import PROMPTS, make_prompts
from rotor.search.evaluation.scoring import answer_scores, score
from rotor.search.plan_choice import by_expected_loss
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import CsvRow, Part, Table, Task, number
from rotor.tools.study.store import StudyStore

SHARES = (0.24, 0.2, 0.16, 0.13, 0.1)
"""Shares of the uncompressed bytes that are measured where no list of bytes is given."""

SOURCE = "uncompressed"

TARGET = 0.99

SAMPLES = (
    (4096, 12, 12, 0.01),
    (4096, 12, 24, 0.01),
    (4096, 12, 32, 0.01),
    (4096, 24, 12, 0.01),
    (4096, 24, 24, 0.01),
    (8192, 12, 12, 0.01),
    (8192, 24, 32, 0.01),
    (8192, 24, 64, 0.01),
    (4096, 12, 12, 0.005),
    (8192, 24, 32, 0.005),
)
"""Tokens of text, look-ups, copies, and the resolution of a search."""

DRAWS = 200
"""Searches that are simulated for each."""

STEPS = 60
"""Plans of a simulated path."""


@dataclass(frozen=True)
class SampleScores:
    """Scores of a model, each a list over runs of text or over prompts.

    stored: share of the cache that is removed. loss: predicted, in nats a token. nll: negative log-likelihoods of a
    run's tokens in nats, summed. correct: of a run's tokens, how many were predicted right. lookup, copy: sums of the
    probabilities of a prompt's right answers.
    """

    stored: float
    loss: float
    tokens: int
    nll: list[float]
    correct: list[float]
    lookup: list[float]
    copy: list[float]


class Samples(Part):
    name = "samples"
    csv = "samples.csv"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        yield Task(f"{self.name}/{SOURCE}", partial(_of_source, study))
        for name in study.inputs.recipes:
            for size in study.inputs.sizes or [round(share * study.mean_bytes) for share in SHARES]:
                yield Task(f"{self.name}/{name}, {size} bytes", partial(_of_recipe, study, name, size))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        if rows := list(self.rows(store)):
            text = (
                f"{DRAWS} simulated searches for {TARGET}. `below`: share of them that end at a plan which keeps less, "
                "by all that was measured; `far below`: less than "
                f"{_far_below()}. `none`: share that find no plan."
            )
            yield Table(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows], "Samples", text)

    def rows(self, store: StudyStore) -> Iterable[CsvRow]:
        records = {
            key.partition("/")[2]: SampleScores(**record)
            for key, record in store.records.items()
            if key.startswith(f"{self.name}/")
        }
        source = records.pop(SOURCE, None)
        if source is None or len(records) < 2:
            return
        path = SimulatedPath(source, sorted(records.values(), key=lambda one: one.loss))
        yield from (path.simulate(*sample) for sample in SAMPLES)


def _far_below() -> float:
    return round(TARGET - (1 - TARGET) / 2, 4)


def _of_source(study: StudyContext) -> dict[str, object]:
    study.network.restore()
    return asdict(_scores(study, study.network, 0.0, 0.0))


def _of_recipe(study: StudyContext, name: str, size: int) -> dict[str, object]:
    evaluator, plan = study.plan_of(name, size)
    assert not isinstance(plan, str), plan
    assert plan.loss is not None
    evaluator.compress(plan)
    return asdict(_scores(study, evaluator.network, plan.stored, plan.loss))


def _scores(study: StudyContext, network: CompressibleModel, stored: float, loss: float) -> SampleScores:
    """Score the text and the prompts of the search split."""
    context = study.evaluation_context
    rows = context.rows["search"]
    prompts = {name: make_prompts(name, context, "search") for name in PROMPTS}
    parts = [rows, *(one.rows for one in prompts.values())]
    with study.progress.task("measure", sum(part.numel() for part in parts), "tokens") as advance, network.decoding():
        states, *answer_states = network.final_states_of(parts, advance)
    text = score(network, rows, states=states)
    answers = {
        name: answer_scores(network, one.rows, one.answers, its_states).probability.tolist()
        for (name, one), its_states in zip(prompts.items(), answer_states, strict=True)
    }
    return SampleScores(
        stored,
        loss,
        text.nll.numel(),
        sums_of_runs(text.nll.numpy()).tolist(),
        sums_of_runs(text.correct.double().numpy()).tolist(),
        **answers,
    )


class SimulatedPath:
    """Plans between those that were measured, whose scores are known."""

    def __init__(self, source: SampleScores, measured: list[SampleScores]) -> None:
        self.source, self.measured = source, measured

    @dataclass(frozen=True)
    class Step:
        """A plan of the path, as `by_expected_loss` takes it."""

        stored: float
        loss: float

    @cached_property
    def steps(self) -> list[Step]:
        logs = np.log([one.loss for one in self.measured])
        stored = [one.stored for one in self.measured]
        return [
            self.Step(float(np.interp(at, logs, stored)), float(np.exp(at)))
            for at in np.linspace(logs[0], logs[-1], STEPS)
        ]

    @cached_property
    def run_tokens(self) -> float:
        """Tokens of a run of text."""
        return self.source.tokens / len(self.source.nll)

    @property
    def pool(self) -> tuple[int, int, int]:
        """Runs of text, look-ups and copies that were measured."""
        return len(self.source.nll), len(self.source.lookup), len(self.source.copy)

    @cached_property
    def scores(self) -> dict[str, np.ndarray]:
        """By field the scores of each step, [steps, runs or prompts]."""
        logs, wanted = np.log([one.loss for one in self.measured]), np.log([step.loss for step in self.steps])

        def between(field: str) -> np.ndarray:
            columns = np.array([getattr(one, field) for one in self.measured]).T
            return np.array([np.interp(wanted, logs, column) for column in columns]).T

        return {field: between(field) for field in ("nll", "correct", "lookup", "copy")}

    def measurement(self, step: int, text: np.ndarray, lookup: np.ndarray, copy: np.ndarray) -> Measurement:
        """Accuracy of a step by some runs of text and prompts, by their indices."""
        tokens = self.run_tokens * len(text)

        def ratio(field: str, items: np.ndarray) -> Measurement:
            before, after = np.array(getattr(self.source, field))[items], self.scores[field][step][items]
            if field == "nll":
                return Measurement.bootstrap(lambda a, b: np.exp((a - b) / tokens), before, after)
            return Measurement.bootstrap(lambda a, b: b / np.maximum(a, 1e-9), before, after)

        fields = {"nll": text, "correct": text, "lookup": lookup, "copy": copy}
        return smallest([ratio(field, items) for field, items in fields.items()])

    def simulate(self, tokens: int, lookups: int, copies: int, resolution: float, draws: int = DRAWS) -> CsvRow:
        """Search with samples of these sizes, and say what is removed and how often the target is missed."""
        draw = np.random.default_rng(0)
        everything = [np.arange(size) for size in self.pool]
        kept = [self.measurement(step, *everything).value for step in range(STEPS)]
        wanted = (round(tokens / self.run_tokens), lookups, copies)
        ends, points = [], []
        for _ in range(draws):
            drawn = [draw.integers(size, size=count) for size, count in zip(self.pool, wanted, strict=True)]
            asked: list[SimulatedPath.Step] = []

            def measure(
                step: SimulatedPath.Step, drawn: list[np.ndarray] = drawn, asked: list[SimulatedPath.Step] = asked
            ) -> Fidelity:
                asked.append(step)
                measured = self.measurement(self.steps.index(step), *drawn)
                return Fidelity(measured.value, measured.interval, {})

            end = by_expected_loss(self.steps, resolution, TARGET, measure)  # type: ignore[arg-type]
            points.append(len(asked))
            if end is not None:
                ends.append(self.steps.index(end))  # type: ignore[arg-type]
        removed, true = [self.steps[end].stored for end in ends], np.array([kept[end] for end in ends])
        return {
            "text, tokens": tokens,
            "look-ups": lookups,
            "copies": copies,
            "resolution": resolution,
            "removed, mean": number(float(np.mean(removed)), 3),
            "removed, 5 % to 95 %": " to ".join(number(float(q), 3) for q in np.quantile(removed, [0.05, 0.95])),
            "kept, mean": number(float(true.mean())),
            "below": number(float((true < TARGET).mean()), 2),
            "far below": number(float((true < _far_below()).mean()), 2),
            "none": number(1 - len(ends) / draws, 2),
            "points": number(float(np.mean(points)), 1),
        }

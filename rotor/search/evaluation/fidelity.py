"""The fidelity of a model to the uncompressed one: every ratio on a split, from one pass through the layers.

Search, study and validate measure with the same `FidelityMeter`. On the search split it measures what the recipe's
metric needs, on the report split everything, or everything of text where the metric is of text alone. Of several texts
the smallest ratio counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from ...errors import DataError
from ...models.layerwise import LayerwiseModel
from ...progress import Progress
from ...recipe.metric_registry import METRICS, metric_info, primitive_metrics, report_metrics
from .accuracy import Accuracy, BaseValues, Fidelity
from .cached import (
    check_in_memory,
    check_steps_in_memory,
    constant_rope_tokens,
    final_states_through_cache,
    prefill_of,
)
from .measurement import Measurement, measure_text, smallest
from .prompts import PROMPTS, EvaluationContext, Prompts, make_prompts
from .scoring import AnswerScores, Scores, answer_scores, score

if TYPE_CHECKING:
    from ...policies import Policy

TEXT = METRICS["text"].parts
LEAST_BASE = 0.3
"""Least mean probability of the right answers: below it the uncompressed model cannot do the task, and a ratio to it
means nothing."""

AT_CHANCE = 0.9
"""Share of the vocabulary's size from which on a perplexity is that of guessing."""

FIRST_POSITIONS = 512
"""End of the first range of positions that are reported apart; each next one ends at twice that."""

PROMPT_SHARE = 0.25
"""Share of a row of text that is the prompt where a cache has a policy; the rest is scored behind it."""

Read = Callable[..., Tensor]
"""Final hidden states of `rows` behind a prompt of `prefill` tokens; `advance` gets the tokens that are done."""


class FidelityMeter:
    """Measures models against the uncompressed one, which has to be measured first, on each split by itself.

    Args:
        policy: by which a compressed model's cache is kept. Text is then scored behind a prompt, of both models, and
            prompts of metrics behind all that comes before the first answer.
        prompt_share: of each row of text, where it is read through a cache. report: names of the metrics that are
            measured on the report split, by default see `report_metrics`.

    base: what was recorded of the uncompressed model, by split. left_out: why a ratio was not measured, by split and
    name. What the search split left out, measured or known from before, is left out on the report split too, and what
    it measured is measured there, so that a target counts the same ratios in both.
    """

    def __init__(
        self,
        context: EvaluationContext,
        progress: Progress,
        policy: Policy | None = None,
        *,
        prompt_share: float | None = None,
        report: Sequence[str] | None = None,
    ) -> None:
        self.context = context
        self.progress = progress
        self.policy = policy
        self.prompt_share = (PROMPT_SHARE if policy else 0.0) if prompt_share is None else prompt_share
        self.metric = context.spec.metric
        needed = primitive_metrics(self.metric)
        self._names = {
            "search": tuple(dict.fromkeys([*needed, *TEXT])),
            "report": tuple(report or report_metrics(self.metric)),
        }
        self._prompts: dict[str, dict[str, Prompts]] = {}
        self._text: dict[str, Scores] = {}
        self._answers: dict[str, dict[str, AnswerScores]] = {}
        self._references: dict[str, Tensor] = {}
        self.base: dict[str, BaseValues] = {}
        self.left_out: dict[str, dict[str, str]] = {}
        self._warned: set[str] = set()

    def measure_base(self, network: LayerwiseModel, split: str) -> None:
        """Run the uncompressed model.

        Raises:
            DataError: the recipe's metric, where it is not the smallest of several, cannot be measured on this model.
        """
        decided = self.left_out.get("search") if split == "report" else None
        self.left_out[split] = {}
        self._prompts[split] = {}
        for name in PROMPTS:
            if name in self._names[split]:
                try:
                    if decided and name in decided:
                        raise DataError(decided[name])
                    self._prompts[split][name] = make_prompts(name, self.context, split)
                except DataError as error:
                    self._leave_out(name, split, error)
        text, states, answers = self._run(network, split, None, None)
        recorded: BaseValues = {**text.as_dict()}
        for name, base in answers.items():
            filler_tokens = self._prompts[split][name].filler_tokens
            searched = decided is not None and name in self._names["search"]
            if searched or base.mean_probability >= LEAST_BASE:
                recorded |= {name: round(base.mean_probability, 6), f"{name}_filler_tokens": filler_tokens}
                continue
            missing = DataError(
                f"{name}: the uncompressed model gives the right answers a mean probability of "
                f"{base.mean_probability:.3f} over {filler_tokens} tokens of other text ({split} split), expected at "
                f"least {LEAST_BASE}.",
                "This model cannot do the task; choose another metric, or a smaller evaluation.filler_tokens.",
            )
            self._leave_out(name, split, missing)
            del self._prompts[split][name]
        self._text[split], self._answers[split] = text, answers
        if "kl_div" in self._names[split]:
            self._references[split] = states
        vocab_size = int(self.context.config.get_text_config().vocab_size)
        if recorded["perplexity"] >= AT_CHANCE * vocab_size:
            recorded["at_chance"] = True
            self._warn(
                "chance",
                f"the uncompressed model is at chance on this text: perplexity {recorded['perplexity']:.0f}, where "
                f"guessing among the {vocab_size} tokens has {vocab_size}; ratios to it mean nothing. Is it trained "
                "for such text?",
            )
        self.base[split] = recorded

    def measured(self, split: str) -> list[str]:
        """Names of the metrics that are measured directly on a split, not as the smallest of others."""
        return [name for name in self._names[split] if name not in self.left_out[split]]

    def text(self, split: str) -> Tensor:
        """The text that is scored, [rows, seq_len]: with a policy, what is behind the prefill."""
        return self.context.rows[split][:, self._prefill(split) :]

    def _prefill(self, split: str) -> int:
        """Tokens of the prompt; 0 where rows are read whole."""
        length = self.context.rows[split].shape[1]
        return max(1, min(int(length * self.prompt_share), length - 2)) if self.prompt_share else 0

    def fitted_policy(self, network: LayerwiseModel) -> Policy | None:
        """The policy, fitted to the network on the search split where it needs samples.

        Raises:
            UsageError: weights are read layer by layer.
        """
        if self.policy is None or not self.policy.needs_samples:
            return self.policy
        from ...policies.fitting import fit_cache_policy

        check_in_memory(network, self.policy)
        return fit_cache_policy(network.model, self.policy, self.context.rows["search"])

    def measure(self, network: LayerwiseModel, split: str, read: Read | None = None) -> Fidelity:
        """Run a compressed model over a split's text and prompts, and compare it with the uncompressed one.

        Args:
            read: how rows are read; by default through a cache of the policy, or without one whole, each token as
                decoding has it; token by token where RoPE's frequencies change within a row.
        """
        if read is None and self.policy is not None:
            read = partial(final_states_through_cache, network, policy=self.fitted_policy(network))
        text, _, answers = self._run(network, split, self._references.get(split), read)

        def measure(name: str) -> Measurement:
            if name not in PROMPTS:
                return self._measure_text(name, split, text)
            before, after = self._answers[split][name], answers[name]
            absolute = {f"compressed_{name}": round(after.mean_probability, 6)}
            return Measurement.bootstrap(lambda a, b: b / a, before.probability, after.probability, **absolute)

        measured = {name: measure(name) for name in self.measured(split)}
        values: dict[str, float | None] = {}
        for name, one in measured.items():
            values |= {metric_info(name).accuracy_field: one.value, **one.fields}
        for name, info in METRICS.items():
            parts = self._parts(name, measured)
            if parts and set(info.parts) <= {*measured, *self.left_out[split]}:
                values[name] = smallest(parts).value
        of_text = [measured[name] for name in TEXT if name in measured]
        result = (
            measured[self.metric]
            if self.metric in measured
            else smallest(self._parts(self.metric, measured) or of_text)
        )
        values |= {f"compressed_{name}": value for name, value in text.as_dict().items()}
        return Fidelity(result.value, result.interval, values, **self._parts_of_text(split, text))

    def _measure_text(self, name: str, split: str, text: Scores) -> Measurement:
        """A metric of text; of several texts the smallest, with what is recorded beside it over all of them."""
        whole = measure_text(name, self._text[split], text)
        kinds = self._rows_of_kinds(split)
        if not kinds:
            return whole
        parts = [measure_text(name, self._text[split].part(rows), text.part(rows)) for rows in kinds.values()]
        return replace(smallest(parts), fields=whole.fields)

    def _rows_of_kinds(self, split: str) -> dict[str, list[int]]:
        """The rows of each of several texts, by its name."""
        rows: dict[str, list[int]] = {}
        for row, kind in enumerate(self.context.kinds.get(split, ())):
            rows.setdefault(kind, []).append(row)
        return rows

    def _parts_of_text(self, split: str, text: Scores) -> dict[str, dict[str, dict[str, float]]]:
        """Measurements of each of several texts, and in each range of positions, by the names of metrics."""
        names = [name for name in self.measured(split) if name not in PROMPTS]
        whole, start = self._text[split], self._prefill(split)

        def measure(rows: slice | list[int], columns: slice) -> dict[str, float]:
            before, after = whole.part(rows, columns), text.part(rows, columns)
            ratios = {name: measure_text(name, before, after) for name in names}
            return {metric_info(name).accuracy_field: one.value for name, one in ratios.items()} | {
                field: value for one in ratios.values() for field, value in one.fields.items() if field in METRICS
            }

        length = start + text.nll.shape[1] + 1
        edges = [0, *(FIRST_POSITIONS << shift for shift in range(32) if FIRST_POSITIONS << shift < length), length]
        ranges = [(max(low, start), high) for low, high in pairwise(edges) if high - max(low, start) > 1]
        by_position = {f"{low}-{high}": slice(low - start, high - start) for low, high in ranges}
        return {
            "kinds": {kind: measure(rows, slice(None)) for kind, rows in self._rows_of_kinds(split).items()},
            "positions": {name: measure(slice(None), columns) for name, columns in by_position.items()}
            if len(by_position) > 1 and split == "report"
            else {},
        }

    def accuracy(self, measured: Mapping[str, Fidelity], target: float | None, data: str) -> Accuracy:
        """Measurements of a model, beside what was recorded of the uncompressed one.

        Args:
            data: the held-out text in words.
        """
        return Accuracy(self.metric, target, measured, self.base, self.left_out, data)

    def _parts(self, name: str, measured: dict[str, Measurement]) -> list[Measurement]:
        return [measured[part] for part in metric_info(name).parts if part in measured]

    def _leave_out(self, name: str, split: str, error: DataError) -> None:
        """Leave out one ratio of several, and say so once; raise the error where it is the recipe's metric itself."""
        if name == self.metric:
            raise error
        self.left_out[split][name] = error.message
        if name in primitive_metrics(self.metric):
            self._warn(name, f"accuracy leaves out `{name}`: {error.message}")

    def _warn(self, of: str, text: str) -> None:
        """Say something once."""
        if of not in self._warned:
            self._warned.add(of)
            self.progress.message(text)

    def _token_by_token(self, network: LayerwiseModel, length: int) -> Read | None:
        """Way in which rows are read whose tokens change RoPE's frequencies; None where they do not."""
        most = constant_rope_tokens(self.context.config)
        if most is None or length <= most:
            return None
        check_steps_in_memory(network, length, most)
        return partial(final_states_through_cache, network, step=1)

    def _run(
        self, network: LayerwiseModel, split: str, reference: Tensor | None, read: Read | None
    ) -> tuple[Scores, Tensor, dict[str, AnswerScores]]:
        """Score the text and all prompts in one pass through the layers, or in steps by `read`.

        Returns:
            The scores of the text, its final hidden states, and the scores of answers by metric.
        """
        start, asked = self._prefill(split), self._prompts[split]
        parts = [self.context.rows[split], *(prompts.rows for prompts in asked.values())]
        read = read or self._token_by_token(network, max(part.shape[1] for part in parts))
        with self.progress.task("measure", sum(part.numel() for part in parts), "tokens") as advance:
            if read is None:
                with network.decoding():
                    states, *answer_states = network.final_states_of(parts, advance)
            else:
                prefills = [start, *(prefill_of(prompts.answers) for prompts in asked.values())]
                prefills = prefills if start else [1] * len(parts)  # as decoding has it
                pairs = zip(parts, prefills, strict=True)
                states, *answer_states = (read(rows=rows, prefill=prefill, advance=advance) for rows, prefill in pairs)
        states = states[:, start:]
        text = score(network, self.text(split), reference=reference, states=states)
        scored = zip(asked.items(), answer_states, strict=True)
        return text, states, {n: answer_scores(network, p.rows, p.answers, s) for (n, p), s in scored}

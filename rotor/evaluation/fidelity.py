"""The fidelity of a model to the uncompressed one: every ratio on a split, from one pass through the layers.

Search, study and validate measure with the same `FidelityMeter`. On the search split it measures what the recipe's
metric needs, on the report split everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from ..errors import DataError
from ..models.layerwise import LayerwiseModel
from ..policies import Policy
from ..progress import Progress
from ..recipe.metric_registry import METRICS, metric_info, primitive_metrics
from .cached import check_in_memory, final_states_through_cache
from .fitting import fit_cache_policy
from .metrics import EvaluationContext, Measurement, Metric, Outputs, make_metric, smallest
from .scoring import score

TEXT = METRICS["text"].parts
AT_CHANCE = 0.9
"""A model whose perplexity is at least this share of the vocabulary's size guesses."""

PROMPT_SHARE = 0.25
"""Of a row of text, that is the prompt where a cache has a policy; the rest is scored behind it."""

Read = Callable[..., Tensor]
"""Final hidden states of `rows` behind a prompt of `prefill` tokens; `advance` gets the tokens that are done."""


@dataclass(frozen=True)
class Fidelity:
    """What was measured of a model on one split.

    accuracy: of the recipe's metric; 1 is equal to the uncompressed model, below 1 is worse.
    interval: its 95 % interval, or None where there is none.
    values: each measured ratio under its own name, and what is recorded beside it.
    """

    accuracy: float
    interval: Annotated[tuple[float, float] | None, Field(alias="interval_95")]
    values: dict[str, float | None]

    def to_json(self) -> dict[str, Any]:
        """What pydantic reads."""
        interval = None if self.interval is None else list(self.interval)
        return {"accuracy": self.accuracy, "interval_95": interval, "values": dict(self.values)}

    def against(self, target: float) -> tuple[bool, str]:
        """Whether a target is met, and where it is not, or not by the value itself, what lies below it.

        It is missed where the whole interval lies below it, or, of a metric without an interval, the value.
        """
        if self.accuracy >= target:
            return True, ""
        if self.interval is None:
            return False, "the value is below the target"
        if self.interval[1] >= target:
            return True, "the value is below the target, its 95 % interval is not"
        return False, "the whole 95 % interval is below the target"


class FidelityMeter:
    """Measures models against the uncompressed one, which has to be measured first, on each split by itself.

    Args:
        policy: by which a compressed model's cache is kept. Text is then scored behind a prompt, of both models, and
            prompts of metrics behind all that comes before the first answer.
        prompt_share: of each row of text, where it is read through a cache. report: names of the metrics that are
            measured on the report split, by default all.

    base: what was recorded of the uncompressed model, by split. left_out: why a ratio was not measured, by split and
    name.
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
        self.context, self.progress, self.policy = context, progress, policy
        self.prompt_share = (PROMPT_SHARE if policy else 0.0) if prompt_share is None else prompt_share
        self.metric = context.spec.metric
        own = primitive_metrics(self.metric)
        self._names = {
            "search": tuple(dict.fromkeys([*own, *TEXT])),
            "report": tuple(report or dict.fromkeys([*own, *(n for n, info in METRICS.items() if not info.parts)])),
        }
        self._metrics: dict[str, Metric] = {}
        self._references: dict[str, Tensor] = {}
        self.base: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, dict[str, str]] = {}
        self._warned: set[str] = set()

    def measure_base(self, network: LayerwiseModel, split: str) -> None:
        """Run the uncompressed model.

        Raises:
            DataError: the recipe's metric, where it is not the smallest of several, cannot be measured on this model.
        """
        self.left_out[split] = {}
        rows: dict[str, Tensor | None] = {}
        for name in self._names[split]:
            try:
                rows[name] = self._made(name).rows(split)
            except DataError as error:
                self._leave_out(name, split, error)
        outputs = self._run(network, split, rows, None, None)
        found = outputs.text.as_dict()
        for name in rows:
            try:
                found |= self._made(name).measure_base(outputs, split)
            except DataError as error:
                self._leave_out(name, split, error)
        if any(self._made(name).needs_reference for name in self.measured(split)):
            self._references[split] = outputs.states
        vocab_size = int(self.context.config.vocab_size)
        if found["perplexity"] >= AT_CHANCE * vocab_size:
            found["at_chance"] = True
            self._warn(
                "chance",
                f"the uncompressed model is at chance on this text: perplexity {found['perplexity']:.0f}, where "
                f"guessing among the {vocab_size} tokens has {vocab_size}; ratios to it mean nothing. Is it trained "
                "for such text?",
            )
        self.base[split] = found

    def measured(self, split: str) -> list[str]:
        """Names of the metrics that are measured by themselves on a split."""
        return [name for name in self._names[split] if name not in self.left_out[split]]

    def text(self, split: str) -> Tensor:
        """The text that is scored, [rows, seq_len]: with a policy, what is behind the prefill."""
        return self.context.rows[split][:, self._prefill(split) :]

    def _prefill(self, split: str) -> int:
        """Tokens of the prompt; 0 where rows are read whole."""
        length = self.context.rows[split].shape[1]
        return max(1, min(int(length * self.prompt_share), length - 2)) if self.prompt_share else 0

    def fitted_policy(self, network: LayerwiseModel) -> Policy | None:
        """The policy, with what it has to know of the network as it is found on the search split, where it needs that.

        Raises:
            UsageError: weights are read layer by layer.
        """
        if self.policy is None or not self.policy.needs_samples:
            return self.policy
        check_in_memory(network, self.policy)
        return fit_cache_policy(network.model, self.policy, self.context.rows["search"])

    def measure(self, network: LayerwiseModel, split: str, read: Read | None = None) -> Fidelity:
        """Run a compressed model over a split's text and prompts, and compare it with the uncompressed one.

        Args:
            read: how rows are read; by default through a cache of the policy, or whole without one.
        """
        if read is None and self.policy is not None:
            read = partial(final_states_through_cache, network, policy=self.fitted_policy(network))
        rows = {name: self._made(name).rows(split) for name in self.measured(split)}
        outputs = self._run(network, split, rows, self._references.get(split), read)
        found = {name: self._made(name).measure(outputs, split) for name in self.measured(split)}
        values: dict[str, float | None] = {}
        for name, one in found.items():
            values |= {metric_info(name).accuracy_field: one.value, **one.fields}
        for name, info in METRICS.items():
            parts = self._parts(name, found)
            if parts and set(info.parts) <= {*found, *self.left_out[split]}:
                values[name] = smallest(parts).value
        result = found[self.metric] if self.metric in found else smallest(self._parts(self.metric, found))
        values |= {f"compressed_{name}": value for name, value in outputs.text.as_dict().items()}
        return Fidelity(result.value, result.interval, values)

    def _parts(self, name: str, found: dict[str, Measurement]) -> list[Measurement]:
        return [found[part] for part in metric_info(name).parts if part in found]

    def _made(self, name: str) -> Metric:
        if name not in self._metrics:
            self._metrics[name] = make_metric(name, self.context)
        return self._metrics[name]

    def _leave_out(self, name: str, split: str, error: DataError) -> None:
        """One ratio of several may be missing, which is said once; the recipe's own metric may not."""
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

    def _run(
        self,
        network: LayerwiseModel,
        split: str,
        rows: dict[str, Tensor | None],
        reference: Tensor | None,
        read: Read | None,
    ) -> Outputs:
        """One pass through the layers for the text and for all rows that metrics ask for, or by `read` in steps."""
        text, start = self.context.rows[split], self._prefill(split)
        asked = {name: prompts for name, prompts in rows.items() if prompts is not None}
        parts = [text, *asked.values()]
        with self.progress.task("measure", sum(part.numel() for part in parts), "tokens") as advance:
            if read is None:
                states, *own = network.final_states_of(parts, advance)
            else:
                prefills = [start, *(self._made(name).prefill(split) or start for name in asked)]
                pairs = zip(parts, prefills, strict=True)
                states, *own = (read(rows=rows, prefill=prefill, advance=advance) for rows, prefill in pairs)
        states = states[:, start:]
        scores = score(network, self.text(split), reference=reference, states=states)
        return Outputs(network, scores, states, dict(zip(asked, own, strict=True)))

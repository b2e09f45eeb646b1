"""The accuracy of a compressed model: what was measured, and every word that console, card, report and study say of it.

rotor.json keeps an `Accuracy`; a table of a run keeps a `Fidelity` for each split of a point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from ...checked import Reader, plain
from ...checkpoint.schemas import AccuracyInfo
from ...models.splits import SPLITS
from ...recipe.metric_registry import METRICS, metric_info

PART_VALUES = {"token_accuracy": "next tokens", "ppl_ratio": "perplexity", "kl_div": "KL"}
"""Columns shown of a kind of text, and of a range of positions."""

BaseValues = dict[str, bool | int | float]
"""Records of the uncompressed model on a split: ratios' denominators, counts of tokens, `at_chance`."""

Row = tuple[str, str]
"""Name of a measurement, and its value in words."""


@dataclass(frozen=True)
class Fidelity:
    """Measurements of a model on one split.

    accuracy: of the recipe's metric; 1 is equal to the uncompressed model, below 1 is worse.
    interval: its 95 % interval.
    values: each measured ratio under its own name, and what is recorded beside it.
    kinds: the ratios of text of each of several texts, by its name. positions: the same of ranges of positions in rows,
    of the report split.
    """

    accuracy: float
    interval: Annotated[tuple[float, float], Field(alias="interval_95")]
    values: dict[str, float | None]
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)
    positions: dict[str, dict[str, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.accuracy:.4f} [{self.interval[0]:.4f}, {self.interval[1]:.4f}]"

    @property
    def interval_in_words(self) -> str:
        return f"95 % interval {self.interval[0]:.4f} to {self.interval[1]:.4f}"

    def against(self, target: float) -> tuple[bool, str]:
        """Tell whether a target is met, and where it is not, or not by the value itself, what lies below it.

        It is missed where the whole interval lies below it.
        """
        if self.accuracy >= target:
            return True, ""
        if self.interval[1] >= target:
            return True, "the value is below the target, its 95 % interval is not"
        return False, "the whole 95 % interval is below the target"


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a compressed model against the uncompressed one, on each split that was measured.

    metric: name of the recipe's metric. target: of the search. measured: by split (search, report).
    base: what was recorded of the uncompressed model, by split. left_out: why a ratio was not measured, by split and
    name. data, data_sha256: the held-out text, and its tokens. excluded_documents: digests of documents that are no
    text to measure on, as they were calibrated on. documents: of each split how many there are, by the names of files.
    table: key of the run's table. not_measured: why nothing was.
    """

    metric: str
    target: float | None = None
    measured: Mapping[str, Fidelity] = field(default_factory=dict)
    base: Mapping[str, BaseValues] = field(default_factory=dict)
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    data: str | None = None
    data_sha256: str | None = None
    excluded_documents: tuple[str, ...] = ()
    documents: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    table: str | None = None
    not_measured: str = ""

    @classmethod
    def read(cls, info: AccuracyInfo, reader: Reader) -> Accuracy:
        """The accuracy that rotor.json has; `reader` raises where a measurement is damaged."""
        measured = {
            split: reader.read(Fidelity, content, f"accuracy.measurements.{split}")
            for split, content in info["measurements"].items()
        }
        return cls(
            info["metric"],
            info["target"],
            measured,
            {split: base for split, base in info["base"].items() if base},
            info["left_out"],
            info["data"],
            info["data_sha256"],
            tuple(info["excluded_documents"]),
            info["documents"],
            info["table"],
            info.get("not_measured", ""),
        )

    def to_dict(self) -> AccuracyInfo:
        """The section of rotor.json."""
        search, report = self.measured.get("search"), self.report
        content: AccuracyInfo = {
            "target": self.target,
            "metric": self.metric,
            "search": None if search is None else search.accuracy,
            "report": None if report is None else report.accuracy,
            "interval_95": None if report is None else report.interval,
            "measurements": {split: plain(fidelity) for split, fidelity in self.measured.items()},
            "base": {split: self.base.get(split) for split in SPLITS},
            "left_out": {split: dict(reasons) for split, reasons in self.left_out.items()},
            "data": self.data,
            "data_sha256": self.data_sha256,
            "excluded_documents": list(self.excluded_documents),
            "documents": {split: dict(names) for split, names in self.documents.items()},
            "table": self.table,
        }
        if self.not_measured:
            content["not_measured"] = self.not_measured
        return content

    def summary(self) -> dict[str, object]:
        """The report split on one level, for `rotor validate --json`."""
        report, base = self.measured["report"], self.base["report"]
        content: dict[str, object] = {
            "metric": self.metric,
            "value": report.accuracy,
            "interval_95": list(report.interval),
            "target": self.target,
            **report.values,
            **{f"base_{name}": base[name] for name in base if name in METRICS},
            "left_out": self.left_out["report"],
            "tokens": base["tokens"],
        }
        content |= {name: part for name in ("kinds", "positions") if (part := getattr(report, name))}
        if base.get("at_chance"):
            content["at_chance"] = True
        return content | {"data": self.data}

    @property
    def report(self) -> Fidelity | None:
        return self.measured.get("report")

    def against_target(self) -> tuple[bool, str]:
        """Tell whether the target is met on the report split, and what lies below it. See Fidelity.against."""
        return (True, "") if self.target is None or self.report is None else self.report.against(self.target)

    @property
    def below_target(self) -> str:
        """Words for what lies below the target, see against_target; empty where nothing does."""
        return self.against_target()[1]

    def rows(self) -> list[Row]:
        """Everything that is said of the accuracy, one row for each thing; a single row where nothing was measured."""
        report = self.report
        if report is None:
            return [("accuracy", f"not measured: {self.not_measured}")]
        base = self.base.get("report") or {}
        below = self.below_target
        target = "none was set" if self.target is None else f"{self.target}"
        tokens = f"{base.get('tokens', 0)} predicted tokens of the report split, which played no part in the choice"
        value = f"{report.accuracy:.4f}, {report.interval_in_words}"
        return [
            (f"accuracy ({self.metric})", f"{value}; {below}" if below else value),
            (
                "target of the search",
                f"{target}; measured on the search split: {self.measured['search'].accuracy:.4f}",
            ),
            *self.ratio_rows(),
            *self.part_rows(),
            ("measured on", f"{self.data}, {tokens}{chance_note(base)}"),
        ]

    def ratio_rows(self, split: str = "report") -> list[Row]:
        """Label and value of each metric that is measured by itself, or why it was left out."""
        measured = self.measured.get(split)
        base = self.base.get(split) or {}
        missing = {name: why for of_split in self.left_out.values() for name, why in of_split.items()}
        rows = []
        for name, info in METRICS.items():
            value = None if info.parts or measured is None else measured.values.get(info.accuracy_field)
            if value is not None:
                label = f"exp(-KL), {info.label}" if info.field else info.label
                rows.append((label, f"{value:.4f}{_beside_base(name, base)}"))
            elif name in missing:
                rows.append((info.label, f"left out: {missing[name]}"))
        return rows

    def part_rows(self) -> list[Row]:
        """Measurements of each of several texts, and of each range of positions in rows of the report split."""
        if self.report is None:
            return []
        parts = {f"text {kind}": values for kind, values in self.report.kinds.items()}
        parts |= {f"positions {name.replace('-', ' to ')}": values for name, values in self.report.positions.items()}
        return [
            (name, ", ".join(f"{word} {values[key]:.4f}" for key, word in PART_VALUES.items() if key in values))
            for name, values in parts.items()
        ]

    @property
    def note(self) -> str:
        """Describe the metric, and how far the value may be trusted; or that it is to be measured."""
        if self.report is None:
            return (
                "Measure it, with `rotor validate` where the model has a tokenizer, before you rely on this checkpoint."
            )
        return (
            f"Accuracy is {metric_info(self.metric).description}. It is measured once, on text that neither "
            "calibration nor the search saw; it may\nlie below the target by what the interval says."
        )


def _beside_base(name: str, base: BaseValues) -> str:
    """Denominator of a ratio: of prompts the uncompressed model's probability, and over how much other text."""
    if name == "ppl_ratio" and isinstance(base.get("perplexity"), float):
        return f", base {base['perplexity']:.3f}"
    probability = base.get(name)
    filler_tokens = base.get(f"{name}_filler_tokens")
    if not isinstance(probability, float) or not isinstance(filler_tokens, int):  # another metric, or a foreign file
        return ""
    return f", base {probability:.3f}, over {filler_tokens} tokens of other text"


def chance_note(base: BaseValues) -> str:
    """Note on an uncompressed model that guesses, to whom ratios mean nothing; nothing of any other."""
    return "; it is at chance on this text, where ratios to it mean nothing" if base.get("at_chance") else ""

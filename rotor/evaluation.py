"""Accuracy against the uncompressed model on held-out text: scores, ratios and their bootstrap intervals."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import DataError, NumericsError
from .progress import Advance
from .recipe import Evaluation
from .tokens import longest_row, read_documents, spread_rows, stdlib_documents, text_rows

LOGIT_BYTES = {"cpu": 1 << 24, "cuda": 1 << 29}
"""Memory that the float32 logits of one evaluation batch may take; on a CPU what its caches hold runs twice as fast."""

RESAMPLES = 2000
"""Bootstrap resamples of rows."""


@dataclass(frozen=True)
class EvaluationData:
    """Held-out rows of tokens. `search` chooses the ranks; only `report` gives the numbers that are reported.

    search, report: [rows, seq_len], from different documents (or different halves of a single one).
    description: what the text is. sha256: of all the rows.
    """

    search: Tensor
    report: Tensor
    description: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.search.numpy().tobytes() + b"|" + self.report.numpy().tobytes()).hexdigest()


def evaluation_data(spec: Evaluation, config: Any, tokenizer: Any) -> EvaluationData:
    """Read the text that a recipe names and split it.

    Raises:
        DataError: no text, or too little of it.
    """
    seq_len = longest_row(spec.seq_len, config)
    parts, description = held_out_documents(spec)
    counts = -(-spec.search_tokens // seq_len), -(-spec.report_tokens // seq_len)
    search, report = (
        spread_rows(text_rows(part, tokenizer, seq_len), count, f"evaluation, {name} split of {description}")
        for part, count, name in zip(parts, counts, ("search", "report"), strict=True)
    )
    return EvaluationData(search, report, description)


def held_out_documents(spec: Evaluation) -> tuple[tuple[list[str], list[str]], str]:
    """The documents of the (search, report) halves that a recipe names, and what they are.

    Raises:
        DataError: there is no text.
    """
    if spec.source == "stdlib":
        documents, description = stdlib_documents(), "source of the Python standard library (modules held out)"
    else:
        assert spec.path is not None
        documents, description = read_documents(Path(spec.path)), f"text {Path(spec.path).name}"
    if len(documents) == 1:
        half = len(documents[0]) // 2
        return ([documents[0][:half]], [documents[0][half:]]), description
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(spec.seed)).tolist()
    return ([documents[i] for i in order[::2]], [documents[i] for i in order[1::2]]), description


@dataclass(frozen=True)
class Scores:
    """Next-token results per row: correct [rows] (argmax hits), nll [rows] (sum, nats), over `tokens` a row."""

    correct: np.ndarray
    nll: np.ndarray
    tokens: int

    def as_dict(self) -> dict[str, float]:
        total = self.tokens * len(self.nll)
        return {
            "token_accuracy": round(float(self.correct.sum() / total), 6),
            "perplexity": round(float(np.exp(self.nll.sum() / total)), 6),
            "tokens": total,
        }


def batches(model: Any, rows: Tensor) -> tuple[Tensor, ...]:
    """Split rows so that the logits of a batch stay within LOGIT_BYTES.

    Raises:
        DataError: there are no rows.
    """
    if rows.numel() == 0:
        raise DataError("the evaluation set is empty.", "Ask for more tokens with --set evaluation.report_tokens=N.")
    allowed = LOGIT_BYTES.get(model.device.type, LOGIT_BYTES["cuda"])
    return rows.split(max(1, allowed // (rows.shape[1] * model.config.vocab_size * 4)))


@torch.inference_mode()
def batch_logits(model: Any, rows: Tensor) -> Tensor:
    """float32 logits of all positions but the last, [batch_size, seq_len - 1, vocab_size]."""
    logits = model(rows.to(model.device), use_cache=False).logits[:, :-1].float()
    if not torch.isfinite(logits).all():
        raise NumericsError("the model's logits are not finite on the evaluation text.", "Evaluate in float32.")
    return logits


def batch_scores(logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(correct, nll) per row of one batch."""
    labels = rows[:, 1:].to(logits.device)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    correct = (logits.argmax(-1) == labels).sum(-1)
    return correct.cpu(), nll.reshape(labels.shape).double().sum(-1).cpu()


def score(model: Any, rows: Tensor, advance: Advance = lambda done: None) -> Scores:
    """Run the model over rows [n, seq_len] and score its next-token predictions."""
    correct, nll = [], []
    for batch in batches(model, rows):
        results = batch_scores(batch_logits(model, batch), batch)
        correct.append(results[0])
        nll.append(results[1])
        advance(batch.numel())
    return Scores(torch.cat(correct).numpy(), torch.cat(nll).numpy(), rows.shape[1] - 1)


def ratios(base: Scores, other: Scores) -> dict[str, float]:
    """Each metric of `other` against `base`: 1 is equal, below 1 is worse."""
    values = _ratios(base.correct.sum(), base.nll.mean(), other.correct.sum(), other.nll.mean(), base.tokens)
    return {name: round(float(value), 6) for name, value in values.items()}


def interval(base: Scores, other: Scores, metric: str, seed: int = 0) -> tuple[float, float]:
    """95 % interval of a metric by a paired bootstrap over rows (the same rows drawn for both models)."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(base.nll), (RESAMPLES, len(base.nll)))
    drawn = _ratios(
        base.correct[rows].sum(-1),
        base.nll[rows].mean(-1),
        other.correct[rows].sum(-1),
        other.nll[rows].mean(-1),
        base.tokens,
    )
    low, high = np.quantile(drawn[metric], [0.025, 0.975])
    return round(float(low), 6), round(float(high), 6)


def _ratios(base_correct: Any, base_nll: Any, correct: Any, nll: Any, tokens: int) -> dict[str, Any]:
    token_accuracy = correct / np.maximum(base_correct, 1)
    ppl_ratio = np.exp((base_nll - nll) / tokens)
    return {
        "default": np.minimum(token_accuracy, ppl_ratio),
        "token_accuracy": token_accuracy,
        "ppl_ratio": ppl_ratio,
    }

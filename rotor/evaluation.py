"""Accuracy against the uncompressed model on held-out text: scores, ratios and their bootstrap intervals."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import DataError, NumericsError
from .estimate import HEAD_POSITIONS, LOGIT_BYTES
from .families import longest_row
from .layerwise import LayerwiseModel
from .progress import Advance
from .recipe import Evaluation
from .tokens import check_ids, read_documents, spread_rows, stdlib_documents, text_rows

KL_POSITIONS_BYTES = 1 << 24
"""Memory that one float32 tensor of the positions compared at a time may take."""

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
    for rows in (search, report):
        check_ids(rows, config)
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
    """Next-token results per row, over `tokens` predictions a row.

    correct: [rows], argmax hits. nll: [rows], their negative log-likelihoods summed, nats.
    top1: [rows, tokens] int32, the argmax of each position.
    kl_div: [rows], KL(reference || model) summed over positions, nats; None if there was no reference.
    """

    correct: np.ndarray
    nll: np.ndarray
    tokens: int
    top1: np.ndarray | None = None
    kl_div: np.ndarray | None = None

    def as_dict(self) -> dict[str, float]:
        total = self.tokens * len(self.nll)
        return {
            "token_accuracy": round(float(self.correct.sum() / total), 6),
            "perplexity": round(float(np.exp(self.nll.sum() / total)), 6),
            "tokens": total,
        }


def logit_batches(network: LayerwiseModel, rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and positions (all but the last) whose logits stay within LOGIT_BYTES: several rows, or parts of one.

    Raises:
        DataError: there are no rows.
    """
    if rows.numel() == 0:
        raise DataError("the evaluation set is empty.", "Ask for more tokens with --set evaluation.report_tokens=N.")
    allowed = LOGIT_BYTES.get(network.device.type, LOGIT_BYTES["cuda"]) // (4 * network.config.vocab_size)
    length = rows.shape[1] - 1
    count = max(1, allowed // rows.shape[1])
    step = length if count > 1 else max(HEAD_POSITIONS, allowed)
    for row in range(0, len(rows), count):
        for position in range(0, length, step):
            yield slice(row, row + count), slice(position, min(position + step, length))


def batch_logits(network: LayerwiseModel, rows: Tensor) -> Tensor:
    """float32 logits of all positions but the last, [batch_size, seq_len - 1, vocab_size]; all of them in memory."""
    states = network.final_states(rows)
    with network.head() as head:
        return _finite(head(states[:, :-1]).float())


def _finite(logits: Tensor) -> Tensor:
    if not torch.isfinite(logits).all():
        raise NumericsError("the model's logits are not finite on the evaluation text.", "Evaluate in float32.")
    return logits


@torch.no_grad()
def position_kl_div(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || model) of each position in nats.

    Args:
        reference, logits: [positions, vocab_size], float32. Taken KL_POSITIONS_BYTES at a time.
    Returns:
        [positions], float32; exactly 0 for equal logits, never below.
    """
    step = max(1, KL_POSITIONS_BYTES // (4 * logits.shape[-1]))
    parts = []
    for p, q in zip(reference.split(step), logits.split(step), strict=True):
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        parts.append(log_q.sub_(log_p).neg_().mul_(log_p.exp_()).sum(-1).clamp_min_(0))
    return torch.cat(parts)


class Tally:
    """Gathers the scores of one model, position by position of each row."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Tensor]] = {}

    def add(self, logits: Tensor, labels: Tensor, reference: Tensor | None = None) -> None:
        """Add positions.

        Args:
            logits: [n, vocab_size] float32. labels: [n], the tokens that come next.
            reference: the uncompressed model's logits, if KL is wanted.
        """
        labels = labels.to(logits.device)
        top1 = logits.argmax(-1)
        columns = {
            "correct": top1 == labels,
            "nll": torch.nn.functional.cross_entropy(logits, labels, reduction="none").double(),
            "top1": top1.int(),
        }
        if reference is not None:
            columns["kl_div"] = position_kl_div(reference, logits).double()
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values.cpu())

    def scores(self, rows: int) -> Scores:
        columns = {name: torch.cat(parts).reshape(rows, -1) for name, parts in self._columns.items()}
        sums = {name: values.sum(-1).numpy() for name, values in columns.items() if name != "top1"}
        return Scores(tokens=columns["top1"].shape[1], top1=columns["top1"].numpy(), **sums)


def score(
    network: LayerwiseModel,
    rows: Tensor,
    advance: Advance = lambda done: None,
    reference: Tensor | None = None,
    states: Tensor | None = None,
) -> Scores:
    """Run the model over rows [n, seq_len] and score its next-token predictions.

    Args:
        reference: the uncompressed model's final hidden states; with them, KL is measured too.
        states: the model's own, if they are known.
    """
    if states is None:
        states = network.final_states(rows, advance)
    tally = Tally()
    with network.head() as head:
        for batch, positions in logit_batches(network, rows):
            labels = rows[batch, positions.start + 1 : positions.stop + 1].flatten()
            logits = _finite(head(states[batch, positions]).float().flatten(0, 1))
            expected = None if reference is None else head(reference[batch, positions]).float().flatten(0, 1)
            tally.add(logits, labels, expected)
    return tally.scores(len(rows))


def logit_errors(network: LayerwiseModel, rows: Tensor, reference: Tensor, states: Tensor) -> Tensor:
    """Relative error of the logits of each position, [n], by final hidden states of two models with one head.

    Where all of the reference's logits are exactly 0 (behind a zero embedding of padding), the error is absolute.
    """
    errors = []
    with network.head() as head:
        for batch, positions in logit_batches(network, rows):
            expected, got = (head(s[batch, positions]).float().flatten(0, 1) for s in (reference, states))
            size = expected.norm(dim=-1)
            errors.append(((got - expected).norm(dim=-1) / torch.where(size == 0, 1.0, size)).cpu())
    return torch.cat(errors)


def ratios(base: Scores, other: Scores) -> dict[str, float]:
    """Each next-token ratio of `other` against `base`: 1 is equal, below 1 is worse."""
    total = base.tokens * len(base.nll)
    values = _ratios(total, base.correct.sum(), base.nll.sum(), other.correct.sum(), other.nll.sum())
    return {name: round(float(value), 6) for name, value in values.items()}


def interval(base: Scores, other: Scores, metric: str, seed: int = 0) -> tuple[float, float]:
    """95 % interval of one of `ratios` by a paired bootstrap over rows."""
    total = base.tokens * len(base.nll)
    columns = base.correct, base.nll, other.correct, other.nll
    return bootstrap(lambda *sums: _ratios(total, *sums)[metric], *columns, seed=seed)


def bootstrap(value: Callable[..., Any], *columns: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % interval of a value of column sums by a bootstrap over rows, the same rows drawn for all columns (paired).

    Args:
        value: from one array of sums a column, each [resamples], to the value of each resample.
        columns: [rows] each; at least one.
    """
    count = len(columns[0])
    rows = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    low, high = np.quantile(value(*(column[rows].sum(-1) for column in columns)), [0.025, 0.975])
    return round(float(low), 6), round(float(high), 6)


def _ratios(total: int, base_correct: Any, base_nll: Any, correct: Any, nll: Any) -> dict[str, Any]:
    token_accuracy = correct / np.maximum(base_correct, 1)
    ppl_ratio = np.exp((base_nll - nll) / total)
    return {
        "default": np.minimum(token_accuracy, ppl_ratio),
        "token_accuracy": token_accuracy,
        "ppl_ratio": ppl_ratio,
    }

"""Scores of rows of tokens: next-token predictions, and answers to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...errors import NumericsError
from ...models.layerwise import LayerwiseModel, logit_batches
from ...models.memory import HEAD_POSITIONS, LOGIT_BYTES, LOGIT_COPIES
from ...numerics import is_finite

BLOCK_BYTES = 1 << 24
"""Memory that one float32 tensor of the positions that are scored at a time may take."""


def scoring_bytes(device: torch.device, vocab_size: int) -> int:
    """Memory of `score`: the logits of a batch in several copies."""
    return LOGIT_COPIES * max(LOGIT_BYTES[device.type], HEAD_POSITIONS * 4 * vocab_size)


@dataclass(frozen=True)
class Scores:
    """Next-token results; column j predicts token j + 1 of its row.

    nll: [rows, tokens] float64, negative log-likelihoods in nats. top1: [rows, tokens] int32, the argmax.
    correct: [rows, tokens] bool, whether it is the token. kl_div: [rows, tokens] float64, KL(reference || model) in
    nats; None without a reference.
    """

    nll: Tensor
    top1: Tensor
    correct: Tensor
    kl_div: Tensor | None = None

    @classmethod
    def of(cls, parts: Sequence[dict[str, Tensor]], rows: int) -> Scores:
        """Join the `position_scores` of all positions of rows, one row behind the other."""
        values = {name: torch.cat([part[name] for part in parts]).reshape(rows, -1) for name in parts[0]}
        return cls(values["nll"], values["top1"], values["correct"], values.get("kl_div"))

    def part(self, rows: slice | Sequence[int] = slice(None), columns: slice = slice(None)) -> Scores:
        """The scores of some rows, at some positions."""
        tensors = (self.nll, self.top1, self.correct, self.kl_div)
        return Scores(*(None if tensor is None else tensor[rows][:, columns] for tensor in tensors))  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, float]:
        return {
            "token_accuracy": round(float(self.correct.double().mean()), 6),
            "perplexity": round(float(self.nll.mean().exp()), 6),
            "tokens": self.nll.numel(),
        }


def batch_logits(network: LayerwiseModel, rows: Tensor) -> Tensor:
    """float32 logits of all positions but the last, [batch_size, seq_len - 1, vocab_size]; all of them in memory."""
    states = network.final_states(rows)
    with network.head() as head:
        return finite(head(states[:, :-1]).float())


def finite(logits: Tensor) -> Tensor:
    """Return the logits; raises NumericsError where there is a NaN or Inf."""
    if not is_finite(logits):
        raise NumericsError("the model's logits are not finite on the evaluation text.", "Evaluate in float32.")
    return logits


def _blocks(logits: Tensor) -> int:
    """Positions of logits [positions, vocab_size] that are scored at a time: large tensors take more time than many."""
    return max(1, BLOCK_BYTES // (4 * logits.shape[-1]))


@torch.no_grad()
def position_kl_div(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || model) of each position in nats.

    Args:
        reference, logits: [positions, vocab_size], float32.
    Returns:
        [positions], float32; exactly 0 for equal logits, never below.
    """
    step, parts = _blocks(logits), []
    for p, q in zip(reference.split(step), logits.split(step), strict=True):
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        parts.append(log_q.sub_(log_p).neg_().mul_(log_p.exp_()).sum(-1).clamp_min_(0))
    return torch.cat(parts)


@torch.no_grad()
def position_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of each position's label.

    Args:
        logits: [positions, vocab_size], float32. labels: [positions].
    Returns:
        [positions], float64, in nats.
    """
    step = _blocks(logits)
    pairs = zip(logits.split(step), labels.split(step), strict=True)
    return torch.cat([cross_entropy(block, wanted, reduction="none") for block, wanted in pairs]).double()


def position_scores(logits: Tensor, labels: Tensor, reference: Tensor | None = None) -> dict[str, Tensor]:
    """Scores of positions, on the CPU, [positions] each: `correct`, `nll`, `top1`, and `kl_div`.

    Args:
        logits: [positions, vocab_size] float32. labels: [positions], the tokens that come next.
        reference: the uncompressed model's logits, if KL is wanted.
    """
    labels, top1 = labels.to(logits.device), logits.argmax(-1)
    scores = {
        "correct": top1 == labels,
        "nll": position_nll(logits, labels),
        "top1": top1.int(),
    }
    if reference is not None:
        scores["kl_div"] = position_kl_div(reference.to(logits.device), logits).double()
    return {name: tensor.cpu() for name, tensor in scores.items()}


def score(
    network: LayerwiseModel,
    rows: Tensor,
    reference: Tensor | None = None,
    states: Tensor | None = None,
) -> Scores:
    """Run the model over rows [n, seq_len] and score its next-token predictions.

    Args:
        reference: the uncompressed model's final hidden states; with them, KL is measured too.
        states: the model's own, if they are known.
    """
    if states is None:
        states = network.final_states(rows)
    parts = []
    with network.head() as head:
        for batch, positions in logit_batches(network, rows):
            labels = rows[batch, positions.start + 1 : positions.stop + 1].flatten()
            logits = finite(head(states[batch, positions]).float().flatten(0, 1))
            expected = None if reference is None else head(reference[batch, positions]).float().flatten(0, 1)
            parts.append(position_scores(logits, labels, expected))
    return Scores.of(parts, len(rows))


@dataclass(frozen=True)
class AnswerScores:
    """Scores of the marked tokens of rows, each [rows].

    probability: sum of the probabilities that the model gives them. answers: how many there are.
    """

    probability: np.ndarray
    answers: np.ndarray

    @property
    def mean_probability(self) -> float:
        return float(self.probability.sum() / self.answers.sum())


def answer_scores(network: LayerwiseModel, rows: Tensor, answers: Tensor, states: Tensor) -> AnswerScores:
    """Score the marked tokens alone; the head runs for no other position.

    Args:
        rows: [n, seq_len] int64. answers: [n, seq_len] bool, true at tokens to be predicted, none a row's first.
        states: [n, seq_len, hidden_size], the model's final hidden states.
    """
    row, position = answers[:, 1:].nonzero(as_tuple=True)
    labels = rows[:, 1:][row, position]
    chosen = states[row, position]
    step = max(HEAD_POSITIONS, LOGIT_BYTES[network.device.type] // (4 * network.config.vocab_size))
    probability = []
    with network.head() as head:
        for part, wanted in zip(chosen.split(step), labels.split(step), strict=True):
            logits = finite(head(part[:, None]).float())[:, 0]  # each a row: a model has only so many positions
            probability.append(position_nll(logits, wanted.to(logits.device)).neg().exp().cpu())

    def by_row(values: Tensor) -> np.ndarray:
        return torch.zeros(len(rows), dtype=torch.float64).index_add_(0, row, values.double()).numpy()

    return AnswerScores(by_row(torch.cat(probability)), by_row(torch.ones(len(labels))))

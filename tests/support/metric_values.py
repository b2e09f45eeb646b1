"""Made-up logits of two rows, their scores, and what a metric is made with."""

from __future__ import annotations

from dataclasses import replace

import torch

from rotor.models.source import Checkpoint
from rotor.models.splits import evaluation_data
from rotor.recipe.sections import Evaluation
from rotor.search.evaluation.prompts import EvaluationContext
from rotor.search.evaluation.scoring import Scores, position_scores

# Two rows of two predicted positions over three tokens, as probabilities.
BASE = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]], [[0.1, 0.1, 0.8], [0.6, 0.2, 0.2]]]).log()
OTHER = torch.tensor([[[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]], [[0.1, 0.1, 0.8], [0.3, 0.4, 0.3]]]).log()
ROWS = torch.tensor([[0, 0, 1], [0, 2, 1]])


def scores(logits: torch.Tensor, reference: torch.Tensor | None = None) -> Scores:
    none = [None] * len(logits)
    parts = [
        position_scores(own, row[1:], theirs)
        for own, row, theirs in zip(logits, ROWS, none if reference is None else reference, strict=True)
    ]
    return Scores.of(parts, len(logits))


def context(spec: Evaluation, checkpoint: Checkpoint) -> EvaluationContext:
    short = replace(spec, search_tokens=2048, report_tokens=2048)
    data = evaluation_data(short, checkpoint.config, checkpoint.tokenizer)
    return EvaluationContext.of(spec, data, checkpoint.tokenizer, checkpoint.config)

"""What accuracy means, by name: one file a metric, one row each in rotor/recipe/metric_registry.py."""

from __future__ import annotations

import importlib

from ...recipe.metric_registry import metric_info
from .base import EvaluationContext, Measurement, Metric, Outputs, smallest

__all__ = ["EvaluationContext", "Measurement", "Metric", "Outputs", "make_metric", "smallest"]


def make_metric(name: str, context: EvaluationContext) -> Metric:
    """A metric that is measured by itself (one of `primitive_metrics`).

    Raises:
        UsageError: a package that it needs is not installed. DataError: its task cannot be loaded.
    """
    module, _, kind = metric_info(name).implementation.partition(":")
    made: Metric = getattr(importlib.import_module(f".{module}", __name__), kind)(name, context)
    return made

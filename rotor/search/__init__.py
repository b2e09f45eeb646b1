"""The search for the plan that meets a goal, and the checkpoint that is written with it.

What this package offers to others is imported when it is first used. `rotor.export` writes the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..facade import lazy

if TYPE_CHECKING:
    from .evaluation.accuracy import Accuracy as Accuracy
    from .evaluation.accuracy import Fidelity as Fidelity
    from .evaluation.fidelity import FidelityMeter as FidelityMeter
    from .evaluation.prompts import EvaluationContext as EvaluationContext
    from .plan_evaluator import PlanEvaluator as PlanEvaluator
    from .plan_evaluator import rank_path as rank_path
    from .point import Point as Point
    from .search import find_plan as find_plan
    from .table import RankTable as RankTable

_MODULES = {
    "evaluation.accuracy": "Accuracy Fidelity",
    "evaluation.fidelity": "FidelityMeter",
    "evaluation.prompts": "EvaluationContext",
    "plan_evaluator": "PlanEvaluator rank_path",
    "point": "Point",
    "search": "find_plan",
    "table": "RankTable",
}
__getattr__ = lazy(__name__, _MODULES)

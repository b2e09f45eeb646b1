"""Where RoPE's frequencies change with the length, rows are read token by token: as they are served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.folded_models import MIXED, Folding, folded
from support.tiny_models import CONFIGS
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicCache

from rotor import Progress
from rotor.checkpoint.layout import POST_ROPE, ExactTokens
from rotor.errors import UsageError
from rotor.models.layerwise import LayerwiseModel
from rotor.recipe.sections import Evaluation
from rotor.search.evaluation.cached import constant_rope_tokens
from rotor.search.evaluation.fidelity import FidelityMeter
from rotor.search.evaluation.prompts import EvaluationContext


def served(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """Perplexity of rows that are read token by token."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = [model(rows[:, i : i + 1], past_key_values=cache).logits for i in range(rows.shape[1] - 1)]
    return float(cross_entropy(torch.cat(logits, 1).flatten(0, 1), rows[:, 1:].flatten()).exp())


def test_rows_beyond_the_base_length_are_measured_token_by_token(tiny) -> None:
    """phi3's longrope changes its frequencies behind 128 tokens; one pass would give them to all tokens of a row."""
    source = AutoModelForCausalLM.from_pretrained(tiny("phi3")).eval()
    assert constant_rope_tokens(source.config) == 128
    rows = torch.randint(1, 4096, (1, 160), generator=torch.Generator().manual_seed(4))
    spec = Evaluation("text", None, metric="text", seq_len=160)
    meter = FidelityMeter(EvaluationContext(spec, {"report": rows}, None, source.config), Progress())
    network = LayerwiseModel.of(source)
    meter.measure_base(network, "report")
    assert meter.base["report"]["perplexity"] == pytest.approx(served(source, rows), rel=1e-5)
    with torch.inference_mode():
        whole = source(rows).logits[:, :-1]
    assert abs(float(cross_entropy(whole[0], rows[0, 1:]).exp()) / served(source, rows) - 1) > 1e-3
    model = folded(source, Folding(POST_ROPE, 1, bits=MIXED, exact=ExactTokens(2, 6)))
    found = meter.measure(LayerwiseModel.of(model), "report").values
    assert found["compressed_perplexity"] == pytest.approx(served(model, rows), rel=1e-5)
    network.source = SimpleNamespace(streamed=True)
    with pytest.raises(UsageError, match="rows of 160 tokens: the frequencies of this model's RoPE change behind 128"):
        meter.measure_base(network, "report")


def test_frequencies_that_never_change_need_no_steps() -> None:
    assert constant_rope_tokens(CONFIGS["llama"]()) is None
    assert constant_rope_tokens(CONFIGS["gemma3_text"]()) is None
    assert constant_rope_tokens(CONFIGS["gpt2"]()) is None
    dynamic = CONFIGS["llama"]()
    dynamic.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert constant_rope_tokens(dynamic) == dynamic.max_position_embeddings
    dynamic.rope_parameters["alpha"] = 1000.0  # Hunyuan's, which stretches the base for all lengths
    assert constant_rope_tokens(dynamic) is None
    assert isinstance(dynamic, PreTrainedConfig)

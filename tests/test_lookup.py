"""Look-up and copying over a distance: what prompts hold, who can answer them, and what is said where nobody can."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.metric_values import context

from rotor import Progress
from rotor.errors import DataError
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import load_model
from rotor.models.memory import LOGIT_BYTES
from rotor.models.source import Checkpoint
from rotor.recipe.sections import Evaluation
from rotor.search.evaluation.fidelity import FidelityMeter
from rotor.search.evaluation.prompts import lookup_text, make_prompts
from rotor.search.evaluation.scoring import answer_scores


def test_lookup_text_asks_for_each_stated_key_once_and_marks_the_answers() -> None:
    keys = [("alpha", "12"), ("beta", "34"), ("gamma", "56")]
    stated, asked, spans = lookup_text(keys, [2, 0, 1], "codes")
    assert stated == 'codes = {\n    "alpha": 12,\n    "beta": 34,\n    "gamma": 56,\n}\n'
    assert asked == '\nassert codes["gamma"] == 56\nassert codes["alpha"] == 12\nassert codes["beta"] == 34\n'
    assert [asked[begin:end] for begin, end in spans] == ["56", "12", "34"]


@pytest.mark.parametrize("seq_len", [256, 512])
@pytest.mark.parametrize("name", ["lookup", "copy"])
def test_rows_of_a_split_are_seeded_and_hold_text_between(name: str, seq_len: int, demo) -> None:
    checkpoint, _ = demo
    spec = Evaluation(lookup_prompts=4, copy_prompts=4, seq_len=seq_len)
    made = context(spec, checkpoint)
    prompts = make_prompts(name, made, "search")
    again = make_prompts(name, made, "search")
    assert torch.equal(prompts.rows, again.rows)
    assert torch.equal(prompts.answers, again.answers)
    length = prompts.rows.shape[1]
    assert prompts.rows.shape == prompts.answers.shape == (4, length)
    assert length <= seq_len
    room = seq_len == 512 or (name == "copy" and seq_len >= 3 * 32 + 1 + 200)
    assert (prompts.filler_tokens == 200) == room
    assert prompts.filler_tokens >= seq_len // 3
    for other in (
        make_prompts(name, made, "report"),
        make_prompts(name, replace(made, spec=replace(spec, seed=1)), "search"),
    ):
        assert not torch.equal(other.rows, prompts.rows)
    assert (prompts.rows[:, 0] == 0).all()
    assert not (prompts.rows[:, 1:] == 0).any()  # what separates documents may make a model forget
    for ids, answers in zip(prompts.rows, prompts.answers, strict=True):
        where = answers.nonzero()[:, 0]
        text = made.rows["search"].flatten()
        middle = ids[seq_len // 3 :][:20]
        assert any(torch.equal(text[i : i + 20], middle) for i in range(len(text) - 20))
        if name == "copy":
            count = 32
            assert torch.equal(ids[1 : 1 + count], ids[-count:])
            assert torch.equal(ids[1 + count : 1 + 2 * count], ids[-count:])
            assert len(set(ids[-count:].tolist())) == count
            assert length == 1 + 3 * count + prompts.filler_tokens
            assert where.tolist() == list(range(length - count + 1, length))
        else:
            digits = checkpoint.tokenizer.decode(ids[answers]).replace(" ", "")
            assert digits.isdigit()
            assert len(digits) >= 2 * 2
            assert len(digits) % 2 == 0
            assert int(where.min()) >= length - seq_len // 3


def test_batches_do_not_change_the_scores_of_answers(demo) -> None:
    """Of prompts, whose answers are few, and of all tokens, whose logits are made in several parts."""
    checkpoint, model = demo
    prompts = make_prompts("lookup", context(Evaluation(lookup_prompts=5, seq_len=256), checkpoint), "report")
    states = model.final_states(prompts.rows)
    logits = model.model(prompts.rows).logits[:, :-1].double().softmax(-1)
    right = logits.gather(-1, prompts.rows[:, 1:, None])[..., 0]
    everything = torch.ones_like(prompts.answers)
    everything[:, 0] = False
    assert everything.sum() > LOGIT_BYTES["cpu"] // (4 * checkpoint.config.vocab_size)
    for answers in (prompts.answers, everything):
        scored = answer_scores(model, prompts.rows, answers, states)
        expected = (right * answers[:, 1:]).sum(-1).detach().numpy()
        np.testing.assert_allclose(scored.probability, expected, rtol=1e-4)


def test_the_bundled_model_looks_up_and_a_random_one_leaves_it_out(demo, tiny, caplog) -> None:
    checkpoint, model = demo
    meter = FidelityMeter(context(Evaluation(lookup_prompts=8, copy_prompts=8), checkpoint), Progress())
    meter.measure_base(model, "report")
    assert 0.35 < meter.base["report"]["lookup"] < 0.75  # measured: 0.52 over 64 rows of the search split
    assert 0.3 < meter.base["report"]["copy"] < 0.6  # measured: 0.40
    assert meter.base["report"]["copy_filler_tokens"] == 200
    other = Checkpoint(tiny("llama"))
    random = LayerwiseModel.of(load_model(other.folder, torch.device("cpu"), torch.float32))
    spec = Evaluation(seq_len=128, lookup_prompts=4, copy_prompts=4)
    caplog.clear()
    with caplog.at_level("INFO", "rotor"):
        meter = FidelityMeter(context(spec, other), Progress())
        for split in ("search", "report"):
            meter.measure_base(random, split)
    for name in ("lookup", "copy"):
        why = rf"{name}: the uncompressed model gives the right answers a mean probability of 0\.0\d\d "
        assert re.match(why, meter.left_out["search"][name])
        assert sum(f"leaves out `{name}`" in message for message in caplog.messages) == 1
    found = meter.measure(random, "search")
    assert found.accuracy == 1
    assert {"lookup", "copy"}.isdisjoint(found.values)
    with pytest.raises(DataError, match="choose another metric"):
        FidelityMeter(context(replace(spec, metric="lookup"), other), Progress()).measure_base(random, "search")


def test_lookup_says_what_it_cannot_do(demo) -> None:
    checkpoint, _ = demo
    made = context(Evaluation(), checkpoint)
    with pytest.raises(DataError, match="needs a tokenizer with character offsets, and the model's folder has none"):
        make_prompts("lookup", replace(made, tokenizer=None), "search")
    short = replace(made, rows={"search": made.rows["search"][:, :24]})
    with pytest.raises(DataError, match="rows of 24 tokens are too short to state two keys"):
        make_prompts("lookup", short, "search")
    with pytest.raises(DataError, match="copy: rows of 5 tokens are too short"):
        make_prompts("copy", replace(made, rows={"search": made.rows["search"][:, :5]}), "search")

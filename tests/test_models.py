"""Every family, in both domains and with groups of one and of all KV heads: exactness, caches, padding, saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.compare import relative_error
from support.quick import mostly_nightly
from support.runs import calibrated, in_memory
from support.tiny_models import CONFIGS, NO_ROPE
from transformers import AutoModelForCausalLM, StaticCache

from rotor import export, validate
from rotor.errors import UsageError
from rotor.search.plan_evaluator import rank_path

EVERY_CASE = [
    (family, domain, size)
    for family in CONFIGS
    for domain in (("post",) if family in NO_ROPE else ("post", "pre"))
    for size in (1, "all")
    if (family, size) != ("falcon", "all")  # it has one KV head
] + [("llama", "post", 2), ("llama", "pre", 2), ("gpt2", "post", 2)]  # groups between one and all
PAIRS = [("post", 1), ("pre", "all"), ("pre", 1), ("post", "all")]
KINDS = (
    "llama", "mistral", "mixtral", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox", "gpt2", "falcon-40b",
)  # fmt: skip
"""One family a kind: biases and scaled RoPE, windows, experts, norms of heads, a fused projection with long RoPE, a
soft cap, two RoPEs, partial RoPE fused head by head, no RoPE, a projection fused by groups."""
QUICK = {
    next(case for turn in range(4) if (case := (family, *PAIRS[(index + turn) % 4])) in EVERY_CASE)
    for index, family in enumerate(KINDS)
} | {("gpt2", "post", 2)}
"""Each kind once, and each pair of a domain and a size of groups with several; the nightly tests have the others."""
CASES = mostly_nightly(EVERY_CASE, lambda case: case in QUICK)
COMPRESSION = 0.45
PROMPT = torch.randint(1, 4096, (2, 20), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def compressed(tiny, tmp_path_factory: pytest.TempPathFactory):
    """compressed(family, domain, size) -> (run, checkpoint folder), made once."""
    made = {}

    def get(family: str, domain: str, size: int | str):
        key = (family, domain, size)
        if key not in made:
            folder = tmp_path_factory.mktemp("compressed")
            run = calibrated(tiny(family), folder / "run", domain, size)
            export(run.folder, folder / "out", compression=COMPRESSION, measure=False, context=12)  # within windows
            made[key] = (run, folder / "out")
        return made[key]

    return get


def load(folder: Path, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize(("family", "domain", "size"), CASES)
def test_rewriting_in_memory_and_on_disk(family, domain, size, compressed) -> None:
    """With all channels it is exact; a written checkpoint equals the compression in memory, and validates."""
    run, out = compressed(family, domain, size)
    network, path = in_memory(run), rank_path(run, run.recipe)
    full, plan = path.plans()[0], path.at_compression(COMPRESSION)
    assert plan is not None
    with torch.inference_mode():
        original = network.model(PROMPT).logits
        exact = network.compress(run.bases(full.channels), full.ranks)(PROMPT).logits
        assert relative_error(exact, original) < 1e-5
        expected = network.compress(run.bases(plan.channels), plan.ranks)(PROMPT).logits
        assert torch.equal(network.restore()(PROMPT).logits, original)
        got = load(out)(PROMPT).logits
    assert relative_error(got, expected) < 1e-6
    assert relative_error(got, original) > 1e-4  # it is compressed
    result = validate(out, measure=False)
    assert not result.damaged, [c for c in result.checks if c.status == "fail"]
    passed = {c.name for c in result.checks if c.status == "pass"}
    assert {"full-rank rewrite", "KV bytes per token", "tensor hashes"} <= passed


@pytest.mark.parametrize(("family", "domain", "size"), CASES)
def test_generation(family, domain, size, compressed) -> None:
    """Cached as in a full forward pass, whatever the padding, in a dynamic as in a static cache."""
    model = load(compressed(family, domain, size)[1])
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    logits = {"output_logits": True, "return_dict_in_generate": True}
    output = model.generate(PROMPT, **settings, **logits)
    with torch.inference_mode():
        full = model(output.sequences, use_cache=False).logits[:, PROMPT.shape[1] - 1 : -1]
    stepwise = torch.stack(output.logits, dim=1)
    assert relative_error(stepwise[:, : full.shape[1]], full) < 1e-4
    assert torch.equal(stepwise.argmax(-1), output.sequences[:, PROMPT.shape[1] :])

    short = PROMPT[:1, 9:]
    batch = torch.cat([torch.cat([torch.full((1, 9), 7), short], dim=1), PROMPT[1:]])
    mask = torch.ones_like(batch)
    mask[0, :9] = 0
    together = model.generate(batch, attention_mask=mask, **settings, **logits)
    alone = model.generate(short, attention_mask=torch.ones_like(short), **settings, **logits)
    got, padded = torch.stack(together.logits, dim=1), torch.stack(alone.logits, dim=1)[0]
    assert relative_error(got[0], padded) < 1e-4
    assert relative_error(got[1], stepwise[1]) < 1e-4
    static = model.generate(batch, attention_mask=mask, cache_implementation="static", **settings)
    assert torch.equal(static, together.sequences)


@pytest.mark.parametrize(("family", "domain", "size"), CASES)
def test_saving_the_loaded_model_round_trips(family, domain, size, compressed, tmp_path: Path) -> None:
    model = load(compressed(family, domain, size)[1])
    model.save_pretrained(tmp_path / "again")
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, a), (other, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    with torch.inference_mode():
        assert torch.equal(again.eval()(PROMPT).logits, model(PROMPT).logits)


BEAMS = [("llama", "post", 1), ("llama", "pre", "all"), ("gpt2", "post", 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("case", "dtype"),
    mostly_nightly(
        [(case, dtype) for case in BEAMS for dtype in DTYPES],
        lambda pair: pair[1] == torch.float32 or DTYPES.index(pair[1]) == BEAMS.index(pair[0]),
    ),
    ids=str,
)
def test_beams_in_every_dtype(case, dtype: torch.dtype, compressed) -> None:
    """Rows of the cache follow the beams: each continuation has the likelihood that the whole forward pass gives it."""
    model = load(compressed(*case)[1], dtype)
    found = model.generate(
        PROMPT, num_beams=3, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None,
        length_penalty=0.0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    ids = found.sequences
    with torch.inference_mode():
        log_p = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        likelihood = log_p.gather(-1, ids[:, 1:, None])[:, PROMPT.shape[1] - 1 :].sum((1, 2))
        got, expected = model(PROMPT).logits.float(), load(compressed(*case)[1])(PROMPT).logits
    assert relative_error(found.sequences_scores.float(), likelihood) < (1e-4 if dtype == torch.float32 else 0.02)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    assert relative_error(got, expected) < tolerance


@pytest.mark.parametrize("traced", mostly_nightly([False, True], lambda traced: not traced))
def test_chunked_prefill_into_a_static_cache(traced: bool, compressed) -> None:
    """The second chunk of a prompt must see the first one and not the empty rest of the cache; also where torch.compile
    traces the model around its attention.
    """
    for case in (
        (("llama", "post", 2), ("llama", "pre", "all"), ("qwen3", "pre", 1))
        if not traced
        else (("llama", "pre", "all"),)
    ):
        model = load(compressed(*case)[1])
        cache = StaticCache(config=model.config, max_cache_len=40)
        run = torch.compile(model, backend="eager") if traced else model
        with torch.no_grad():
            expected = model(PROMPT, use_cache=False).logits
            assert relative_error(run(PROMPT, use_cache=False).logits, expected) < 1e-6
            parts = [run(PROMPT[:, a:b], past_key_values=cache).logits for a, b in ((0, 12), (12, 13), (13, 20))]
        assert relative_error(torch.cat(parts, dim=1), expected) < 1e-5


def test_what_attention_cannot_do_is_refused(compressed, tiny) -> None:
    """A mask of another attention, and layers that are not compressed."""
    model = load(compressed("llama", "post", 1)[1])
    x = torch.zeros(1, 3, 48)
    cos_sin = model.model.rotary_emb(x, torch.arange(3)[None])
    with pytest.raises(UsageError, match="2 dimensions, expected a tensor of 4 dimensions"):
        model.model.layers[0].self_attn(x, position_embeddings=cos_sin, attention_mask=torch.ones(1, 3))
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"), attn_implementation="rotor")
    with pytest.raises(UsageError, match="LlamaAttention, which is not compressed"):
        model(PROMPT)

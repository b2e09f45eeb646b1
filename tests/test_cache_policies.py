"""Cache policies by name: stored in a checkpoint, bundled, given to commands; and what they cannot serve."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from support.policy_models import PolicyModels, prompts
from support.runs import FAST_EVALUATION, SHORT_TEXT, calibrated, reseal
from support.tiny_models import tiny_config
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

import rotor
from rotor import export
from rotor.errors import CheckpointError, RecipeError, UnsupportedModelError, UsageError
from rotor.policies import (
    FP8,
    GEAR,
    H2O,
    KIVI,
    PolicyLayer,
    Streaming,
    Tiers,
    Window,
    bundled_policies,
    cache_policy,
    describe_policy,
    find_policy,
    methods,
    policy_of,
    read_stored,
    use_cache_policy,
)
from rotor.policies.registry import find_method, method_names


@pytest.mark.parametrize("name", ["gear-2", "tiers-50"])
def test_a_policy_is_exported_loaded_saved_and_validated(name: str, tiny, tmp_path) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 2)
    out, again = tmp_path / "out", tmp_path / "again"
    export(run.folder, out, compression=0.3, cache=name, measure=False)
    stored = json.loads((out / "config.json").read_text())["quantization_config"]["cache"]
    assert stored == find_policy(name).as_dict()
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert policy_of(model) == find_policy(name)
    rows = prompts(1, 30)
    output = model.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=4, return_dict_in_generate=True, pad_token_id=0
    )
    assert isinstance(output.past_key_values.layers[0], PolicyLayer)
    model.save_pretrained(again)
    assert json.loads((again / "config.json").read_text())["quantization_config"]["cache"] == stored
    twice = AutoModelForCausalLM.from_pretrained(again).eval()
    same = twice.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=4, pad_token_id=0)
    assert torch.equal(same, output.sequences)
    rotor.use_cache_policy(model, "none")
    plain = model.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=4, return_dict_in_generate=True, pad_token_id=0
    )
    assert type(plain.past_key_values.layers[0]).__name__ == "DynamicLayer"
    result = rotor.validate(out, dtype="float32")
    assert not result.damaged
    assert result.summary["measured_kv_bytes_per_token"] == result.summary["cache"]["kv_bytes_per_token"]


@pytest.mark.parametrize(
    "section, text",
    [
        ({"method": "gears"}, "cache.method"),
        ({"method": "tiers", "layer_important": [0, 0, 0]}, "one for each of the model's 2 layers"),
    ],
)
def test_a_hostile_section_is_refused(section: object, text: str, policy_models: PolicyModels, tmp_path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(policy_models.checkpoint("post"), folder)
    data = json.loads((folder / "config.json").read_text())
    data["quantization_config"]["cache"] = section
    (folder / "config.json").write_text(json.dumps(data))
    reseal(folder)
    with pytest.raises(CheckpointError, match=text):
        AutoModelForCausalLM.from_pretrained(folder)


def test_what_a_policy_cannot_serve_is_said(policy_models: PolicyModels, tiny, tmp_path) -> None:
    model, rows = policy_models.model("pre"), prompts(1, 10)
    options = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 4, "pad_token_id": 0}
    with cache_policy(model, H2O()):
        with pytest.raises(UsageError, match="is a StaticLayer of 0 tokens"):
            model.generate(rows, cache_implementation="static", **options)
        full = DynamicCache(config=model.config)
        with torch.no_grad():
            cache_policy_off = policy_of(model)
            use_cache_policy(model, None)
            model(rows, past_key_values=full)
            use_cache_policy(model, cache_policy_off)
            with pytest.raises(UsageError, match="is a DynamicLayer of 10 tokens, expected an empty one"):
                model(rows[:, :1], past_key_values=full)
            cache = DynamicCache(config=model.config)
            model(rows, past_key_values=cache)
        with pytest.raises(UsageError, match="takes no tokens back"):
            cache.crop(-2)
    plain = policy_models.model("plain")
    with cache_policy(plain, Streaming(tokens=4)), pytest.raises(UsageError, match="takes no tokens back"):
        plain.generate(
            rows, assistant_model=policy_models.model("pre"), attention_mask=torch.ones_like(rows), max_new_tokens=6
        )
    with pytest.raises(UnsupportedModelError, match="DynamicSlidingWindowLayer"):
        use_cache_policy(AutoModelForCausalLM.from_pretrained(tiny("mistral")), Window())
    with pytest.raises(UnsupportedModelError, match="layer 0 is not compressed"):
        use_cache_policy(plain, Tiers())
    with pytest.raises(UsageError, match="rows are codes already"):
        use_cache_policy(policy_models.model("codes"), KIVI())
    with pytest.raises(RecipeError, match="did you mean 'gear-2'"):
        find_policy("gear2")
    for name in ("rotor.policies.eviction:Eviction", f"{'a' * 5000}.py:C"):
        with pytest.raises(RecipeError, match=r"cache.method: got .*, expected one of"):
            find_policy(name)
    holes = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1]])
    with cache_policy(plain, Window()), pytest.raises(UsageError, match="not on the left"):
        plain.generate(rows, **{**options, "attention_mask": holes})


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "gpt_oss", "jamba", "lfm2", "qwen3_next"])
def test_models_with_states_or_sinks_keep_their_caches_by_no_policy(name: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    for policy in ("gear-2", Window()):
        with pytest.raises(UnsupportedModelError) as error:
            use_cache_policy(model, policy)
        assert "Leave the policy out" in str(error.value) or "without a cache policy" in str(error.value)
        assert policy_of(model) is None


def test_bundled_policies_are_there_under_every_method() -> None:
    found = bundled_policies()
    assert {policy.method for policy in found.values()} == set(method_names())
    assert found["gear-l-2"] == GEAR(2, "kivi", sparsity=0.0, buffer=64)
    assert found["gear-l-4"] == GEAR(4, sparsity=0.0)  # section 4: KCVT at 4 bits
    assert found["kivi-2"] == KIVI(2, group=32, residual=128)
    assert found["fp8"] == FP8()
    assert find_policy("none") is None


def test_policies_of_papers_beside_the_bundled_ones() -> None:
    found = {file.stem: find_policy(str(file)) for file in (ROOT / "artifacts/studies/policies").glob("*.yaml")}
    assert found == {
        "kivi-2-64": KIVI(2, group=64, residual=64),  # GEAR section 4
        "kivi-4-64": KIVI(4, group=64, residual=64),
        "squeeze-h2o-20": H2O(share=0.2, squeeze=0.85),
        "squeeze-streaming-20": Streaming(share=0.2, squeeze=0.85),
        "fp8-tensor": FP8(scale="tensor"),
    }


def test_commands_take_a_policy_by_name(policy_models: PolicyModels, tiny, capsys, tmp_path) -> None:
    from support.command_line import rotor as command

    sizes, coded = [], policy_models.checkpoint("codes")
    for folder, name in ((tiny("llama"), "none"), (tiny("llama"), "window-50"), (coded, "streaming-50")):
        arguments = ("generate", folder, "def main(self, a, b): return a", "--cache", name, "--max-new-tokens", "4")
        code, out, _ = command(capsys, *arguments, "--json", "-q")
        assert code == 0
        sizes.append(json.loads(out)["kv_cache_bytes"])
    assert sizes[0] > sizes[1]
    code, out, _ = command(capsys, "recipes")
    assert code == 0
    assert "streaming-50" in out


def test_a_bundled_policy_is_shown_with_what_its_fields_mean(capsys, tmp_path) -> None:
    from support.command_line import rotor as command

    for name, policy in bundled_policies().items():
        shown = describe_policy(name)
        (tmp_path / "shown.yaml").write_text(shown)
        assert find_policy(str(tmp_path / "shown.yaml")) == policy
    code, out, _ = command(capsys, "recipes", "--show", "gear-2")
    assert code == 0
    assert "sparsity: s, the share of outliers; 0 is GEAR-L." in out
    assert "\nsparsity: 0.02\n" in out
    assert "method: gear\n" in out


def test_a_class_in_a_file_of_ones_own_is_a_policy(tiny, tmp_path, capsys, monkeypatch) -> None:
    """Exported, generated with and validated from the command line, without anything installed."""
    from support.command_line import rotor as command

    mine = tmp_path / "my_policy.py"
    mine.write_text(
        "from dataclasses import dataclass\nfrom rotor.policies import Window\n\n\n"
        "@dataclass(frozen=True)\nclass Newest(Window):\n    method = 'newest'\n    tokens: int | None = 7\n"
    )
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    run, out = calibrated(tiny("llama"), tmp_path / "run", "pre", 2), tmp_path / "out"
    name = f"{mine}:Newest"
    code, _, error = command(
        capsys, "export", run.folder, "-o", out, "--compression", "0.3", "--cache", name, "--no-measure", "-q"
    )
    assert code == 0, error
    stored = json.loads((out / "config.json").read_text())["quantization_config"]["cache"]
    assert stored["method"] == "my_policy:Newest"
    del sys.modules["my_policy"]
    assert (
        command(capsys, "generate", out, "def main(self): return a, b, c", "-q")[0] == 1
    )  # a checkpoint imports nothing
    for folder in (out, tiny("llama")):
        arguments = ("generate", folder, "def main(self): return a, b, c", "--cache", name, "--max-new-tokens", "3")
        code, said, error = command(capsys, *arguments, "--json", "-q")
        assert code == 0, error
    assert json.loads(said)["kv_cache_bytes"] == 2 * (2 * 7 * 64 * 4 + 7 * 4 * 4)  # 7 tokens and their places
    code, _, error = command(capsys, "generate", out, "def", "--cache", f"{tmp_path / 'no.py'}:Newest", "-q")
    assert code == 2
    assert "or FILE.py:Class" in error


def test_an_uncompressed_model_is_validated_with_a_policy(tiny, capsys) -> None:
    from support.command_line import rotor as command

    values = []
    changed = [item for item in (*FAST_EVALUATION, *SHORT_TEXT) if item.startswith("evaluation.")]
    settings = [part for item in changed for part in ("--set", item)]
    for name in ("per-token-4", "per-token-2", "kvtc-2"):
        code, out, error = command(capsys, "validate", tiny("llama"), "--cache", name, *settings, "--json", "-q")
        assert code == 0, error
        values.append(json.loads(out)["summary"])
    losses, sizes = zip(*((v["accuracy"]["kl_div"], v["kv_bytes_per_token"]["after"]) for v in values), strict=True)
    assert 0 < losses[0] < losses[1]
    numbers = 2 * 2 * 64  # two layers, keys and values, four heads of 16
    assert sizes[:2] == tuple(numbers * (bits / 8 + 4 / 16) for bits in (4, 2))
    assert values[0]["kv_bytes_per_token"]["before"] == numbers * 4


def test_the_policy_of_contributing_serves_from_anywhere(policy_models: PolicyModels, tmp_path, monkeypatch) -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text().split("## A cache policy")[1]
    code, recipe = (part.split("```")[0] for part in (text.split("```python")[1], text.split("```yaml")[1]))
    (tmp_path / "my_module.py").write_text(code)
    (tmp_path / "mine.yaml").write_text(recipe.replace("method: every-second ", "method: my_module:EverySecond "))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckpointError, match="is not imported"):
        read_stored({"method": "my_module:EverySecond"})  # a checkpoint imports nothing
    policy = find_policy(str(tmp_path / "mine.yaml"))
    assert read_stored(policy.as_dict()) == policy
    model, rows = policy_models.model("plain"), prompts(1, 12)
    with cache_policy(model, policy), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(rows, past_key_values=cache)
    assert cache.layers[0].places[0, 0].tolist() == [0, 2, 8, 9, 10, 11]
    # In rotor itself the file's name is the method's.
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    (tmp_path / "my_module.py").rename(tmp_path / "every_second.py")
    method_names.cache_clear()
    assert find_method("every-second", trusted=False).method == "every-second"
    monkeypatch.undo()
    method_names.cache_clear()

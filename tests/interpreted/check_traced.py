"""torch.compile over models that the kernels serve, in Triton's interpreter: one graph with rotor's operators."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from coded_models import write_pair
from conftest import build_tiny, calibrated, shortcuts  # noqa: F401
from ragged import layer, random_case
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, CompileConfig

from rotor.export.export import export
from rotor.kernels import operators
from rotor.kernels.defaults import default_layer

CASES = [
    ("llama", "post", 1, False),
    pytest.param(("llama", "pre", 2, True), marks=pytest.mark.slow),
    pytest.param(("llama", "post", 1, True), marks=pytest.mark.slow),
]
PROMPT = torch.randint(1, 4096, (2, 13), generator=torch.Generator().manual_seed(5))
LAYERS = 2


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory):
    """loaded(case) -> a compressed model in float32, made once."""
    made = {}

    def get(case: Any) -> Any:
        family, domain, size, coded = case
        if case not in made:
            folder = tmp_path_factory.mktemp("model")
            source = build_tiny(family, folder / "m")
            if coded:
                made[case] = write_pair(source, folder, domain, size).load()
            else:
                run = calibrated(source, folder / "run", domain, size).folder
                export(run, folder / "out", compression=0.45, measure=False)
                made[case] = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32).eval()
        return made[case]

    return get


def operators_in(graph: Any) -> list[Any]:
    """Those of rotor, in their order."""
    return [node.target for node in graph.graph.nodes if "rotor." in str(node.target)]


def logits_of(model: Any, config: CompileConfig | None) -> torch.Tensor:
    """Logits of three generated tokens with a static cache, the steps of decoding compiled by `config`."""
    mask = torch.ones_like(PROMPT)
    mask[0, :5] = 0
    if config is not None:
        config._compile_all_devices = True
    output = model.generate(
        PROMPT,
        attention_mask=mask,
        max_new_tokens=3,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=config,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_generate_with_a_static_cache_is_one_graph_with_the_kernels_in_it(case, loaded, monkeypatch) -> None:
    """As `generate` compiles a step of decoding on a GPU; at other lengths of the cache it is the same graph."""
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    model = loaded(case)
    graphs = []

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(operators_in(graph))
        return graph.forward

    assert torch.equal(*(logits_of(model, config) for config in (None, CompileConfig(backend=backend, fullgraph=True))))
    ops = torch.ops.rotor
    expected = [ops.rotate_and_project.default] if case[1] == "post" else []
    if case[3]:
        expected = [ops.rotate_and_pack.default if case[1] == "post" else ops.pack_rows.default]
    assert graphs == [[*expected, ops.attention.default] * LAYERS]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="inductor needs a C++ compiler on a CPU, and there is none",
)
def test_what_inductor_compiles_calls_the_operators(loaded, monkeypatch) -> None:
    """The compiler that `generate` uses by default, for a step of decoding on this CPU."""
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    model, called = loaded(CASES[0]), []
    attend = operators.attend
    monkeypatch.setattr(operators, "attend", lambda *given: called.append("attend") or attend(*given))
    plain = logits_of(model, None)
    assert not called
    torch.compiler.reset()
    compiled = logits_of(model, CompileConfig(backend="inductor", fullgraph=True))
    torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=1e-4)
    assert called == ["attend"] * (LAYERS * 2)  # two steps after the prompt


def arguments(domain: str, coded: bool, seq_len: int, device: str) -> tuple[Any, ...]:
    """What the operator of attention takes for a random layer, with a mask for all its keys."""
    if coded:
        case: Any = random_coded_case(coded_layer(domain, 2, (MIXTURES[0], MIXTURES[4])), 2, 32, 2, seq_len, 40)
        rotation, constant = case.floats.key_rotation, case.constant_key
    else:
        case = random_case(layer(domain, 2, (16, 24), (16, 8)), 2, 32, 2, seq_len, 40)
        rotation, constant = case.key_rotation, None
    text = operators.describe(case.layout, "stream", default_layer(case.layout, 32), 2, 32)
    mask = torch.ones(2, 1, seq_len, 40, dtype=torch.bool)
    rows = case.key[:, None], case.value[:, None]
    tensors: Any = case.query, *rows, mask, case.query_basis, *(rotation or (None, None)), constant
    if device != "cpu":  # of fake tensors
        tensors = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=device) for x in tensors]
    return *tensors, 0.2, None, text


@pytest.mark.parametrize("seq_len", [1, 3])
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_operators_keep_what_they_declare(domain, coded, seq_len) -> None:
    """Schema and shapes, on this device and on a GPU that need not be there."""
    given = arguments(domain, coded, seq_len, "cpu")
    library.opcheck(operators.attention, given, test_utils=("test_schema", "test_faketensor"))
    with FakeTensorMode():
        of_a_gpu = operators.attention(*arguments(domain, coded, seq_len, "cuda"))
    got = operators.attention(*given)
    assert of_a_gpu.device.type == "cuda"
    assert (of_a_gpu.shape, of_a_gpu.dtype, of_a_gpu.stride()) == (got.shape, got.dtype, got.stride())


def test_projections_and_rows_keep_what_they_declare() -> None:
    layout = coded_layer("post", 2, (MIXTURES[0], MIXTURES[4]))
    text = operators.describe(layout, "stream", default_layer(layout, 32), 2, 32)
    query, key, table = torch.randn(2, 3, 4, 32), torch.randn(2, 3, 2, 32), torch.randn(1, 3, 32)
    basis, shift = torch.randn(2, 64, layout.qk_width), torch.randn(layout.qk_width)
    checks = ("test_schema", "test_faketensor")
    given = table, table, basis[0], basis[1]
    library.opcheck(operators.rotate_and_project, (query, key, *given, text), test_utils=checks)
    value = torch.randn(2, 3, layout.v_width)
    library.opcheck(operators.rotate_and_pack, (query, key, value, *given, shift, text), test_utils=checks)
    rows = torch.randn(2, 1, 3, layout.qk_width), torch.randn(2, 1, 3, layout.v_width)
    library.opcheck(operators.pack_rows, (*rows, text), test_utils=checks)


def test_compiled_code_may_put_another_mask_where_one_was() -> None:
    """Without a new version, as kernels of the compiler's write: the operator remembers nothing."""
    given = list(arguments("none", False, 1, "cpu"))
    operators.attention(*given)
    given[3].untyped_storage().copy_(torch.zeros(2, 1, 1, 40, dtype=torch.bool).untyped_storage())
    assert not operators.attention(*given).any()


def test_a_layer_as_text_is_read_as_it_was() -> None:
    for layout in (layer("pre", 2, (16, 24), (16, 8)), coded_layer("post", 1, (MIXTURES[0], MIXTURES[4]))):
        kernels = default_layer(layout, 32)
        text = operators.describe(layout, "lpt", kernels, 3, 32)
        assert operators.described(text) == (layout, "lpt", kernels, 3, 32)


def test_gradients_and_the_variable_keep_the_kernels_out_of_a_trace(loaded, monkeypatch) -> None:
    model, graphs = loaded(CASES[0]), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(operators_in(graph))
        return graph.forward

    for choice, gradients in (("reference", False), ("triton", True)):
        monkeypatch.setenv("ROTOR_ATTENTION", choice)
        torch.compiler.reset()
        with torch.set_grad_enabled(gradients):
            torch.compile(model, backend=backend, fullgraph=True)(PROMPT)
    assert graphs == [[], []]

"""Layer by layer, with all weights in memory or one layer of them: the same numbers as a whole forward pass."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.compare import close, relative_error
from support.quick import mostly_nightly
from support.runs import FAST_EVALUATION, SHORT_TEXT
from support.tiny_models import CONFIGS, build_tiny

from rotor import calibrate, export
from rotor.calibration.moments import pack_symmetric, unpack_symmetric
from rotor.checked import plain
from rotor.errors import CheckpointError, UsageError
from rotor.models import hardware, layerwise, memory
from rotor.models.layerwise import LayerwiseModel, new_states
from rotor.models.loading import load_model
from rotor.models.memory import Estimate, Estimates, available_host_bytes, stream_weights
from rotor.models.outline import ModelOutline
from rotor.models.source import Checkpoint
from rotor.models.weights import StreamedWeights
from rotor.search.evaluation.scoring import score
from rotor.search.table import RankTable

CPU = torch.device("cpu")
SMALL = ["tokens.source=random", "tokens.count=512", "tokens.seq_len=64", "ranks.multiple_of=4"]
SMALL += ["ranks.probe_tokens=256"]


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return torch.randint(1, 4096, (5, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory):
    """sharded(family) -> a bfloat16 model whose layers are spread over several shards."""
    folder = tmp_path_factory.mktemp("sharded")
    return cache(lambda family: build_tiny(family, folder / family, torch.bfloat16, max_shard_size="100KB"))


def streamed(folder: Path, dtype: torch.dtype = torch.float32, batch_tokens: int = 80) -> LayerwiseModel:
    return LayerwiseModel(StreamedWeights(Checkpoint(folder), CPU, dtype), batch_tokens)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "dtype", mostly_nightly([torch.float32, torch.bfloat16], lambda dtype: dtype == torch.float32), ids=str
)
def test_same_logits_as_a_whole_forward_pass(family: str, dtype: torch.dtype, sharded, rows: torch.Tensor) -> None:
    """The same operations on the same batches, in another order."""
    folder = sharded(family)
    assert len(Checkpoint(folder).files) > 2
    model = load_model(folder, CPU, dtype)
    with torch.inference_mode():
        expected = torch.cat([model(part, use_cache=False).logits for part in rows.split(2)])
    for network in (LayerwiseModel.of(model, 80), streamed(folder, dtype)):
        states = network.final_states(rows)
        with network.head() as head:
            got = torch.cat([head(part) for part in states.split(2)])
        assert relative_error(got.float(), expected.float()) < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_only_the_unit_in_use_is_in_memory(family: str, sharded, rows: torch.Tensor) -> None:
    network = streamed(sharded(family))

    def loaded() -> set[str]:
        return {name for name, parameter in network.model.named_parameters() if not parameter.is_meta}

    rest = loaded()
    assert rest < {name for name, _ in network.model.named_parameters()}
    assert sum(network.model.get_parameter(name).numel() for name in rest) < 20000  # norms, learned positions
    with network.layer(1) as layer:
        assert len(loaded() - rest) == len(list(layer.parameters()))
    with network.head():
        assert len(loaded() - rest) == 1
    network.final_states(rows)
    assert loaded() == rest
    for name, buffer in network.model.named_buffers():
        assert not buffer.is_meta, name


@pytest.mark.nightly
def test_calibration_and_measuring_do_not_depend_on_where_weights_are(sharded, tmp_path: Path) -> None:
    """Nor does the text that the model writes."""
    folder = sharded("qwen3")
    settings = [*SMALL, *FAST_EVALUATION, *SHORT_TEXT, "evaluation.metric=kl_div", "tokens.source=synthetic"]
    runs = {
        offload: calibrate(folder, tmp_path / offload, "rotor-16", settings, offload=offload)
        for offload in ("never", "always")
    }
    reports = [
        export(run.folder, tmp_path / f"out-{offload}", compression=0.4, offload=offload).report
        for offload, run in runs.items()
    ]
    kept = [{k: v for k, v in report.items() if k not in ("run", "tensors", "files")} for report in reports]
    assert close(*kept)
    tables = [RankTable.latest(run) for run in runs.values()]
    assert close(*([plain(point) for point in table.points] for table in tables))


def test_parts_of_a_row_score_like_the_whole(tiny) -> None:
    """There is room for the logits of 1,024 positions only."""
    network = LayerwiseModel.of(load_model(tiny("llama"), CPU, torch.float32), batch_tokens=1100)
    rows = torch.randint(1, 4096, (2, 1100), generator=torch.Generator().manual_seed(0))
    assert [p.stop - p.start for _, p in layerwise.logit_batches(network, rows)] == [1024, 75] * 2
    parts = score(network, rows)
    with torch.inference_mode():
        logits = network.model(rows).logits[:, :-1].double().log_softmax(-1)
    assert (parts.top1 == logits.argmax(-1)).double().mean() > 0.999  # sums may have another order
    nll = -logits.gather(-1, rows[:, 1:, None])[..., 0]
    torch.testing.assert_close(parts.nll.double(), nll, rtol=1e-5, atol=0)


def test_large_hidden_states_go_to_a_file_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "STATES_IN_MEMORY_BYTES", 100)
    states = new_states((3, 4, 5), torch.float32, folder=tmp_path)
    states.copy_(torch.arange(60.0).reshape(3, 4, 5))
    assert list(tmp_path.iterdir()) == []
    assert states.sum() == 59 * 30
    kept = new_states((2, 3), torch.bfloat16, tmp_path / "kept")
    kept.fill_(2)
    del kept
    assert new_states((2, 3), torch.bfloat16, tmp_path / "kept").tolist() == [[2, 2, 2], [2, 2, 2]]


def test_tensors_that_do_not_fit_the_config_are_named(tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    network = streamed(folder)
    with pytest.raises(CheckpointError, match=r"part 1: missing on loading: model\.layers\.1\.mlp\.up_proj\.weight"):
        network.final_states(torch.ones(1, 4, dtype=torch.int64))
    tensors["model.layers.1.mlp.up_proj.weight"] = lost[:-1]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"part 1: mismatched keys on loading: model\.layers\.1\.mlp\.up_proj"):
        streamed(folder).final_states(torch.ones(1, 4, dtype=torch.int64))


def test_what_needs_the_whole_model_is_refused_before_any_work(tiny, tmp_path: Path) -> None:
    model, out = tiny("llama"), tmp_path / "run"
    with pytest.raises(UsageError, match=r"ranks\.method fisher .*--offload always was given") as caught:
        calibrate(model, out, "palu", ["tokens.source=random"], offload="always")
    assert "--set ranks.method=global" in caught.value.hint
    with pytest.raises(UsageError, match="--offload: got 'sometimes', expected one of auto, never, always"):
        calibrate(model, out, "fdc", offload="sometimes")
    assert list(tmp_path.iterdir()) == []


def test_weights_are_read_layer_by_layer_when_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 10_000_000_000)
    small, large = (Estimate({"weights": size}, {}) for size in (2_000_000_000, 9_000_000_000))
    assert stream_weights("auto", Estimates(small, small), CPU)[0] is False
    stream, line = stream_weights("auto", Estimates(large, small), CPU)
    assert stream
    there = "10.0 GB available, of which at most 80% are filled"
    assert line == f"memory: about 2.0 GB, one layer of weights at a time (weights 2.0); {there}"
    assert "this may not be enough" in stream_weights("never", Estimates(large, small), CPU)[1]
    with pytest.raises(UsageError, match=rf"x needs the whole model in memory, but it takes 9\.0 GB \({there}\)"):
        stream_weights("auto", Estimates(large, small), CPU, ("x", "y"))


def test_available_memory_is_that_of_the_tightest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_host_bytes() > 0
    used = memory.resource.getrusage(memory.resource.RUSAGE_SELF).ru_maxrss << 10
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (used + 1000, used + 1000))
    assert available_host_bytes() <= 1000


@pytest.mark.parametrize("family", CONFIGS)
def test_sizes_count_every_tensor_once(family: str, tiny) -> None:
    checkpoint = Checkpoint(tiny(family))
    config, sizes = checkpoint.config, ModelOutline.of(checkpoint)
    assert sizes.parameters == sum(checkpoint.tensor(name).numel() for name in checkpoint.names)
    assert min(sizes.layers) > 0
    assert len(sizes.vocabulary) == (1 if config.tie_word_embeddings else 2)
    assert sizes.rest < sizes.vocabulary[0]


def test_packed_moments_are_one_triangle_in_float32() -> None:
    half = torch.randn(3, 2, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    packed = pack_symmetric(half + half.mT)
    assert (packed.shape, packed.dtype) == ((3, 2, 45), torch.float32)
    torch.testing.assert_close(unpack_symmetric(packed), half + half.mT, rtol=1e-6, atol=1e-6)


def test_products_keep_the_digits_of_float32_and_the_precision_is_given_back() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(300, 300, generator=generator) for _ in range(2))
    expected = left.double() @ right.double()
    before = torch.get_float32_matmul_precision()
    with hardware.fast_products(torch.device("cpu")):
        assert (left @ right - expected).norm() < hardware.PRODUCT_ERROR * expected.norm()
    assert torch.get_float32_matmul_precision() == before


def test_products_stay_where_they_are_if_onednn_would_round_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "PRODUCT_ERROR", 0.0)  # as if it were a CPU with AMX
    hardware._onednn_keeps_digits.cache_clear()
    try:
        with hardware.fast_products(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
    finally:
        hardware._onednn_keeps_digits.cache_clear()

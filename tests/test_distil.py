"""Bases and codes trained by distillation: what is trained is what is folded, and the loss falls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.compare import relative_error
from support.paths import DEMO_MODEL
from support.quick import mostly_nightly

from rotor.calibration.allocation.bits import BitsPath
from rotor.calibration.bases.kq import closed_form
from rotor.calibration.calibrate import calibrate
from rotor.calibration.capture import observed_attention
from rotor.calibration.codes.quantiser import measure_channels
from rotor.calibration.codes.side import FITTED_BITS, SideCodes
from rotor.calibration.codes.training import TrainedCode
from rotor.calibration.distil import DistilledModel
from rotor.calibration.run import DISTILLED, Run
from rotor.checkpoint.channels import Channels
from rotor.checkpoint.folding import fold_code
from rotor.errors import CheckpointError, RecipeError, UsageError
from rotor.kernels.rows import pack, unpack
from rotor.models.device_plan import DevicePlan
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import weights_of
from rotor.models.source import Checkpoint
from rotor.search.compressible import CompressibleModel
from rotor.search.evaluation.scoring import batch_logits, position_kl_div

CHANNELS = Channels(n12=1, n8=2, n6=1, n4=3, n2=1)
QUICK = [
    *("tokens.count=2048", "tokens.seq_len=128", "tokens.source=random", "codes.tokens=2048"),
    *("distil.steps=48", "distil.tokens=512", "exact.first=0", "exact.newest=0"),
]
CPU = torch.device("cpu")
COMPRESSIONS = {2: (0.5, 0.7), 5: (0.85, 0.9)}
"""By the number of layers: of a tiny model, whose latents have few channels to drop, and of the bundled one."""


def normal(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(groups: int = 2, dim: int = 12) -> tuple[torch.Tensor, TrainedCode]:
    """Samples [groups, tokens, dim] that have a mean, and their code."""
    x = normal(groups, 512, dim, seed=0) @ normal(groups, dim, dim, seed=1) + 3 * normal(groups, 1, dim, seed=2)
    read = normal(groups, 64, dim, seed=3)
    pair = closed_form(read.mT @ read, x.mT @ x)
    fits = [measure_channels(own @ pair.encode[group], None, FITTED_BITS) for group, own in enumerate(x)]
    variance, *at_widths = zip(*fits, strict=True)
    mean, scale, distortion = (torch.stack(parts, dim=1) for parts in at_widths)
    weight = pair.singular_values / 2
    codes = SideCodes(weight, torch.stack(variance), mean, scale, distortion, torch.zeros_like(weight))
    return x, TrainedCode(pair, codes, CPU)


@pytest.mark.parametrize("mixed", [False, True])
def test_what_is_trained_is_what_is_folded(mixed: bool):
    """Through the bytes of a row: what training computes with equals what a checkpoint stores and reads."""
    x, side = fitted()
    if mixed:
        with torch.no_grad():
            for index, mix in enumerate(side.mixes):
                mix += 0.1 * normal(*mix.shape, seed=5 + index).float()
            side.means += 0.1
            side.log_scales += 0.05
    expected = side.through(x.float(), [CHANNELS, CHANNELS]).double()
    pair, codes = side.trained()
    for group, own in enumerate(x):
        order, code = codes.code(group, CHANNELS)
        assert pair.shift is not None
        assert pair.constant is not None
        assert mixed == bool(pair.shift.any())
        folded = fold_code(
            *(basis[group][:, order] for basis in (pair.encode, pair.decode)),
            code,
            CHANNELS,
            pair.shift[group, order],
            pair.constant[group],
        )
        row = unpack(pack(own @ folded.encode + folded.shift, CHANNELS), CHANNELS.split, torch.float64)
        read = row @ folded.decode.T + folded.constant
        differs = (read - expected[group]).abs().amax(-1) > 1e-3 * read.abs().max()  # a step, by float32's rounding
        assert differs.double().mean() < 0.02
        assert relative_error(read[~differs], expected[group][~differs]) < 1e-4


def test_rounding_passes_gradients_and_the_clip_stops_them():
    x, side = fitted(groups=1)
    far = torch.cat([x[:, :1], 1e6 * x[:, :1]], 1).float().requires_grad_()
    side.through(far, [CHANNELS]).sum().backward()
    assert far.grad is not None
    assert far.grad[0, 0].abs().max() > 0.01
    assert not far.grad[0, 1].any()


@pytest.fixture(scope="module", params=["llama", pytest.param("demo", marks=pytest.mark.nightly)])
def run(request: pytest.FixtureRequest, tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of a tiny model; nightly of the bundled one too, which takes a minute."""
    out = tmp_path_factory.mktemp("distilled") / "run"
    if request.param == "demo":
        return calibrate(DEMO_MODEL, out, "rotor-distilled", QUICK)
    short = ["tokens.count=1024", "codes.tokens=1024", "distil.steps=6", "distil.tokens=256"]
    return calibrate(tiny(request.param), out, "rotor-distilled", [*QUICK, *short])


def kl_div(run: Run, rows: torch.Tensor, compression: float) -> float:
    """Of the model that an export would write, in float32."""
    codes = [run.layer_codes(layer) for layer in range(run.shape.num_layers)]
    plan = BitsPath(codes, run.shape, run.recipe.codes.bits, 2).at_compression(compression)
    assert plan is not None
    network = CompressibleModel(
        Checkpoint(run.model_folder), DevicePlan(CPU, torch.float32), rewrite_dtype=torch.float32
    )
    expected = batch_logits(network, rows)
    network.compress(run.bases(plan.channels), plan.ranks)
    return float(position_kl_div(expected.flatten(0, 1), batch_logits(network, rows).flatten(0, 1)).mean())


def test_the_loss_falls_on_other_rows_and_the_exact_bases_stay(run: Run):
    rows = torch.randint(300, 4000, (4, 128), generator=torch.Generator().manual_seed(9))
    before = replace(run, recipe=replace(run.recipe, distil=replace(run.recipe.distil, steps=0)))
    if run.shape.num_layers > 2:  # random weights of a tiny model leave nothing to train
        # So few tokens gain where much is lost; at 0.85 removed they lose.
        compression = COMPRESSIONS[run.shape.num_layers][1]
        assert kl_div(run, rows, compression) < 0.9 * kl_div(before, rows, compression)
    exact = run.layer_bases(0).latents[0]
    identity = torch.eye(exact.encode.shape[1], dtype=torch.float64).expand(len(exact.encode), -1, -1)
    torch.testing.assert_close(exact.encode @ exact.decode.mT, identity)
    if run.shape.num_layers > 2:
        trained = run.layer_bases(0, DISTILLED).latents[0]
        assert relative_error(trained.encode, exact.encode) > 1e-4


@pytest.mark.parametrize("index", [0, 1])
def test_attention_while_training_is_that_of_the_compressed_model(run: Run, index: int):
    """But for numbers on the edge of two levels: one in the first layer moves those behind it over their own edges."""
    layers, compression = range(run.shape.num_layers), COMPRESSIONS[run.shape.num_layers][index]
    codes = [run.layer_codes(layer) for layer in layers]
    path = BitsPath(codes, run.shape, run.recipe.codes.bits, 2)
    plan = path.at_compression(compression)
    assert plan is not None
    network = LayerwiseModel.of(weights_of(Checkpoint(run.model_folder), CPU, torch.float32, False).model)
    model = DistilledModel(network, run.form, [run.layer_bases(layer) for layer in layers], codes, path)
    model.channels = plan.channels or []
    rows = torch.randint(300, 4000, (2, 128), generator=torch.Generator().manual_seed(1))
    uncompressed = batch_logits(network, rows)
    with observed_attention(network.model, network.family, network.shape, layers, read=model.read):
        found = batch_logits(network, rows)
    compressed = CompressibleModel(
        Checkpoint(run.model_folder), DevicePlan(CPU, torch.float32), rewrite_dtype=torch.float32
    )
    before = replace(run, recipe=replace(run.recipe, distil=replace(run.recipe.distil, steps=0)))
    compressed.compress(before.bases(plan.channels), plan.ranks)
    expected = batch_logits(compressed, rows)
    assert relative_error(found, expected) < 0.1 * relative_error(uncompressed, expected)


@pytest.mark.parametrize(
    "family", mostly_nightly(["qwen3", "gemma2", "gpt2", "gpt_neox"], lambda family: family in ("qwen3", "gpt2"))
)
def test_every_kind_of_attention_can_be_trained(tiny, family: str, tmp_path: Path):
    quick = ["tokens.count=512", "tokens.seq_len=64", "codes.tokens=512", "distil.steps=2", "distil.tokens=128"]
    found = calibrate(tiny(family), tmp_path / "run", "rotor-distilled", [*quick, "tokens.source=random"])
    assert found.bases([[]] * found.shape.num_layers) is not None
    for layer in range(found.shape.num_layers):
        trained, before = (found.layer_bases(layer, kind).latents[-1] for kind in (DISTILLED, "bases"))
        assert relative_error(trained.encode, before.encode) > 0
        found.layer_codes(layer, DISTILLED)


def test_what_cannot_be_trained_is_refused(run: Run, tmp_path: Path):
    with pytest.raises(RecipeError, match=r"distil.steps"):
        calibrate(run.model_folder, tmp_path / "run", "fdc", ["distil.steps=4"])
    with pytest.raises(UsageError, match=r"distil\.steps 48 needs the whole model in memory") as error:
        calibrate(run.model_folder, tmp_path / "run", "rotor-distilled", QUICK, offload="always")
    assert "--set distil.steps=0" in str(error.value)
    path = run.folder / DISTILLED / "layer-0000.safetensors"
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[:-4] + b"\0\0\0\0")
        with pytest.raises(CheckpointError, match="layer-0000"):
            Run.open(run.folder).layer_bases(0, DISTILLED)
    finally:
        path.write_bytes(kept)


def test_plans_are_those_of_calibration(run: Run):
    """Distillation leaves alone what bits are allocated by."""
    for layer in range(run.shape.num_layers):
        for codes, trained in zip(run.layer_codes(layer).sides, run.layer_codes(layer, DISTILLED).sides, strict=True):
            assert all(torch.equal(getattr(codes, name), getattr(trained, name)) for name in ("weight", "variance"))
            assert torch.equal(codes.distortion, trained.distortion)
            assert not torch.equal(codes.scale, trained.scale)

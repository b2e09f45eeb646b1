"""Bits of a model by bytes: rows of any width and rows of one, as far as checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHORT_TEXT, calibrated

from rotor.allocation.bits import BitsPath
from rotor.allocation.plan import RankPlan
from rotor.calibration.calibrate import calibrate
from rotor.codes.allocation import equal_path
from rotor.codes.layer import MEASURED, LayerCodes, SideCodes, channels_bytes
from rotor.errors import RecipeError
from rotor.export.export import export
from rotor.format.layout import AttentionShape
from rotor.models.compressed import CompressedCheckpoint
from rotor.recipe import load_recipe, override
from rotor.search.measurer import rank_path

UNIFORM = "ranks.rows=uniform"
SHAPE = AttentionShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64)


def test_as_many_words_for_each_curve_are_those_that_each_can_fill() -> None:
    inf = np.inf
    path = equal_path([np.array([inf, 5.0, inf, 2.0, 1.0]), np.array([inf, 6.0, 4.0, 9.0, 0.0])])
    expected = [[0, 0]] * 2 + [[1, 1]] * 6 + [[4, 4]]
    assert [path.split(words) for words in range(9)] == expected
    assert path.loss.tolist() == [inf] * 2 + [11.0] * 6 + [1.0]  # three words each lose as much: not better than one


def side(groups: int, columns: int, size: float, seed: int) -> SideCodes:
    """Columns whose loss falls fast, each bit of which leaves a quarter of it."""
    generator = torch.Generator().manual_seed(seed)
    decay = torch.exp(-torch.arange(columns, dtype=torch.float64) / (columns / 8))
    variance = size * decay * (0.5 + torch.rand(groups, columns, generator=generator, dtype=torch.float64))
    distortion = torch.tensor([4.0**-bits for bits in MEASURED], dtype=torch.float64)
    nothing = torch.zeros(len(MEASURED), groups, columns, dtype=torch.float64)
    spread = distortion[:, None, None].expand_as(nothing).clone()
    return SideCodes(torch.ones(groups, columns, dtype=torch.float64), variance, nothing, nothing + 1, spread)


def predicted_loss(layers: list[LayerCodes], plan: RankPlan) -> float:
    assert plan.channels is not None
    total = 0.0
    for layer, groups in zip(layers, plan.channels, strict=True):
        for group, pair in enumerate(groups):
            for own, channels in zip((layer.qk, layer.vo), pair, strict=True):
                _, code = own.code(group, channels)
                losses = own.losses(group, MEASURED)[:, own.order(group)]
                index = torch.tensor([MEASURED.index(bits) for bits in code.bits.tolist()])
                total += float(losses[index, torch.arange(len(index))].sum())
    return total


def layer_codes(groups: int, columns: int, size: float, seed: int) -> LayerCodes:
    return LayerCodes(side(groups, columns, size, seed), side(groups, columns, size, seed + 10))


@pytest.mark.parametrize(("widths", "element_bytes"), [((0, 4, 8), 2), ((0, 4, 8, 12, 16), 4)], ids=str)
def test_codes_of_one_width_lose_no_less_than_ragged_ones(widths: tuple[int, ...], element_bytes: int) -> None:
    """Layers of very different worth: each stores as many bytes, all of them; a target is met by the most that do."""
    layers = [layer_codes(1, 32, size, seed) for seed, size in ((0, 1.0), (2, 100.0))]
    uniform, ragged = (BitsPath(layers, SHAPE, widths, element_bytes, rows) for rows in (True, False))
    before = 2 * 2 * 16 * element_bytes
    for target in (0.6, 0.7, 0.85):
        plan, free = uniform.at_compression(target), ragged.at_compression(target)
        assert plan is not None
        assert free is not None
        assert plan.channels is not None
        sizes = [channels_bytes([layer]) for layer in plan.channels]
        assert sizes[0] == sizes[1]
        assert (1 - target) * before - 16 < sizes[0] <= (1 - target) * before
        assert predicted_loss(layers, plan) >= predicted_loss(layers, free)
    free = ragged.at_compression(0.6)
    assert free is not None
    assert len({channels_bytes([layer]) for layer in free.channels or []}) == 2
    for plan in uniform.steps():
        sizes = [channels_bytes([layer]) for layer in plan.channels or []]
        assert sizes == [sizes[0]] * 2
    assert uniform.at_compression(0.999) is None


@pytest.fixture(scope="module")
def coded_run(tiny, tmp_path_factory: pytest.TempPathFactory):
    overrides = ["tokens.count=1024", "tokens.seq_len=64", "codes.tokens=512", "evaluation.seq_len=128", *SHORT_TEXT]
    return calibrate(tiny("gemma3_text"), tmp_path_factory.mktemp("uniform") / "run", "rotor", overrides)


def test_a_checkpoint_of_codes_has_rows_of_one_width(coded_run, tmp_path: Path) -> None:
    """gemma3_text mixes windows and full attention, for which vLLM pads rows to the widest: nothing is left to pad."""
    for rows, kinds in (("ragged", 2), ("uniform", 1)):
        out = export(
            coded_run.folder, tmp_path / rows, compression=0.8, overrides=[f"ranks.rows={rows}"], measure=False
        )
        checkpoint = CompressedCheckpoint(out.folder)
        sizes = [sum(layout.row_bytes(4)) for layout in checkpoint.layouts]
        assert len(set(sizes)) == kinds
        assert out.report["compression"]["stored"] >= 0.8
        assert all(layout.coded for layout in checkpoint.layouts)


def test_uniform_ranks_have_rows_of_one_width(tiny, tmp_path: Path) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1)
    path = rank_path(run, override(run.recipe, [UNIFORM, "ranks.method=uniform"]))
    assert all(len({sum(map(sum, layer)) for layer in plan.rounded}) == 1 for plan in path.steps())


def test_methods_that_give_each_layer_its_own_width_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"ranks\.rows.*ragged, as ranks\.method is removal-rate: uniform, or bits"):
        load_recipe("fdc", [UNIFORM])
    assert load_recipe("rotor", [UNIFORM]).ranks.uniform_rows


WIDE = AttentionShape(num_layers=2, num_heads=16, num_kv_heads=4, head_dim=32, hidden_size=512, rotary_dim=32)


def test_groups_rows_begin_where_sectors_do() -> None:
    """Of several groups, 16 or 32 bytes; one plane more costs nothing where there is room."""
    layers = [layer_codes(4, 32, 1.0, seed) for seed in range(2)]
    for plan in BitsPath(layers, WIDE, (0, 4, 8), 2).steps():
        for channels in (own for layer in plan.channels or [] for pair in layer for own in pair):
            assert channels.width in {32, *range(64, 257, 64)}


def test_lighter_plans_have_a_plane_less_in_one_layer() -> None:
    layers = [layer_codes(1, 128, 1.0, seed) for seed in range(2)]
    path = BitsPath(layers, WIDE, (0, 4, 8), 2)
    plan = path.at_compression(0.9)
    assert plan is not None
    lighter = path.lighter(plan)
    assert len(lighter) == 2
    before = [channels_bytes([layer]) for layer in plan.channels or []]
    for other in lighter:
        less = [a - channels_bytes([layer]) for a, layer in zip(before, other.channels or [], strict=True)]
        assert sorted(less) == [0, 8]
    losses = [predicted_loss(layers, other) for other in lighter]
    assert losses == sorted(losses)
    assert BitsPath(layers, WIDE, (0, 4, 8), 2, uniform_rows=True).lighter(plan) == []

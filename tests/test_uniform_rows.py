"""Rows of one width in all layers: the least loss of each width, as far as checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import SHORT_TEXT, calibrated
from test_priced_bits import predicted_loss, side

from rotor.allocation.bits import BitsPath
from rotor.calibration.calibrate import calibrate
from rotor.codes.allocation import equal_path
from rotor.codes.layer import LayerCodes, channels_bytes
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


def layer_codes(groups: int, columns: int, size: float, seed: int) -> LayerCodes:
    return LayerCodes(side(groups, columns, size, seed), side(groups, columns, size, seed + 10))


@pytest.mark.parametrize(("widths", "element_bytes"), [((0, 4, 8), 2), ((0, 4, 8, 12, 16), 4)], ids=str)
def test_codes_of_one_width_lose_no_less_than_ragged_ones(widths: tuple[int, ...], element_bytes: int) -> None:
    """Layers of very different worth: each stores as many bytes, all of them; a target is met by the most that do."""
    layers = [
        {"post-1": layer_codes(2, 16, size, seed), "pre-2": layer_codes(1, 32, size, seed + 1)}
        for seed, size in ((0, 1.0), (2, 100.0))
    ]
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
    path = rank_path(run.bases(), run, override(run.recipe, [UNIFORM, "ranks.method=uniform"]))
    assert all(len({sum(map(sum, layer)) for layer in plan.rounded}) == 1 for plan in path.steps())


def test_methods_that_give_each_layer_its_own_width_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"ranks\.rows.*ragged, as ranks\.method is removal-rate: uniform, or bits"):
        load_recipe("fdc", [UNIFORM])
    with pytest.raises(RecipeError, match=r"ranks\.rows.*ragged, as objective\.kind is latency"):
        load_recipe("rotor", [UNIFORM, "objective.kind=latency"])
    assert load_recipe("rotor", [UNIFORM]).ranks.uniform_rows

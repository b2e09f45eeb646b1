"""The `quantization_config` section of a compressed checkpoint's config.json: layouts, biases, and rank profiles.

Reading it needs neither transformers nor anything of what wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal

from ..errors import CheckpointError, UsageError
from ..installing import PACKAGE
from ..typed import Reader, shorten
from .layout import AttentionShape, LayerLayout, LayerRanks, check_layouts, profile_name
from .truncation import truncate_layer

METHOD = "rotor"
MARK = f"{METHOD} (needs the Python package {PACKAGE}, from its source folder or repository; then import rotor)"
"""What config.json gives as attention implementation and as quantisation method: a transformers without rotor ends with
an error that repeats it, even where all shapes are those of the uncompressed model (only queries and keys compressed,
after RoPE). Without a slash: what has one is code that transformers would fetch from the hub."""

FORMAT_VERSIONS = (1, 2)
"""What this rotor reads: from 2 on layouts may have `rope_block`, which an earlier one would leave out."""
EDITED = "The folder was edited or is from another version of rotor; export it again."


def is_ours(name: Any) -> bool:
    """Whether an attention implementation or a quantisation method is rotor's: METHOD, or a MARK of any version."""
    return isinstance(name, str) and (name == METHOD or name.startswith(f"{METHOD} ("))


def is_compressed(config: Mapping[str, Any]) -> bool:
    """Whether a model's config.json is one that rotor wrote."""
    stored = config.get("quantization_config")
    return isinstance(stored, dict) and is_ours(stored.get("quant_method"))


def version_for(layouts: Iterable[LayerLayout]) -> int:
    """The earliest version of the format that has all that these layouts say."""
    return 2 if any(layout.turned_in_blocks for layout in layouts) else 1


class CompressedSection:
    """The section, checked; unknown keys in it are left out.

    Args:
        format_version: version of what is stored.
        layers: layer index (a string, as JSON has it) -> LayerLayout as a dict.
        biases: the projections, of q, k, v, o, that have a bias.
        cache: the policy by which the cache is kept, as plain data; read by rotor.runtime.cache.
        profiles: of an elastic checkpoint, which stores all columns: name (an accuracy) -> per layer and group, in the
            order of `layers`, [qk_rank, v_rank]. One is chosen at load, by `rank_profile`.
    """

    def __init__(
        self,
        format_version: int = FORMAT_VERSIONS[-1],
        layers: Any = None,
        biases: Any = (),
        profiles: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> None:
        self.quant_method: Any = METHOD  # transformers' own type knows its own methods only
        reader = Reader("config.json, quantization_config", CheckpointError, EDITED)
        self.format_version = reader.read(int, format_version, "format_version")
        self.layers = reader.read(dict[str, Any], _text_keys(layers or {}), "layers")
        self.biases = sorted(reader.read(list[Literal["q", "k", "v", "o"]], biases, "biases"))
        if cache is not None:
            self.cache = reader.read(dict[str, Any], cache, "cache")
        if profiles:
            self.profiles = reader.read(dict[str, list[list[tuple[int, int]]]], profiles, "profiles")

    @property
    def coded(self) -> bool:
        """Whether a layer keeps rows of codes."""
        return any(LayerLayout.from_dict(layer, f"config.json, layer {i}").coded for i, layer in self.layers.items())

    def profile_ranks(self, name: Any) -> list[LayerRanks] | None:
        """The ranks of a profile of an elastic checkpoint; None if the checkpoint is not elastic.

        Raises:
            UsageError: there is no such profile; names those that there are, if any.
        """
        profiles = getattr(self, "profiles", None)
        if not profiles:
            if name is not None:
                raise UsageError(
                    f"rank_profile {name}: this checkpoint stores one set of ranks.",
                    "Leave rank_profile out, or export with --elastic.",
                )
            return None
        with suppress(TypeError, ValueError):
            name = profile_name(name)  # 0.90 is 0.9
        if str(name) not in profiles:
            raise UsageError(
                f"rank_profile {name}: not stored in this checkpoint.", f"Stored profiles: {', '.join(profiles)}."
            )
        return [[(int(qk), int(v)) for qk, v in layer] for layer in profiles[str(name)]]

    def layouts(self, shape: AttentionShape) -> list[LayerLayout]:
        """The layout of each layer; raises CheckpointError if the version or a layout does not fit the model."""
        if self.format_version not in FORMAT_VERSIONS:
            readable = " and ".join(map(str, FORMAT_VERSIONS))
            raise CheckpointError(
                f"config.json: format_version is {self.format_version}, this rotor reads {readable}.",
                "Install the version of rotor that wrote the checkpoint (rotor.json names it).",
            )
        if set(self.layers) != {str(i) for i in range(shape.num_layers)}:
            raise CheckpointError(
                f"config.json: layouts of layers {shorten(sorted(self.layers))}, expected 0 to {shape.num_layers - 1}.",
                EDITED,
            )
        found = [LayerLayout.from_dict(self.layers[str(i)], f"config.json, layer {i}") for i in range(shape.num_layers)]
        check_layouts(found, shape, "config.json")
        for name, ranks in getattr(self, "profiles", {}).items():
            self._check_profile(name, ranks, found)
        return found

    def cut_layouts(self, shape: AttentionShape, profile: Any) -> list[LayerLayout]:
        """The layouts that a loaded model has: those of the profile, where the checkpoint is elastic."""
        layouts, ranks = self.layouts(shape), self.profile_ranks(profile)
        if ranks is None:
            return layouts
        return [truncate_layer({}, layout, r, shape)[0] for layout, r in zip(layouts, ranks, strict=True)]

    def _check_profile(self, name: str, ranks: list[LayerRanks], layouts: list[LayerLayout]) -> None:
        reader = Reader("config.json, quantization_config", CheckpointError, EDITED)
        if [len(layer) for layer in ranks] != [len(layout.groups) for layout in layouts]:
            raise reader.fail(f"profiles.{name}", ranks, "ranks of every layer's groups")
        for index, (layer, layout) in enumerate(zip(ranks, layouts, strict=True)):
            for (qk_rank, v_rank), group in zip(layer, layout.groups, strict=True):
                if not (0 < qk_rank <= group.qk_rank and 0 < v_rank <= group.v_rank):
                    expected = f"ranks from 1 to what is stored, {group.qk_rank} and {group.v_rank}"
                    raise reader.fail(f"profiles.{name}, layer {index}", (qk_rank, v_rank), expected)


def _text_keys(layers: Any) -> Any:
    """JSON has made strings of the keys; a dict built in Python may have numbers."""
    return {str(index): layout for index, layout in layers.items()} if isinstance(layers, dict) else layers

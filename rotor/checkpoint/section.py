"""The `quantization_config` section of a compressed checkpoint's config.json: layouts and biases.

Reading it imports neither transformers nor the code that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..checked import JsonObject, Reader, joined, shorten
from ..errors import CheckpointError
from ..versions import PACKAGE
from .layout import AttentionShape, LayerLayout, check_layouts
from .rows import EDITED
from .schemas import FORMAT_VERSION, MADE_ANEW, SourceInfo

METHOD = "rotor"
MARK = f"{METHOD} (needs the Python package {PACKAGE}, from its source folder or repository; then import rotor)"
"""Attention implementation and quantisation method in config.json. A transformers without rotor stops with an error
that repeats this text, even where all shapes are those of the uncompressed model (only queries and keys compressed,
after RoPE). It has no slash, as transformers takes a name with a slash for code on the hub."""

MOST_ENTRIES = 4096
"""Entries that a list or a mapping of a section has at most, layers and groups among them: more come from a damaged
file, and are not read one by one."""


def is_ours(name: object) -> bool:
    """Tell whether an attention or quantisation method is rotor's: METHOD, or a MARK of any version."""
    return isinstance(name, str) and (name == METHOD or name.startswith(f"{METHOD} ("))


def is_compressed(config: Mapping[str, object]) -> bool:
    """Tell whether a model's config.json is one that rotor wrote."""
    stored = config.get("quantization_config")
    return isinstance(stored, dict) and is_ours(stored.get("quant_method"))


class CompressedSection:
    """The section, checked; unknown keys in it are left out.

    Args:
        format_version: version of what is stored.
        layers: layer index (a string in JSON) -> LayerLayout as a dict.
        biases: the projections, of q, k, v, o, that have a bias.
        cache: the cache policy as plain data, which rotor.policies reads.
        source: where a checkpoint without weights finds them.
    """

    source: SourceInfo | None = None

    def __init__(
        self,
        format_version: int = FORMAT_VERSION,
        layers: object = None,
        biases: object = (),
        cache: object = None,
        source: object = None,
        **kwargs: object,
    ) -> None:
        self.quant_method: Any = METHOD  # transformers' own type knows its own methods only
        reader = Reader("config.json, quantization_config", CheckpointError, EDITED)
        self.format_version = reader.read(int, format_version, "format_version")
        for name, value in {"layers": layers, "biases": biases, "cache": cache, "source": source}.items():
            _check_lengths(value, name, reader)
        self.layers = reader.read(JsonObject, layers or {}, "layers")
        self.biases = sorted(reader.read(list[Literal["q", "k", "v", "o"]], biases, "biases"))
        if cache is not None:
            self.cache = reader.read(JsonObject, cache, "cache")
        if source is not None:
            self.source = reader.read(SourceInfo, source, "source")

    @property
    def coded(self) -> bool:
        """Tell whether a layer keeps rows of codes."""
        return any(LayerLayout.from_dict(layer, f"config.json, layer {i}").coded for i, layer in self.layers.items())

    def layouts(self, shape: AttentionShape) -> list[LayerLayout]:
        """The layout of each layer; raises CheckpointError if the version or a layout does not fit the model."""
        if self.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"config.json: format_version is {self.format_version}, this rotor reads {FORMAT_VERSION}.",
                MADE_ANEW,
            )
        if set(self.layers) != {str(i) for i in range(shape.num_layers)}:
            raise CheckpointError(
                f"config.json: layouts of layers {shorten(sorted(self.layers))}, expected 0 to {shape.num_layers - 1}.",
                EDITED,
            )
        in_order = [self.layers[str(i)] for i in range(shape.num_layers)]
        layouts = [LayerLayout.from_dict(layer, f"config.json, layer {i}") for i, layer in enumerate(in_order)]
        check_layouts(layouts, shape)
        return layouts


def _check_lengths(value: object, name: str, reader: Reader) -> None:
    """Check that no list or mapping in a value is longer than MOST_ENTRIES; raises CheckpointError, which names it."""
    stack: list[tuple[str, object]] = [(name, value)]
    while stack:
        name, value = stack.pop()
        if not isinstance(value, dict | list | tuple):
            continue
        if len(value) > MOST_ENTRIES:
            raise reader.fail(name, f"{len(value)} entries", f"at most {MOST_ENTRIES}")
        below = value.items() if isinstance(value, dict) else enumerate(value)
        stack += [(joined(name, key), value) for key, value in below]

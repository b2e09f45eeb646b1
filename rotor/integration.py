"""Registration with transformers: `from_pretrained` of a compressed checkpoint, and the `rotor` attention function."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from .errors import CheckpointError, UsageError
from .families import FAMILIES, Family, attention_shape
from .kernel_config import KERNEL_CONFIG, KernelConfig
from .kernels.defaults import default_config
from .layout import AttentionShape, LayerLayout, check_layouts
from .modeling import RotaryTable, RotorAttention, rotor_attention_forward
from .ranks import LayerRanks
from .rewrite import truncate_layer
from .typed import Reader, shorten

METHOD = "rotor"
ATTENTION = "rotor (pip install rotor-kv, then import rotor)"
"""What config.json asks for as attention implementation: a transformers without rotor ends with an error that repeats
it, even where all shapes are those of the uncompressed model (only queries and keys compressed, after RoPE)."""

FORMAT_VERSION = 1
EDITED = "The folder was edited or is from another version of rotor; export it again."


class RotorConfig(QuantizationConfigMixin):
    """The `quantization_config` of a compressed checkpoint.

    Args:
        format_version: version of what is stored.
        layers: layer index (a string, as JSON has it) -> LayerLayout as a dict.
        biases: the projections, of q, k, v, o, that have a bias.
        profiles: of an elastic checkpoint, which stores all columns: name (an accuracy) -> per layer and group, in the
            order of `layers`, [qk_rank, v_rank]. One is chosen at load, by `rank_profile`.
    """

    def __init__(
        self,
        format_version: int = FORMAT_VERSION,
        layers: Any = None,
        biases: Any = (),
        profiles: Any = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("quant_method", None)
        self.quant_method = METHOD  # type: ignore[assignment]
        reader = Reader("config.json, quantization_config", CheckpointError, EDITED)
        self.format_version = reader.read(int, format_version, "format_version")
        self.layers = reader.read(dict[str, Any], _text_keys(layers or {}), "layers")
        self.biases = sorted(reader.read(list[Literal["q", "k", "v", "o"]], biases, "biases"))
        if profiles:
            self.profiles = reader.read(dict[str, list[list[tuple[int, int]]]], profiles, "profiles")

    def profile_ranks(self, name: Any) -> list[LayerRanks] | None:
        """The ranks of a profile of an elastic checkpoint; None if the checkpoint is not elastic.

        Raises:
            UsageError: there is no such profile; names those that there are.
        """
        profiles = getattr(self, "profiles", None)
        if not profiles:
            return None
        with suppress(TypeError, ValueError):
            name = float(name)  # 0.90 is 0.9
        if str(name) not in profiles:
            raise UsageError(
                f"rank_profile {name}: not stored in this checkpoint.", f"Stored profiles: {', '.join(profiles)}."
            )
        return [[(int(qk), int(v)) for qk, v in layer] for layer in profiles[str(name)]]

    def layouts(self, shape: AttentionShape) -> list[LayerLayout]:
        """The layout of each layer; raises CheckpointError if the version or a layout does not fit the model."""
        if self.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"config.json: format_version is {self.format_version}, this rotor reads {FORMAT_VERSION}.",
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

    def kernel_config(self, path: Path | None, shape: AttentionShape, profile: Any) -> KernelConfig:
        """How the kernels run the model: what the file says, or the rule without a file.

        The file of an elastic checkpoint is of one of its profiles; the others are run by rule.

        Args:
            path: of kernel_config.json, if there is one.
            profile: the chosen one of an elastic checkpoint.
        Raises:
            CheckpointError: nonsense in the file, or it is of another model; names the field.
        """
        layouts = self.cut_layouts(shape, profile)
        if path is None:
            return default_config(layouts, shape)
        config = KernelConfig.read(path)
        others = getattr(self, "profiles", {})
        if not config.describes(layouts) and any(config.describes(self.cut_layouts(shape, name)) for name in others):
            return default_config(layouts, shape)
        config.check(layouts, str(path))
        return config

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


class RotorQuantizer(HfQuantizer):
    """Swaps the attention modules for compressed ones while the model is still on the meta device."""

    requires_calibration = True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Let Falcon be built: it looks its attention class up by the name of the implementation."""
        from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES, FalconAttention

        for name in (METHOD, ATTENTION):
            FALCON_ATTENTION_CLASSES.setdefault(name, FalconAttention)

    def update_attn_implementation(self, config: Any) -> Any:
        config._attn_implementation = METHOD
        return config

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        config: Any = self.quantization_config
        shape = attention_shape(model.config)
        family, layouts = FAMILIES[model.config.model_type], config.layouts(shape)
        replace_attention(model, family, shape, dict(enumerate(layouts)), frozenset(config.biases))
        path = find_kernel_config(model.config, checkpoint_files)
        self.kernel_config = config.kernel_config(path, shape, getattr(model.config, "rank_profile", None))
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Cut an elastic checkpoint down to the profile that config.rank_profile names; mark the config."""
        config: Any = self.quantization_config
        model.config.attn_implementation = (
            ATTENTION  # transformers forgets it, and save_pretrained is to write it again
        )
        ranks = config.profile_ranks(getattr(model.config, "rank_profile", None))
        if ranks is not None:
            shape, family = attention_shape(model.config), FAMILIES[model.config.model_type]
            config.layers = {
                str(i): truncate_attention(model, family, shape, i, layer_ranks, frozenset(config.biases)).to_dict()
                for i, layer_ranks in enumerate(ranks)
            }
            del config.profiles, model.config.rank_profile
        family = FAMILIES[model.config.model_type]
        for index, kernels in enumerate(self.kernel_config.layers):
            module: Any = family.attention_module(model, index)
            module.schedule, module.kernels = self.kernel_config.schedule, kernels
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def find_kernel_config(config: Any, checkpoint_files: list[str] | None) -> Path | None:
    """kernel_config.json beside the weights: in a local folder, or in the hub's cache, fetched if it is not there yet.

    Args:
        config: of the model, which knows where it came from. checkpoint_files: paths of the weights.
    Returns:
        None where there is none, or the hub cannot be asked.
    """
    if not checkpoint_files:
        return None
    beside = Path(checkpoint_files[0]).parent / KERNEL_CONFIG
    snapshots = beside.parent.parent
    if beside.is_file() or snapshots.name != "snapshots":
        return beside if beside.is_file() else None
    found = cached_file(
        config.name_or_path,
        KERNEL_CONFIG,
        cache_dir=snapshots.parent.parent,
        revision=beside.parent.name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def replace_attention(
    model: Any, family: Family, shape: AttentionShape, layouts: dict[int, LayerLayout], biases: frozenset[str]
) -> list[RotorAttention]:
    """Put a RotorAttention with uninitialised weights in each layer of `layouts`, and use `rotor` attention."""
    tables: dict[str | None, RotaryTable] = {}
    modules = []
    for index, layout in layouts.items():
        base = family.attention_module(model, index)
        kind = family.rotary_type(model.config, index)
        if family.rotary is not None and kind not in tables:
            tables[kind] = RotaryTable(model.get_submodule(family.rotary), kind)
        module = RotorAttention(base, family, shape, layout, biases, tables.get(kind))
        family.replace_attention(model, index, module)
        modules.append(module)
    model.config._attn_implementation = METHOD
    return modules


def truncate_attention(
    model: Any, family: Family, shape: AttentionShape, index: int, ranks: LayerRanks, biases: frozenset[str]
) -> LayerLayout:
    """Replace the compressed attention of a loaded layer by one of smaller ranks; returns its layout."""
    module = family.attention_module(model, index)
    assert isinstance(module, RotorAttention)
    tensors = {name: p.detach() for name, p in module.named_parameters() if not name.startswith(family.norms or ("-",))}
    layout, smaller = truncate_layer(tensors, module.layout, ranks, shape)
    with torch.device("meta"):
        replacement = RotorAttention(module, family, shape, layout, biases, module._rotary)
    replacement.load_state_dict(smaller, strict=False, assign=True)
    family.replace_attention(model, index, replacement.train(module.training))
    return layout


def register() -> None:
    """Make transformers know rotor's checkpoints and attention; harmless when called again."""
    if METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    register_quantization_config(METHOD)(RotorConfig)
    register_quantizer(METHOD)(RotorQuantizer)
    for name in (METHOD, ATTENTION):
        AttentionInterface.register(name, rotor_attention_forward)
        AttentionMaskInterface.register(name, sdpa_mask)


register()

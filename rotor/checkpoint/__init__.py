"""A compressed checkpoint on disk: layouts, families, files, and how bases become weights.

Others import from here; a module is loaded when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..facade import lazy

if TYPE_CHECKING:
    from .bases import BasisPair as BasisPair
    from .bases import ChannelCode as ChannelCode
    from .bases import FoldedBases as FoldedBases
    from .bases import FoldedBasis as FoldedBasis
    from .bases import LayerBases as LayerBases
    from .families import FAMILIES as FAMILIES
    from .families import Family as Family
    from .families import architectures as architectures
    from .families import attention_shape as attention_shape
    from .families import family_of as family_of
    from .families import find_family as find_family
    from .families import is_supported as is_supported
    from .families import language_model_setting as language_model_setting
    from .file_names import CARD as CARD
    from .file_names import KERNEL_CONFIG as KERNEL_CONFIG
    from .file_names import RECIPE as RECIPE
    from .file_names import RESULTS as RESULTS
    from .file_names import ROTOR_JSON as ROTOR_JSON
    from .folding import fold_bases as fold_bases
    from .folding import fold_layer as fold_layer
    from .folding import layer_layout as layer_layout
    from .folding import model_layouts as model_layouts
    from .folding import rewrite as rewrite
    from .hashes import file_sha256 as file_sha256
    from .hashes import tensor_sha256 as tensor_sha256
    from .json_files import json_text as json_text
    from .json_files import read_json as read_json
    from .kernel_config import KernelConfig as KernelConfig
    from .kernel_config import LayerKernels as LayerKernels
    from .kernel_config import Tile as Tile
    from .layout import AttentionShape as AttentionShape
    from .layout import ExactTokens as ExactTokens
    from .layout import GroupClass as GroupClass
    from .layout import GroupLayout as GroupLayout
    from .layout import KeyForm as KeyForm
    from .layout import LayerForm as LayerForm
    from .layout import LayerLayout as LayerLayout
    from .layout import LayerRanks as LayerRanks
    from .layout import pre_rope as pre_rope
    from .locks import exclusive as exclusive
    from .manifest import MANIFEST as MANIFEST
    from .manifest import Manifest as Manifest
    from .manifest import write_manifest as write_manifest
    from .output_folder import OutputFolder as OutputFolder
    from .projections import AttentionWeights as AttentionWeights
    from .projections import CompressedProjections as CompressedProjections
    from .projections import attention_norms as attention_norms
    from .projections import read_attention as read_attention
    from .publishing import staged_folder as staged_folder
    from .publishing import write_tensors as write_tensors
    from .rewritten import BASES as BASES
    from .rewritten import RewrittenTensors as RewrittenTensors
    from .rewritten import find_source as find_source
    from .rewritten import open_rewritten as open_rewritten
    from .rewritten import source_at as source_at
    from .rows import EDITED as EDITED
    from .rows import CodedRow as CodedRow
    from .rows import NumberRow as NumberRow
    from .rows import Row as Row
    from .section import MARK as MARK
    from .section import METHOD as METHOD
    from .section import CompressedSection as CompressedSection
    from .section import is_compressed as is_compressed
    from .section import is_ours as is_ours
    from .sizes import kv_bytes_per_token as kv_bytes_per_token
    from .sizes import uncompressed_kv_bytes_per_token as uncompressed_kv_bytes_per_token
    from .tensors import FLOAT32 as FLOAT32
    from .tensors import TensorSpec as TensorSpec
    from .tensors import layer_tensors as layer_tensors
    from .yaml_files import read_text as read_text
    from .yaml_files import read_yaml as read_yaml

_MODULES = {
    "bases": "BasisPair ChannelCode FoldedBases FoldedBasis LayerBases",
    "families": "FAMILIES Family architectures attention_shape family_of find_family is_supported "
    "language_model_setting",
    "file_names": "CARD KERNEL_CONFIG RECIPE RESULTS ROTOR_JSON",
    "folding": "fold_bases fold_layer layer_layout model_layouts rewrite",
    "hashes": "file_sha256 tensor_sha256",
    "json_files": "json_text read_json",
    "kernel_config": "KernelConfig LayerKernels Tile",
    "layout": ("AttentionShape ExactTokens GroupClass GroupLayout KeyForm LayerForm LayerLayout LayerRanks pre_rope"),
    "locks": "exclusive",
    "manifest": "MANIFEST Manifest write_manifest",
    "output_folder": "OutputFolder",
    "projections": "AttentionWeights CompressedProjections attention_norms read_attention",
    "publishing": "staged_folder write_tensors",
    "rewritten": "BASES RewrittenTensors find_source open_rewritten source_at",
    "rows": "EDITED CodedRow NumberRow Row",
    "section": "MARK METHOD CompressedSection is_compressed is_ours",
    "sizes": "kv_bytes_per_token uncompressed_kv_bytes_per_token",
    "tensors": "FLOAT32 TensorSpec layer_tensors",
    "yaml_files": "read_text read_yaml",
}
__getattr__ = lazy(__name__, _MODULES)

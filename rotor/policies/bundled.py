"""The methods there are, and policies by name: bundled ones, a user's YAML file, or what a checkpoint stores."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from ..checked import Reader, nearest_name
from ..errors import CheckpointError, RecipeError
from ..format.section import EDITED
from ..format.yaml_files import read_text, read_yaml
from .fp8 import FP8
from .gear import GEAR
from .h2o import H2O
from .kcvt import KCVT
from .keyformer import Keyformer
from .kivi import KIVI
from .kvquant import KVQuant
from .nuq import NUQ
from .per_token import PerToken
from .policy import Policy, read_policy
from .random_eviction import Random
from .streaming import Streaming
from .tiers import Tiers
from .window import Window

METHODS: dict[str, type[Policy]] = {
    policy.method: policy
    for policy in (PerToken, KCVT, KIVI, NUQ, KVQuant, FP8, GEAR, Window, Streaming, H2O, Keyformer, Random, Tiers)
}
NONE = "none"


def bundled_policies() -> dict[str, Policy]:
    """The policies that come with rotor, by name."""
    return {name: _parse(_bundled(name).read_text("utf-8"), name) for name in bundled_names()}


def bundled_names() -> list[str]:
    folder = resources.files("rotor.recipes") / "cache"
    return sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml"))


def find_policy(name: str) -> Policy | None:
    """A bundled policy by name, or one in a YAML file by its path; None for `none`.

    Raises:
        RecipeError: no such policy, or not one.
    """
    if name == NONE:
        return None
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return _parse(read_text(path, f"cache policy {name}"), name)
    names = bundled_names()
    if name not in names:
        raise RecipeError(
            f"cache policy {name!r} is neither bundled nor a YAML file{nearest_name(name, [NONE, *names])}",
            f"Bundled policies: {NONE}, {', '.join(names)}; or give the path of a YAML file.",
        )
    return _parse(_bundled(name).read_text("utf-8"), name)


def read_stored(section: Any, where: str = "config.json, quantization_config") -> Policy | None:
    """The policy that a checkpoint stores; None if it has none. Raises CheckpointError for one that does not fit."""
    return None if section is None else read_policy(section, Reader(where, CheckpointError, EDITED), METHODS)


def _bundled(name: str) -> Any:
    return resources.files("rotor.recipes") / "cache" / f"{name}.yaml"


def _parse(text: str, where: str) -> Policy:
    return read_policy(read_yaml(text, f"cache policy {where}"), Reader(f"cache policy {where}", RecipeError), METHODS)

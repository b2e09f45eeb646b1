"""Versions and architectures of vLLM that serve compressed checkpoints. Imports nothing of vLLM."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

TESTED = ">=0.32,<0.34"
"""Tested versions; pyproject.toml and docs/serving.md say the same.

vLLM promises entry points and the registries of models and quantisation methods. It does not promise attention
backends, cache specs and attention ops, so a new version is added here once `make test-vllm` passes.
"""


def refusal(version: str) -> str | None:
    """Why compressed checkpoints are not served with a version of vLLM; None if they are."""
    if SpecifierSet(TESTED).contains(version, prereleases=True):
        return None
    return f"vLLM {version} does not serve compressed checkpoints: rotor's plugin is tested with {TESTED}."


PREFIX = "Rotor"
"""Prefix of the names under which compressed classes of architectures are registered."""

"""StreamingLLM: keep the first tokens of a sequence, on which attention rests, and the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt

from ...checkpoint.families import attention_shape, family_of
from ...errors import UnsupportedModelError
from ..eviction import Eviction

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Streaming(Eviction):
    """Keeps the first `sinks` tokens and the newest b - sinks; a budget of at most `sinks` leaves one for the newest.

    Args:
        sinks: first tokens that stay.
        positions: by which RoPE rotates kept keys. `cache`: counted among the kept tokens, so that distances stay
            within what the model was trained on; `sequence`: as they came. Keys that are compressed after RoPE cannot
            be moved, nor those of a model without RoPE.

    The paper evicts while it reads; here the prompt, the first step, sees itself.
    Source: Xiao et al., StreamingLLM (arXiv 2309.17453), section 3.2.
    """

    method: ClassVar[str] = "streaming"
    sinks: NonNegativeInt = 4
    positions: Literal["sequence", "cache"] = "cache"

    @property
    def moves_keys(self) -> bool:
        return self.positions == "cache"

    def check_rows(self, coded: bool, post_rope: bool) -> None:
        if self.moves_keys and post_rope:
            raise _cannot_move("this checkpoint's keys are compressed after RoPE, which is in their latents")

    def check_config(self, config: PreTrainedConfig) -> int:
        family = family_of(config)
        if self.moves_keys and family.rotary is None:
            raise _cannot_move("this model has no RoPE")
        why = attention_shape(config).rotates_as_told
        if self.moves_keys and why:
            raise _cannot_move(why)
        unlike = family.interleaved or family.rotates_back or family.without_rope(config.get_text_config())
        if self.moves_keys and unlike:
            raise _cannot_move("RoPE of this model is interleaved, rotates back, or is not in every layer")
        return super().check_config(config)

    def protected(self, budget: int) -> tuple[int, int]:
        sinks = min(self.sinks, budget - 1)
        return sinks, budget - sinks


def _cannot_move(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"cache policy streaming: positions within the cache: {why}.",
        "Use `positions: sequence` in a YAML file of the policy, or a recipe with keys before RoPE (rotor).",
    )

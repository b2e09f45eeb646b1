"""Talk with a model, compressed or not: its cache is kept from turn to turn, so that only what is new is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache

from ..checkpoint.rewritten import source_at
from ..errors import CheckpointError, UsageError
from ..models.chats import between_turns
from ..models.hardware import DevicePlan
from ..models.hub import find_model
from ..models.tokenizer import CHAT_PROBE, as_chat, check_ids
from ..progress import Progress
from ..recipe.requests import GenerationOptions
from .generation import Streamer, generation_settings, load_with_policy, with_tokenizer


@dataclass(frozen=True)
class Frame:
    """Text around what a user says.

    opening: before the first turn. begin: behind a turn, up to the answer. again: between an answer and the next turn.
    """

    opening: str = ""
    begin: str = ""
    again: str = "\n"

    @classmethod
    def of_template(cls, folder: Path) -> Frame:
        """The frame that a model's chat template puts around turns.

        Raises:
            CheckpointError: the template fails, or changes what is said.
        """
        opening, probe, begin = as_chat(folder, CHAT_PROBE).partition(CHAT_PROBE)
        again = between_turns(folder)
        if not probe or again is None:
            raise CheckpointError(
                f"{folder}: its chat template does not show turns as they were said.",
                "Give --raw to talk without it.",
            )
        return cls(opening, begin, again)


class Chat:
    """A conversation: by the model's chat template, or without one as a text that both write on.

    tokens: all that was said, as the model has it.
    """

    def __init__(self, folder: str | Path, options: GenerationOptions, progress: Progress) -> None:
        """Load the model.

        Raises:
            CheckpointError: no tokenizer, or a chat template that fails.
        """
        with source_at(options.source):
            model_folder = find_model(folder).folder
            checkpoint, self._tokenizer = with_tokenizer(model_folder)
            place = DevicePlan.choose(options, checkpoint.dtype)
            chat = bool(self._tokenizer.chat_template) and not options.raw
            self._frame = Frame.of_template(model_folder) if chat else Frame()
            self._special = not chat  # a template has the tokens that begin a text
            self._model = load_with_policy(model_folder, place, options.cache, self._tokenizer, progress)
        self._settings = generation_settings(options, self._tokenizer)
        self._limit = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
        self._cache: Cache | None = None
        torch.manual_seed(options.seed)  # transformers samples from the global generator
        self.forget()

    def forget(self) -> None:
        """Begin another conversation."""
        self.tokens: Tensor = torch.empty(1, 0, dtype=torch.int64, device=self._model.device)
        self._cache = None

    def say(self, text: str, on_text: Callable[[str], None]) -> str:
        """The model's answer, which `on_text` gets as it is written.

        Where it is interrupted, the conversation stays as it was before.

        Raises:
            UsageError: the conversation gets longer than the model reads.
        """
        tokens = torch.cat([self.tokens, self._read(text)], dim=1)
        most = tokens.shape[1] + int(self._settings["max_new_tokens"])
        if self._limit is not None and most > self._limit:
            raise UsageError(
                f"this turn and its answer would make {most} tokens, the model reads {self._limit}.",
                "/new begins another conversation.",
            )
        cache, self._cache = self._cache, None  # an interruption leaves half of a turn in it
        output = self._model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=cache,
            streamer=Streamer(self._tokenizer, on_text, skip_prompt=True),
            **self._settings,
        )
        self.tokens, self._cache = output.sequences, output.past_key_values
        return str(self._tokenizer.decode(self.tokens[0, tokens.shape[1] :], skip_special_tokens=True))

    def _read(self, text: str) -> Tensor:
        """Tokens of a turn, with what stands before and behind it."""
        frame, first = self._frame, self.tokens.shape[1] == 0
        before = frame.opening
        if not first:
            end = self._tokenizer.decode(self.tokens[0, -1:])  # the model may have ended its answer itself
            before = frame.again.removeprefix(end)
        ids = self._tokenizer(before + text + frame.begin, add_special_tokens=self._special and first)["input_ids"]
        read = torch.tensor([ids], dtype=torch.int64, device=self._model.device)
        check_ids(read, self._model.config.get_text_config().vocab_size)
        return read

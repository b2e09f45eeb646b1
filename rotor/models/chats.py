"""Chats of JSON lines, rendered as the model is served with them: by its chat template, tools and tool calls too."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checked import JsonObject, shorten
from ..errors import DataError
from ..logs import log
from .tokenizer import as_chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles by what ShareGPT's `from` says; other words are roles themselves."""

BETWEEN = "\n\n"
"""Stands between messages where there is no chat template."""


def read_chat(data: JsonObject) -> JsonObject | str:
    """The chat of a line as chat templates take it, {"messages": [...], "tools": [...] or None}; or what is wrong.

    Reads OpenAI's `messages` (content as text, as parts of text, or null beside tool_calls) and ShareGPT's
    `conversations`. Arguments of tool calls that are JSON in a string are read, as templates expect.
    """
    key = "messages" if "messages" in data else "conversations"
    given = data[key]
    if not isinstance(given, list) or not given:
        return f"`{key}` is {shorten(given)}, expected a list of messages"
    messages = []
    system = data.get("system")
    if key == "conversations" and isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(given, 1):
        read = _message(message)
        if isinstance(read, str):
            return f"`{key}`, message {number}: {read}"
        messages.append(read)
    tools = _parsed(data.get("tools"))
    if tools is not None and not isinstance(tools, list):
        return f"`tools` is {shorten(tools)}, expected a list"
    return {"messages": messages, "tools": tools or None}


def _message(message: object) -> JsonObject | str:
    """A message with content as text or None, or what is wrong with it."""
    if not isinstance(message, dict):
        return f"got {shorten(message)}, expected a mapping"
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str):
        return "it has no `role` (or `from`)"
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            return "a part of its content is not text"
        content = "".join(texts)
    read = {**message, "role": SHAREGPT_ROLES.get(role, role), "content": content}
    calls = message.get("tool_calls")
    if content is None and not calls:
        return "it has neither content nor tool_calls"
    if content is not None and not isinstance(content, str):
        return f"its content is {shorten(content)}, expected text, parts of text, or null beside tool_calls"
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            return f"its tool_calls are {shorten(calls)}, expected a list of mappings"
        read["tool_calls"] = [_with_arguments(call) for call in calls]
    return {name: value for name, value in read.items() if name not in ("from", "value")}


def _with_arguments(call: JsonObject) -> JsonObject:
    function = call.get("function")
    named = function if isinstance(function, dict) else call
    named = {**named, "arguments": _parsed(named.get("arguments"))} if "arguments" in named else named
    return {**call, "function": named} if isinstance(function, dict) else named


def _parsed(value: Any) -> Any:
    """Value of JSON in a string; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def render(chats: list[JsonObject], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """The text of chats: by the model's chat template, or as `in_words` where it has none or that fails for a chat.

    Raises:
        DataError: the template exceeds its limits.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None) or not chats:
        return [in_words(chat) for chat in chats]
    texts, error = _rendered(str(tokenizer.name_or_path), json.dumps(chats))
    failed = texts.count(None)
    if failed:
        log.warning(
            "%d of %d chats cannot be rendered by the model's chat template, whose messages are joined by empty lines "
            "instead: %s",
            failed,
            len(chats),
            error,
        )
    return [in_words(chat) if text is None else text for chat, text in zip(chats, texts, strict=True)]


@lru_cache(maxsize=8)
def _rendered(folder: str, chats: str) -> tuple[tuple[str | None, ...], str]:
    """Rendered once for a command, which reads its text several times."""
    verdict = as_chats(Path(folder), chats)
    if "texts" not in verdict:
        raise DataError(
            f"{folder}: its chat template cannot be applied to the chats: {verdict['error']}",
            'Give them as texts: {"text": "..."} in each line.',
        )
    return tuple(verdict["texts"]), str(verdict.get("first_error", ""))


def in_words(chat: JsonObject) -> str:
    """Text of a chat's messages, with empty lines between them; tool calls as JSON."""
    said = []
    for message in chat["messages"]:
        said += [message["content"]] if message["content"] else []
        said += [json.dumps(call.get("function", call)) for call in message.get("tool_calls") or []]
    return BETWEEN.join(said)


def between_turns(folder: Path) -> str | None:
    """Text of a model's chat template between an answer and what the user says next; None where it fails."""
    said = ("first words", "an answer", "last words")
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), said, strict=True)]
    (text,) = as_chats(folder, json.dumps([{"messages": messages, "tools": None}])).get("texts", [None])
    if text is None:
        return None
    before, separator, rest = text.partition(said[1])
    between, found_last, _ = rest.partition(said[2])
    return between if said[0] in before and separator and found_last else None

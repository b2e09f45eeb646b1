"""Load a tokenizer of unknown origin and use it once, in a child process that may crash.

This file is run as a script. Its arguments are the task (`text`, `chat` or `chats`), the model folder, and the limits
of memory in bytes and of processor time in seconds; its standard input is a text, for `chats` JSON. It prints one line
of JSON. For `text`, `largest` is the largest id that text can produce; for `chat`, `text` is the rendered chat
template; for `chats`, see `rendered_chats`; `error` says what failed. It imports neither rotor nor torch, so that it
starts within a second.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from transformers import PreTrainedTokenizerBase

MAX_ADDED_CHARACTERS = 1 << 20
"""Most characters that a chat template may add to the message."""


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Limit memory and processor time of this process, and forbid writing files."""
    limits = {resource.RLIMIT_DATA: memory_bytes, resource.RLIMIT_CPU: cpu_s}
    for kind, value in (limits | {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}).items():
        hard = resource.getrlimit(kind)[1]
        lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lower, lower))


def without_torch() -> None:
    """Hide torch from transformers, because its import takes longer than everything else here."""
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in ("torch", "torchvision", "accelerate") else find(name, package)

    importlib.util.find_spec = find_spec


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Largest id of the vocabulary without added tokens: some models have added tokens beyond their embeddings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return max(backend.get_vocab(with_added_tokens=False).values(), default=-1)
    added = tokenizer.get_added_vocab()
    return max((number for word, number in tokenizer.get_vocab().items() if word not in added), default=-1)


def trial(task: str, folder: str, text: str) -> dict[str, object]:
    without_torch()
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if task == "chat":
        said = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        if len(rendered) > len(text) + MAX_ADDED_CHARACTERS:
            return {"error": f"it makes {len(rendered)} characters of {len(text)}"}
        return {"text": rendered}
    if task == "chats":
        return rendered_chats(tokenizer, json.loads(text))
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    tokenizer.decode(ids)
    if not all(type(number) is int and number >= 0 for number in ids):
        return {"error": "it gives ids that are not numbers from 0"}
    return {"largest": largest_id(tokenizer), "tokens": len(ids)}


def rendered_chats(tokenizer: Any, chats: list[dict[str, Any]]) -> dict[str, object]:
    """The text of each chat, None where the template fails; a template that does not take null gets tool calls as
    JSON in the content."""
    texts: list[str | None] = []
    error = ""
    for chat in chats:
        written = [
            {**message, "content": message["content"] or "\n".join(map(json.dumps, message.get("tool_calls", [])))}
            for message in chat["messages"]
        ]
        text = None
        for messages in (chat["messages"], written):
            try:
                text = tokenizer.apply_chat_template(messages, tools=chat["tools"], tokenize=False)
                break
            except Exception as caught:  # a template raises errors of its own
                error = error or f"{type(caught).__name__}: {' '.join(str(caught).split())[:200]}"
        if text is not None and len(text) > 4 * len(json.dumps(chat)) + MAX_ADDED_CHARACTERS:
            return {"error": f"it makes {len(text)} characters of a chat of {len(json.dumps(chat))}"}
        texts.append(text)
    return {"texts": texts, "first_error": error}


def main() -> None:
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="critical")
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # modules in this file's folder would hide others of the same name
    task, folder, memory_bytes, cpu_s = sys.argv[1:]
    text = sys.stdin.buffer.read().decode("utf-8")
    limit(int(memory_bytes), int(cpu_s))
    try:
        verdict = trial(task, folder, text)
    except BaseException as error:  # a panic of the tokenizers library is not an Exception
        verdict = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print("\n" + json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()

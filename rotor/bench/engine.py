"""An engine of vLLM in a process of its own, driven through a pipe: so that two can be measured in turn."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RotorError, UsageError
from ..installing import pip_install


@dataclass(frozen=True)
class EngineOptions:
    """folder: of the model. cache_bytes: memory of its cache. longest: tokens of the longest sequence. concurrency: the
    most requests at once. eager: without torch.compile, which takes minutes on a CPU.
    """

    folder: Path
    dtype: str
    cache_bytes: int
    longest: int
    concurrency: int
    eager: bool


def check_installed() -> None:
    """Raises UsageError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("--engine vllm: vLLM is not installed here.", pip_install("vllm"))


class Engine:
    """The other process. Used as a context: it ends with the block.

    cache_tokens: what its cache has room for. version: of vLLM.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_run, args=(other, options), daemon=True)
        self._process.start()
        other.close()
        self.cache_tokens, self.version = 0, ""

    def __enter__(self) -> Engine:
        self.cache_tokens, self.version = self._received()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.terminate()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Send all prompts at once, greedy: seconds of the whole, and of each request to its first and last token."""
        self._pipe.send(("generate", prompts, new_tokens))
        return self._received()

    def log_probabilities(self, prompt: list[int]) -> list[float]:
        """Of each token of a prompt but the first, in nats."""
        self._pipe.send(("log_probabilities", prompt))
        return self._received()

    def _received(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            kind, value = "error", "the engine's process ended"
        if kind == "error":
            raise RotorError(
                f"vLLM with {self._options.folder}: {value}", "What vLLM said of it stands above; try `vllm serve`."
            )
        return value


def _run(pipe: Any, options: EngineOptions) -> None:
    """In the other process: an engine, then what the pipe asks for, until it is closed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        import vllm

        llm = vllm.LLM(
            model=str(options.folder),
            dtype=options.dtype,
            kv_cache_memory_bytes=options.cache_bytes,
            max_model_len=options.longest,
            max_num_seqs=options.concurrency,
            enforce_eager=options.eager,
            enable_prefix_caching=False,  # each prompt is new
            disable_log_stats=False,
        )
        cache = llm.llm_engine.vllm_config.cache_config
        commands: dict[str, Callable[..., Any]] = {
            "generate": _generate,
            "log_probabilities": _log_probabilities,
        }
        pipe.send(("ready", (cache.num_gpu_blocks * cache.block_size, vllm.__version__)))
        while True:
            name, *arguments = pipe.recv()
            pipe.send(("result", commands[name](llm, *arguments)))
    except EOFError:
        return
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def _generate(llm: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    import time

    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
    seconds = time.perf_counter() - start
    stats = [output.metrics for output in outputs]
    return {
        "seconds": seconds,
        "first_token_s": [s.first_token_latency for s in stats],
        "between_tokens_s": [(s.last_token_ts - s.first_token_ts) / max(1, new_tokens - 1) for s in stats],
        "preemptions": sum(s.num_preemptions for s in stats),
    }


def _log_probabilities(llm: Any, prompt: list[int]) -> list[float]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)[0]
    return [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]

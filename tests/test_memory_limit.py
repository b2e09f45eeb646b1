"""Models that do not fit are read layer by layer, also while they write text: within limits of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from transformers import AutoModelForCausalLM, LlamaConfig

from rotor.models.loading import weights_of
from rotor.models.source import Checkpoint
from rotor.models.tokens import synthetic_tokens

pytestmark = pytest.mark.nightly

WRITE = """
import resource, sys
from pathlib import Path
import torch
from rotor.models.tokens import synthetic_tokens
from rotor.models.source import Checkpoint
from rotor.models.loading import weights_of

checkpoint = Checkpoint(sys.argv[1])
checkpoint.config
data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
limit = (int(data.split()[1]) << 10) + 400_000_000
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
weights = weights_of(checkpoint, torch.device("cpu"), torch.float32, sys.argv[2] == "streamed")
print(synthetic_tokens(weights, 3, 6, checkpoint.config, None, 0).tolist())
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads memory from /proc")
def test_a_model_writes_text_in_less_memory_than_its_weights_take(tmp_path: Path) -> None:
    """0.9 GB of weights in 0.4 GB: the tokens are those of the model in memory, which does not fit under the limit."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=14, vocab_size=8192, bos_token_id=0, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="40MB")

    def write(how: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", WRITE, str(tmp_path / "model"), how],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    streamed, resident = write("streamed"), write("resident")
    assert streamed.returncode == 0, streamed.stderr[-3000:]
    assert resident.returncode != 0
    checkpoint = Checkpoint(tmp_path / "model")
    weights = weights_of(checkpoint, torch.device("cpu"), torch.float32, False)
    assert json.loads(streamed.stdout) == synthetic_tokens(weights, 3, 6, checkpoint.config, None, 0).tolist()

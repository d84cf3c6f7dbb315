"""What ``phalanx export --format hf`` writes is what transformers loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import phalanx
from phalanx import shard
from phalanx.__main__ import main

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes))
phalanx.simulate(1).run(lambda _: shard.save(model.state_dict(), "saved"))
assert main(["export", "saved", "exported", "--format", "hf"]) == 0
model.config.save_pretrained("exported")
back = AutoModelForCausalLM.from_pretrained("exported")
assert type(back) is LlamaForCausalLM
expected, found = model.state_dict(), back.state_dict()
assert expected.keys() == found.keys()
assert all(torch.equal(found[name], value) for name, value in expected.items())
model.save_pretrained("theirs")
from safetensors import safe_open
heads = [safe_open(f"{folder}/model.safetensors", "pt").metadata() for folder in ("theirs", "exported")]
assert heads[0] == heads[1], heads
print("equal")
"""


def test_transformers_loads_what_was_exported(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("equal\n")

"""Model classes of transformers are modules like others: ``fully_shard`` cuts their blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.comm import simulate
from phalanx.fsdp import fully_shard

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
IDS = torch.arange(24).view(2, 12)


def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, attn_implementation="eager", **SIZES))


def step(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad


def sharded(group):
    model = build()
    for layer in model.model.layers:
        fully_shard(layer)
    loss, gradient = step(fully_shard(model))
    assert gradient.to_local().shape == (8, 16)
    return loss, gradient.full_tensor()


expected = step(build())
for found in simulate(2).run(sharded):
    torch.testing.assert_close(found, expected)
print("equal")
"""


def test_a_model_of_transformers_is_sharded_by_its_blocks(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"

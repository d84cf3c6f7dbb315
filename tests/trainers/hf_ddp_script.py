"""A script as users of Hugging Face's Trainer write it, knowing nothing of Phalanx; leaves a digest."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=2))  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 50, (48, 10))]
    args = TrainingArguments(output_dir=sys.argv[1], num_train_epochs=2, per_device_train_batch_size=4,
                             learning_rate=1e-2, logging_steps=2, save_strategy="no", report_to=[], disable_tqdm=True,
                             use_cpu=True, seed=3, data_seed=3)  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    if trainer.is_world_process_zero():
        weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        words = [str(args.world_size), hashlib.sha256(weights).hexdigest()]
        (Path(sys.argv[1]) / "digest").write_text(" ".join(words))

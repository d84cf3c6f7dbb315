"""A language model with Hugging Face's Trainer on workers that may die: python examples/hf_language_model.py, or

phalanx run --nproc-per-node 4 --on-failure heal --preload transformers examples/hf_language_model.py
"""

import argparse
import hashlib
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from phalanx.elastic import RunOptions
from phalanx.transformers import ElasticTrainer  # before TrainingArguments are made


def sentences(count):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 100, (count, 32), generator=generator).sort(dim=1).values
    return [{"input_ids": row, "labels": row} for row in ids]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=512)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4,
        )
    )  # fmt: skip
    trainer = ElasticTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            num_train_epochs=arguments.epochs,
            per_device_train_batch_size=4,  # of a slot: 32 per step
            logging_steps=8,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=sentences(arguments.samples),
        eval_dataset=sentences(32),
        num_slots=8,
        run=RunOptions(progress=False, threads=1),
    )
    trainer.train()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"{trainer.state.global_step} steps, {digest[:16]}")

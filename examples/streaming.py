"""Trains on shards of packed text, elastically: kill any worker, no sequence is lost or seen twice.

Writes a text as tar files of documents, packs these into sequences of one length, and trains a small model on them.

python examples/streaming.py                                                        # one process
phalanx run --nproc-per-node 3 --on-failure heal examples/streaming.py --steps 300  # three, and any may die
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import tarfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import phalanx.elastic
from phalanx.data import Packed, ShardedDataset, document_lengths
from phalanx.data.sources import TarSource

LENGTH = 65  # tokens of a sequence: 64 to read, each with the next one to predict
TEXT = Path(__file__).parent / "data" / "harbour.txt"


def write_shards(folder: Path, num_shards: int = 12) -> list[Path]:
    """Write paragraphs to tar files as WebDataset has them; once, whichever worker is first."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        paragraphs = [text for text in TEXT.read_text().split("\n\n") if text.strip()]
        paths = [folder / f"text-{shard:03d}.tar" for shard in range(num_shards)]
        for shard, path in enumerate(paths):
            if path.exists():
                continue
            draft = path.with_suffix(".draft")
            with tarfile.open(draft, "w") as archive:
                for number in range(shard, len(paragraphs), num_shards):
                    content = paragraphs[number].encode()
                    info = tarfile.TarInfo(f"{number:05d}.txt")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
            os.replace(draft, path)
    return paths


def tokens(sample: dict[str, bytes]) -> torch.Tensor:
    """Take bytes for tokens; 0 is free for the separator."""
    return torch.frombuffer(bytearray(sample["txt"]), dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/phalanx-streaming-example"))
    args = parser.parse_args()
    documents = ShardedDataset(TarSource(write_shards(args.folder)), tokens)
    dataset = ShardedDataset(Packed(documents, LENGTH, lengths=document_lengths(documents), separator=0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 256))
    job = phalanx.elastic.Job(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        dataset,
        num_slots=4,
        slot_batch_size=4,
        data=phalanx.elastic.DataOptions(shuffle="shards", num_workers=1),
        run=phalanx.elastic.RunOptions(threads=1),
    )
    for step in job.steps(max_steps=args.steps):
        for micro in step:
            logits = model(micro.batch[:, :-1])
            micro.backward(F.cross_entropy(logits.flatten(0, 1), micro.batch[:, 1:].flatten()))
        step.commit()
    print(
        f"{job.worker_id}: step {job.step}, loss {job.loss:.4f}, {len(dataset)} sequences, digest {job.digest()[:16]}"
    )


if __name__ == "__main__":
    main()

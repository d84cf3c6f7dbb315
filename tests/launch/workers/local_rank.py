"""A script that takes its local rank as torch.distributed.launch gives it."""

import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int)
parser.add_argument("--lr")
args = parser.parse_args()
print("RANK", args.local_rank, os.environ["LOCAL_RANK"], args.lr)

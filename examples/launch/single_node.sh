#!/bin/sh
# One machine: no endpoint, no port. --nproc-per-node auto takes one worker per GPU, or per CPU without GPUs.
set -eu
cd "$(dirname "$0")"
phalanx run --nproc-per-node "${NPROC:-2}" --max-restarts 3 train.py --steps 200

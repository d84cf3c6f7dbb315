#!/bin/sh
# Several machines, no extra service: run this same line on every one of them, with HOST naming any one of them.
# The agent on HOST serves the rendezvous. With 2:4, two nodes are enough, and up to four may join while it runs.
set -eu
cd "$(dirname "$0")"
phalanx run --nnodes "${NNODES:-2:4}" --nproc-per-node "${NPROC:-2}" \
    --rdzv-backend c10d --rdzv-endpoint "${HOST:?set HOST to the name of one node}:${PORT:-29400}" --rdzv-id "${JOB:-demo}" \
    --max-restarts 3 train.py --steps 200

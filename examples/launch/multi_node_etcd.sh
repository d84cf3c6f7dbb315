#!/bin/sh
# Several machines and an etcd v3 cluster: no node is special, any of them may die. List all members of the cluster.
set -eu
cd "$(dirname "$0")"
phalanx run --nnodes "${NNODES:-2:4}" --nproc-per-node "${NPROC:-2}" \
    --rdzv-backend etcd --rdzv-endpoint "${ETCD:?set ETCD to host:port,host:port,...}" --rdzv-id "${JOB:-demo}" \
    --max-restarts 3 train.py --steps 200

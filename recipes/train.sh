#!/bin/bash
# What the jobs of both models do:
#   recipes/train.sh MODEL NODES SPARES DATASET DUMP INTERFACE [options of tessera launch]
# The variables PRECISION (bf16, mxfp8), EXCHANGE (direct, standard) and PROMETHEUS (HOST:PORT) change it.
set -euo pipefail
[[ $# -ge 6 ]] || { sed -n '2,4s/^# \?//p' "$0" >&2; exit 2; }
model=$1 nodes=$2 spares=$3 dataset=$4 dump=$5 interface=$6

# NCCL finds InfiniBand by itself. It starts over this interface.
export NCCL_SOCKET_IFNAME=$interface
# NCCL retries a link that flaps for some seconds (timeout 4.096 us * 2^22, 7 times) before it gives up.
export NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7
# Open MPI carries small host messages only, so it need not take InfiniBand.
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp OMPI_MCA_btl_tcp_if_include=$interface

variant=$("$(dirname "$0")/variant.sh" "$model" "${PRECISION:-bf16}" "${EXCHANGE:-direct}")
mapfile -t arguments <<<"$variant"
exec tessera launch --nodes "$nodes" --spares "$spares" --ranks-per-node 8 \
  --prometheus-address "${PROMETHEUS:-127.0.0.1:9401}" "${@:7}" -- \
  train "${arguments[@]}" --training.dataset_path="$dataset" --job.dump_folder="$dump" \
  --checkpoint.memory_interval=20 --metrics.prometheus_port=9400

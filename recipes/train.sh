#!/bin/bash
# What the jobs of both models do:
#   recipes/train.sh MODEL NODES SPARES DATASET DUMP INTERFACE [options of tessera launch]
# The variables PRECISION (bf16, mxfp8), EXCHANGE (direct, standard) and PROMETHEUS change it. PROMETHEUS is the address
# at which rank 0 (port 9400) and the launcher (9401) serve metrics; 0.0.0.0 (all of the machine's) if it is not set.
set -euo pipefail
[[ $# -ge 6 ]] || { sed -n '2,5s/^# \?//p' "$0" >&2; exit 2; }
model=$1 nodes=$2 spares=$3 dataset=$4 dump=$5 interface=$6

# NCCL finds InfiniBand by itself. It starts over this interface.
export NCCL_SOCKET_IFNAME=$interface
# NCCL retries a link that flaps for two minutes (timeout 4.096 us * 2^22, 7 times) before it gives up.
export NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7
# Open MPI carries small host messages only, so it need not take InfiniBand.
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp OMPI_MCA_btl_tcp_if_include=$interface

variant=$("$(dirname "$0")/variant.sh" "$model" "${PRECISION:-bf16}" "${EXCHANGE:-direct}")
mapfile -t arguments <<<"$variant"
# Another machine scrapes the metrics. Which node has rank 0 changes, so no address of one node would do.
address=${PROMETHEUS:-0.0.0.0}
exec tessera launch --nodes "$nodes" --spares "$spares" --ranks-per-node 8 \
  --prometheus-address "$address:9401" "${@:7}" -- \
  train "${arguments[@]}" --training.dataset_path="$dataset" --job.dump_folder="$dump" \
  --checkpoint.memory_interval=20 --metrics.prometheus_port=9400 --metrics.prometheus_address="$address"

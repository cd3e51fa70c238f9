#!/bin/bash
# HealthCheckProgram: drains or returns this node, by the verdict of `tessera health serve`'s daemon. Slurm starts this
# script as root, without a PATH.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
program=$(dirname "$0")/tessera.sh  # made by copy_program.sh
[[ -x $program ]] || program=tessera
exec "$program" health act --slurm --max-drained "${TESSERA_MAX_DRAINED:-2}" --node "${SLURMD_NODENAME:-$(hostname -s)}"

#!/bin/bash
# HealthCheckProgram: drains or returns this node, by the verdict of `tessera health serve`'s daemon. Slurm starts this
# script as root, without a PATH. /etc/default/tessera may set TESSERA_MAX_DRAINED, the number of nodes that may be
# drained.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
settings=/etc/default/tessera  # Slurm gives this script an environment of its own
# shellcheck source=/dev/null
[[ ! -r $settings ]] || . "$settings"
program=$(dirname "$0")/tessera.sh  # made by copy_program.sh
[[ -x $program ]] || program=tessera
exec "$program" health act --slurm --max-drained "${TESSERA_MAX_DRAINED:-2}" --node "${SLURMD_NODENAME:-$(hostname -s)}"

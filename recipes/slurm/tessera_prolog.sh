#!/bin/bash
# Prolog: refuses the job to a node that the daemon calls bad, that multiplies wrongly or slower than its peers, or on
# which an earlier job has left something. Remove --idle if jobs share nodes. /etc/default/tessera may set
# TESSERA_RATES, a folder that all nodes see.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
settings=/etc/default/tessera  # Slurm gives this script an environment of its own
# shellcheck source=/dev/null
[[ ! -r $settings ]] || . "$settings"
program=$(dirname "$0")/tessera.sh  # made by copy_program.sh
[[ -x $program ]] || program=tessera
exec "$program" health check --active --idle --before-job --node "${SLURMD_NODENAME:-$(hostname -s)}" \
  ${TESSERA_RATES:+--rates "$TESSERA_RATES"}

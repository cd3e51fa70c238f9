#!/bin/bash
# Prolog: a node that multiplies wrongly, or slower than its peers, does not get the job; nor does one on which an
# earlier job has left something. Leave --idle out where jobs share nodes. TESSERA_RATES: a folder that all nodes see.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
program=$(dirname "$0")/tessera.sh  # of copy_program.sh
[[ -x $program ]] || program=tessera
exec "$program" health check --active --idle --node "${SLURMD_NODENAME:-$(hostname -s)}" \
  ${TESSERA_RATES:+--rates "$TESSERA_RATES"}

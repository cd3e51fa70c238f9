#!/bin/bash
# SuspendProgram: ends nodes that have been idle for SuspendTime. Slurm starts this script as SlurmUser, without a PATH.
#   tessera_suspend.sh 'cloud-[1-3]'
set -u
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
for node in $(scontrol show hostnames "$1"); do
  "$(dirname "$0")/cloud_node.sh" down "$node" || logger -t tessera_suspend "the cloud did not end $node" 2>/dev/null
done

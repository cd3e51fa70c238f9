#!/bin/bash
# ResumeProgram: starts the nodes that Slurm asks for. If a node cannot be started, it tells Slurm at once, so that the
# job waits for another node and not for ResumeTimeout. The node is then off as before, and Slurm may ask for it again.
# Slurm starts this script as SlurmUser, without a PATH.
#   tessera_resume.sh 'cloud-[1-3]'
set -u
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
for node in $(scontrol show hostnames "$1"); do
  "$(dirname "$0")/cloud_node.sh" up "$node" && continue
  logger -t tessera_resume "the cloud gives no $node" 2>/dev/null
  scontrol update nodename="$node" state=POWER_DOWN_FORCE \
    reason="[node_problem] cloudRefused: $node could not be started"
done

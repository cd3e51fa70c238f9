#!/bin/bash
# Starts or ends the machine of one node. This is the only place for a cloud's own commands. It returns when the cloud
# has accepted the order. The machine's slurmd reports to Slurm when it runs. Slurm also asks for `down` after the cloud
# has refused a machine.
#   cloud_node.sh up|down NODE
set -eu
case $1 in
  up) echo "cloud_node.sh: say here how your cloud starts a machine for the node $2" >&2 ;;
  down) echo "cloud_node.sh: say here how your cloud ends the machine of the node $2" >&2 ;;
esac
exit 1

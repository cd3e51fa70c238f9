#!/bin/bash
# The one place for a cloud's own commands: starts or ends the machine of one node. It returns when the cloud has taken
# the order; the machine's slurmd tells Slurm that it is there.
#   cloud_node.sh up|down NODE
set -eu
case $1 in
  up) echo "cloud_node.sh: say here how your cloud starts a machine for the node $2" >&2 ;;
  down) echo "cloud_node.sh: say here how your cloud ends the machine of the node $2" >&2 ;;
esac
exit 1

#!/usr/bin/env bash
# A cluster in a box: a head, three nodes and a spare (n1 to n4), with Slurm, munge and ssh. Each is one process tree in
# namespaces of its own, with its own host name, network, /dev/shm and /tmp. All see the same disk, as over NFS. Slurm
# starts and ends nodes of its partition "cloud" (c1 to c4) while `lab.sh cloud` runs.
#
#   lab.sh [--lab DIR] up                  start it; needs root. Everything that it writes is in DIR
#   lab.sh [--lab DIR] down                end it and leave nothing, in whatever state it is
#   lab.sh [--lab DIR] status              machines, Slurm's view of them, ranks
#   lab.sh [--lab DIR] in NODE CMD ...     run a command on a node
#   lab.sh [--lab DIR] cloud               be the cloud: until it is killed, start and end the machines that Slurm asks for
#   lab.sh [--lab DIR] ranks               the running ranks of `tessera train`, as lines RANK NODE PID
#   lab.sh [--lab DIR] fault NAME [...]    prints the time in seconds since 1970, and does one of:
#     kill-rank RANK, stop-rank RANK          SIGKILL, SIGSTOP
#     slow-rank RANK [STOPPED RUNNING]        SIGSTOP and SIGCONT in turns, of so many seconds (0.15 0.05)
#     slow-node NODE [STOPPED RUNNING]        the same of all programs of Tessera on it that compute, also of later ones
#     slow-link NODE [MBIT]                   packets from it pass at so many Mbit/s (100)
#     flip FILE OFFSET                        flips one bit of a byte, also of /proc/PID/mem
#     crash NODE                              all its processes die; its kernel still closes their connections
#     power-cut NODE                          the same with the cable pulled first: silence
#     freeze NODE                             no process of it runs; connections stay open
#     link-down NODE                          the cable is pulled
#     one-way-loss NODE [in|out]              packets to it (in) or from it (out) are lost
#     disk-full, disk-hung                    of DIR/disk, which all nodes share: no space; writes hang
#   lab.sh [--lab DIR] repair NODE|disk    undo any fault as an operator would; boots a node that is off
#
# Exit status 77 where this machine cannot do it, with one line that says what is missing.
set -euo pipefail

self=$(realpath "${BASH_SOURCE[0]}")
repository=$(realpath "$(dirname "$self")/../..")
lab=/tmp/tessera-lab
if [[ ${1:-} == --lab ]]; then
  lab=$(realpath -m "$2")
  shift 2
fi
all=(head n1 n2 n3 n4)
cloud=(c1 c2 c3 c4)  # machines that are off at first

fail() { echo "lab.sh: $*" >&2; exit 1; }
skip() { echo "lab.sh: skipped: $*" >&2; exit 77; }

address() {
  case $1 in
    head) echo 10.77.0.254 ;;
    c*) echo "10.77.0.10${1#c}" ;;
    *) echo "10.77.0.${1#n}" ;;
  esac
}

# Prints the pid of a machine's first process, as seen from outside. The script finds processes by their command lines.
# Files of pids may be stale, or not yet written when the script is killed.
pid_of() {
  local parents
  parents=$(pgrep -d, -fx "unshare .* init $lab $1") && pgrep -P "$parents" -fx "bash $self init $lab $1"
}
processes_of() { ps -e -o pidns=,pid= | awk -v ns="$(stat -Lc %i "/proc/$1/ns/pid")" '$1 == ns { print $2 }'; }

enter() {  # NODE CMD ...
  local pid
  pid=$(pid_of "$1") || fail "$1 is off; 'lab.sh repair $1' boots it"
  shift
  local namespaces=(--net --uts --ipc --mount --pid)
  if [[ -e /proc/self/ns/time_for_children ]]; then namespaces+=(--time); fi
  # bash looks up the folder on the machine, because /tmp is another one there.
  exec nsenter --target "$pid" "${namespaces[@]}" env HOME="$(getent passwd root | cut -d: -f6)" OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 bash -c 'cd "$0" 2>/dev/null || cd /; exec "$@"' "$PWD" "$@"
}
in_network_of() {  # NODE CMD ...
  local pid
  pid=$(pid_of "$1") || return 1
  nsenter --target "$pid" --net "${@:2}"
}
slurm() { (enter head timeout -k 1 10 "$@"); }

check() {
  [[ $(id -u) -eq 0 ]] || skip "needs root for namespaces"
  local command
  for command in slurmctld slurmd munged sshd ip nft mpirun nsenter pgrep; do
    command -v "$command" >/dev/null || skip "needs $command; run scripts/setup.sh cluster"
  done
  unshare --time --boottime 0 --net --uts --ipc --mount --pid --fork --mount-proc true 2>/dev/null ||
    skip "needs namespaces: unshare --time --net --uts --ipc --mount --pid fails here"
  unshare --net bash -c 'ip link add sw0 type bridge && ip link add veth0 type veth peer name veth1' 2>/dev/null ||
    skip "needs a kernel with bridges and veth pairs"
}

write_configuration() {
  mkdir -p "$lab"/{etc/slurm,ssh,log,state,spool,shared,disk,cloud}
  mungekey --create --keyfile="$lab/munge.key"
  chmod 600 "$lab/munge.key"
  ssh-keygen -q -t ed25519 -N "" -f "$lab/ssh/host_key"
  ssh-keygen -q -t ed25519 -N "" -f "$lab/ssh/user_key"
  { echo "127.0.0.1 localhost"; for name in "${all[@]}" "${cloud[@]}"; do echo "$(address "$name") $name"; done; } >"$lab/etc/hosts"
  cat >"$lab/etc/ssh_config" <<END
Host *
  IdentityFile $lab/ssh/user_key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
END
  cat >"$lab/etc/sshd_config" <<END
HostKey $lab/ssh/host_key
AuthorizedKeysFile $lab/ssh/user_key.pub
StrictModes no
PermitRootLogin yes
UsePAM no
PidFile none
MaxStartups 100
SetEnv OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
END
  # There are more ranks than cores here, so ranks yield while they wait.
  cat >"$lab/etc/openmpi.conf" <<END
pml = ob1
btl = self,vader,tcp
btl_tcp_if_include = 10.77.0.0/24
oob_tcp_if_include = 10.77.0.0/24
mpi_yield_when_idle = 1
END
  # proctrack/linuxproc needs no cgroup, but slurmd does not start without a plugin for cgroups.
  echo "CgroupPlugin=cgroup/v1" >"$lab/etc/slurm/cgroup.conf"
  # Slurm starts this script without a PATH. A node without a health daemon has no verdict.
  cat >"$lab/etc/slurm/health_check.sh" <<END
#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
[[ -e /run/tessera-health/verdict.json ]] || exit 0
exec $lab/shared/tessera health act --slurm --node "\$(hostname)"
END
  chmod +x "$lab/etc/slurm/health_check.sh"
  cp "$repository"/recipes/slurm/tessera_{resume,suspend}.sh "$lab/etc/slurm"
  # slurmctld cannot start machines, because they are outside of its own machine. It writes a file, and `lab.sh cloud`
  # acts on it. The cloud refuses a node while there is a file refuse.NODE.
  cat >"$lab/etc/slurm/cloud_node.sh" <<END
#!/bin/bash
[[ \$1 == down || ! -e "$lab/cloud/refuse.\$2" ]] || exit 1
touch "$lab/cloud/\$2.\$1"
END
  chmod +x "$lab/etc/slurm/cloud_node.sh"
  # The timers are short, so that Slurm notices within seconds what it notices within minutes elsewhere.
  cat >"$lab/etc/slurm/slurm.conf" <<END
ClusterName=lab
SlurmctldHost=head(10.77.0.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$lab/log/slurmctld.log
SlurmdLogFile=$lab/log/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=5,sched_interval=5,sched_min_interval=100000,permit_job_expansion
SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=2
KillWait=3
BatchStartTimeout=10
ReturnToService=0
JobRequeue=1
RequeueExit=75
RequeueExitHold=93
HealthCheckProgram=/etc/slurm/health_check.sh
HealthCheckInterval=5
HealthCheckNodeState=ANY,CYCLE
ResumeProgram=/etc/slurm/tessera_resume.sh
SuspendProgram=/etc/slurm/tessera_suspend.sh
ResumeTimeout=30
SuspendTimeout=5
ResumeRate=0
SuspendRate=0
NodeName=n[1-4] NodeAddr=10.77.0.[1-4] CPUs=8 RealMemory=2000 State=UNKNOWN
NodeName=c[1-4] NodeAddr=10.77.0.[101-104] CPUs=8 RealMemory=2000 State=CLOUD
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
PartitionName=cloud Nodes=c[1-4] MaxTime=INFINITE State=UP SuspendTime=10
END
}

# Makes the disk that faults fill or hang. It is a separate file system, mounted before the machines copy the table of
# mounts.
make_disk() {
  truncate -s 256M "$lab/disk.image"
  if mkfs.ext4 -q -m 0 -O ^has_journal "$lab/disk.image" && mount -o loop,noatime "$lab/disk.image" "$lab/disk" 2>/dev/null; then
    return
  fi
  mount -t tmpfs -o size=256m lab-disk "$lab/disk"  # tmpfs cannot hang
}

start() {  # starts a machine without a cable
  # slurmctld takes a node for rebooted only if the node's uptime begins anew.
  setsid unshare --time --boottime "-$(cut -d. -f1 /proc/uptime)" --net --uts --ipc --mount --pid --fork \
    --kill-child=KILL --mount-proc bash "$self" init "$lab" "$1" </dev/null >"$lab/log/$1.console" 2>&1 &
  until pid_of "$1" >/dev/null; do sleep 0.02; done
}

plug() {  # connects a machine's cable to the switch
  local pid
  pid=$(pid_of "$1")
  in_network_of switch ip link del "sw-$1" 2>/dev/null || true  # the cable of a dead machine goes away late
  in_network_of switch ip link add "sw-$1" type veth peer name eth0 netns "$pid"
  in_network_of switch ip link set "sw-$1" master sw0 up
}

# Runs as a machine's first process. When it dies, the machine dies.
init() {  # NAME
  cd /
  mount --make-rprivate /
  hostname "$1"
  ip link set lo up
  if [[ $1 == switch ]]; then
    ip link add sw0 type bridge
    ip link set sw0 up
    while :; do sleep 3600; done
  fi
  mount -t tmpfs -o size=1g tmpfs /dev/shm
  # The machine has its own /tmp, /run and home folder, for PMIx, munge and sshd. So the start-up files of shells cannot
  # leave locks of dead machines on this one. Of the outer folders, the machine sees only the repository and the lab.
  local place folder
  for place in /tmp "$(getent passwd root | cut -d: -f6)"; do
    mount -t tmpfs -o size=256m tmpfs /mnt
    for folder in "$repository" "$lab"; do
      [[ $folder == "$place"/* ]] || continue
      mkdir -p "/mnt/${folder#"$place"/}"
      mount --rbind "$folder" "/mnt/${folder#"$place"/}"
    done
    mount --move /mnt "$place"
  done
  mount -t tmpfs tmpfs /run
  mkdir -p /run/sshd /run/munge
  mount --bind "$lab/etc/slurm" /etc/slurm
  mount --bind "$lab/etc/hosts" /etc/hosts
  mount --bind "$lab/etc/ssh_config" /etc/ssh/ssh_config
  mount --bind "$lab/etc/openmpi.conf" /etc/openmpi/openmpi-mca-params.conf
  cat /proc/sys/kernel/random/uuid >/run/boot_id
  mount --bind /run/boot_id /proc/sys/kernel/random/boot_id

  local device=eth0
  until ip link show $device >/dev/null 2>&1; do sleep 0.02; done
  ip addr add "$(address "$1")/24" dev $device
  ip link set $device up
  munged --force --key-file="$lab/munge.key" --log-file=/run/munge/log --seed-file=/run/munge/seed
  "$(command -v sshd)" -f "$lab/etc/sshd_config"  # sshd wants its full path
  if [[ $1 == head ]]; then
    while :; do slurmctld -D || sleep 1; done &
  else
    mkdir -p "$lab/spool/$1"
    slurmd -D -N "$1" &
  fi
  while :; do wait; sleep 3600; done  # bash reaps every orphan
}

# Waits until Slurm and ssh work on the nodes.
wait_until_ready() {  # NODE ...
  local name deadline=$((SECONDS + 30))
  for name in "$@"; do
    until slurm sinfo -h -n "$name" -o %T 2>/dev/null | grep -qx -e idle -e mixed -e allocated; do
      [[ $SECONDS -lt $deadline ]] || fail "$name is not ready after 30 s: $(slurm sinfo -h -n "$name" -o '%T %E'); see $lab/log"
      # Slurm does not use a node that was down until it is told that the node is repaired.
      slurm scontrol update nodename="$name" state=resume 2>/dev/null || true
      sleep 0.1
    done
    until (enter head ssh "$name" true) 2>/dev/null; do
      [[ $SECONDS -lt $deadline ]] || fail "no ssh to $name after 30 s; see $lab/log/$name.console"
      sleep 0.1
    done
  done
}

up() {
  check
  mkdir "$lab" 2>/dev/null || fail "there is $lab already; 'lab.sh --lab $lab down' removes a lab"
  touch "$lab/is_a_lab"
  write_configuration
  make_disk
  start switch
  until in_network_of switch ip link show sw0 >/dev/null 2>&1; do sleep 0.02; done
  local name
  for name in "${all[@]}"; do start "$name"; plug "$name"; done
  wait_until_ready "${all[@]:1}"
}

# Acts as the cloud, which alone starts and ends these machines. It takes some seconds to start one.
cloud() {
  local order name
  while :; do
    for order in "$lab"/cloud/*.up "$lab"/cloud/*.down; do
      [[ -e $order ]] || continue
      rm "$order"
      name=$(basename "${order%.*}")
      case ${order##*.} in
        up) if ! pid_of "$name" >/dev/null; then sleep 2; start "$name"; plug "$name"; fi ;;
        down) kill -KILL "$(pid_of "$name")" 2>/dev/null || true ;;
      esac
    done
    sleep 0.1
  done
}

down() {
  [[ -e $lab ]] || return 0
  if [[ ! -e $lab/is_a_lab ]] && rmdir "$lab" 2>/dev/null; then return 0; fi  # `up` was killed after its first command
  [[ -e $lab/is_a_lab ]] || fail "$lab is not a lab: it has no file is_a_lab"
  # Processes on a frozen machine or a frozen disk cannot die.
  fsfreeze --unfreeze "$lab/disk" 2>/dev/null || true
  local name deadline=$((SECONDS + 20)) pids=""
  for name in "${all[@]}"; do thaw "$name"; done
  # A machine's first process ends only after all its other processes. While it ends, it has no command line any more.
  pkill -KILL -f "lab.sh --lab $lab cloud\$" || true
  while pids=$(pgrep -f "^(unshare|bash) .*init $lab (switch|head|[nc][1-4])\$" || ps -o pid= -p "${pids:-0}"); do
    [[ $SECONDS -lt $deadline ]] || fail "processes do not end: $pids"
    pids=$(echo $pids)  # on one line
    kill -KILL $pids 2>/dev/null || true
    sleep 0.05
  done
  for name in "${all[@]}"; do [[ ! -d $(cgroup_of "$name") ]] || rmdir "$(cgroup_of "$name")"; done
  while mountpoint -q "$lab/disk"; do umount "$lab/disk" || sleep 0.1; done
  rm -rf "$lab"
}

cgroup_of() {
  local root
  root=$(findmnt -n -o TARGET -t cgroup2 | head -1)
  echo "${root:-/nonexistent}/tessera${lab//\//-}-$1"
}
freeze() {
  local pid group
  pid=$(pid_of "$1")
  group=$(cgroup_of "$1")
  if mkdir -p "$group" 2>/dev/null; then
    # The second pass moves the processes that were started during the first. Their children then start in the group.
    for _ in 1 2; do
      for process in $(processes_of "$pid"); do echo "$process" >"$group/cgroup.procs" || true; done 2>/dev/null
    done
    echo 1 >"$group/cgroup.freeze"
  else
    kill -STOP $(processes_of "$pid")
  fi
}
thaw() {
  local pid group
  group=$(cgroup_of "$1")
  if [[ -d $group ]]; then
    echo 0 >"$group/cgroup.freeze"
  elif pid=$(pid_of "$1"); then
    kill -CONT $(processes_of "$pid") 2>/dev/null || true
  fi
}

ranks() {
  local name process rank space
  local -A machines=([none]="")
  for name in "${all[@]}" "${cloud[@]}"; do
    if process=$(pid_of "$name"); then machines[$(readlink "/proc/$process/ns/pid" || echo none)]=$name; fi
  done
  for process in $(pgrep -f '^[^ ]*tessera[^ ]* train '); do
    space=$(readlink "/proc/$process/ns/pid" || echo none)  # the process may end meanwhile
    rank=$(tr '\0' '\n' <"/proc/$process/environ" | sed -n 's/^PMIX_RANK=//p') || true
    if [[ -n ${machines[$space]:-} && -n $rank ]]; then echo "$rank ${machines[$space]} $process"; fi
  done 2>/dev/null | sort -n
}
process_of_rank() {
  local line
  line=$(ranks | grep "^$1 ") || fail "there is no rank $1; these are running: $(ranks | cut -d' ' -f1 | tr '\n' ' ')"
  echo "$line"
}

fault() {
  local kind=$1 pid rank node process
  shift
  case $kind in
    kill-rank | stop-rank | slow-rank) read -r rank node process <<<"$(process_of_rank "${1:?rank}")" ;;
    crash | power-cut | freeze | link-down | one-way-loss | slow-node | slow-link)
      pid=$(pid_of "${1:?node}") || fail "$1 is off" ;;
  esac
  echo "$EPOCHREALTIME"
  case $kind in
    kill-rank) kill -KILL "$process" ;;
    stop-rank) kill -STOP "$process" ;;
    slow-rank)
      # The loop runs in the machine's own namespaces. It ends with the machine, and with the rank.
      process=$(awk '/^NSpid:/ { print $NF }' "/proc/$process/status")
      (enter "$node" setsid bash -c "while kill -STOP $process && sleep ${2:-0.15} && kill -CONT $process; do sleep ${3:-0.05}; done" \
        </dev/null >/dev/null 2>&1 &) ;;
    slow-node)
      (enter "$1" setsid bash -c "exec -a slow-node bash -c 'while :; do pkill -STOP -f \"\$0\"; sleep ${2:-0.15}
        pkill -CONT -f \"\$0\"; sleep ${3:-0.05}; done' '^[^ ]*tessera (train|health check)'" </dev/null >/dev/null 2>&1 &) ;;
    slow-link) in_network_of "$1" tc qdisc replace dev eth0 root tbf rate "${2:-100}mbit" burst 64k latency 50ms ;;
    flip)
      local byte
      byte=$(dd if="$1" bs=1 skip="$2" count=1 status=none | od -An -tu1)
      printf "\\x$(printf %02x $((byte ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none ;;
    crash) kill -KILL "$pid" ;;
    power-cut) in_network_of switch ip link set "sw-$1" down; kill -KILL "$pid" ;;
    freeze) freeze "$1" ;;
    link-down) in_network_of switch ip link set "sw-$1" down ;;
    one-way-loss)
      local hook=input name=iif
      if [[ ${2:-in} == out ]]; then hook=output name=oif; fi
      in_network_of "$1" nft "add table inet lab; add chain inet lab loss { type filter hook $hook priority 0; };
        add rule inet lab loss $name eth0 drop" ;;
    disk-full)
      # Until the repair, the loop also takes the space that others free. It runs on the switch, which never fails and
      # ends with the lab.
      touch "$lab/disk_is_full"
      cat /dev/zero >"$lab/disk/ballast" 2>/dev/null || true
      (enter switch setsid bash -c "while [[ -e $lab/disk_is_full ]]; do cat /dev/zero >>$lab/disk/ballast; sleep 0.05; done
        rm $lab/disk/ballast" </dev/null >/dev/null 2>&1 &) ;;
    disk-hung)
      [[ $(stat -fc %T "$lab/disk") != tmpfs ]] || skip "disk-hung needs loop devices and ext4"
      fsfreeze --freeze "$lab/disk" ;;
    *) fail "unknown fault '$kind'; $self lists them in its head" ;;
  esac
}

repair() {
  if [[ $1 == disk ]]; then
    fsfreeze --unfreeze "$lab/disk" 2>/dev/null || true
    rm -f "$lab/disk_is_full"
    while [[ -e $lab/disk/ballast ]]; do sleep 0.02; done
    return
  fi
  thaw "$1"
  if pid_of "$1" >/dev/null; then
    in_network_of switch ip link set "sw-$1" up
    in_network_of "$1" nft delete table inet lab 2>/dev/null || true
    in_network_of "$1" tc qdisc del dev eth0 root 2>/dev/null || true
    (enter "$1" pkill -f '^slow-node') || true
    (enter "$1" pkill -CONT -f '^[^ ]*tessera (train|health check)') || true
  else
    # Slurm may not have noticed yet that the node is down. It would take the reboot for a crash of the node.
    if [[ $1 != head ]]; then slurm scontrol update nodename="$1" state=down reason=repaired; fi
    start "$1"
    plug "$1"
  fi
  if [[ $1 != head ]]; then wait_until_ready "$1"; else wait_until_ready n1; fi
}

status() {
  [[ -e $lab/is_a_lab ]] || fail "there is no lab at $lab; 'lab.sh up' starts one"
  local name
  for name in "${all[@]}" "${cloud[@]}"; do echo "$name $(address "$name") $(pid_of "$name" >/dev/null && echo on || echo off)"; done
  slurm sinfo -N -o "%N %T %E" || true
  ranks
}

case ${1:-} in
  up | down | status | check | ranks | cloud) "$1" ;;
  in) enter "${@:2}" ;;
  fault | repair) "$@" ;;
  init)
    lab=$2
    init "$3" ;;
  *) sed -n '2,/^set -/{/^#/s/^# \?//p}' "$self"; exit 2 ;;
esac

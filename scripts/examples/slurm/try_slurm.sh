#!/usr/bin/env bash
# A throw-away SLURM of two nodes, n1 and n2, on one Linux machine: to try the scripts of this folder without a cluster.
#
#   apt-get install slurm-wlm munge iproute2      Debian's; run as root
#   scripts/examples/slurm/try_slurm.sh up                 prints what to export, so that sbatch and srun find it
#   scripts/examples/slurm/try_slurm.sh kill 2             the node dies: its network and all of its processes
#   scripts/examples/slurm/try_slurm.sh node 2             it comes back
#   scripts/examples/slurm/try_slurm.sh down
#
# Each node is a slurmd with a network, host name and processes of its own (namespaces), and claims eight cores. Both see this
# machine's files. A job in the partition `high` preempts those in `low`. No GPUs: sbatch --gpus-per-node 0.
set -euo pipefail

dir=${TRY_SLURM_DIR:-/tmp/try_slurm}
export SLURM_CONF=$dir/slurm.conf

configure() {
  mkdir -p "$dir"/{state,n1,n2}
  printf '127.0.0.1 localhost\n10.77.0.254 %s\n10.77.0.1 n1\n10.77.0.2 n2\n' "$(hostname)" > "$dir/hosts"
  echo "CgroupPlugin=cgroup/v$([[ -e /sys/fs/cgroup/cgroup.controllers ]] && echo 2 || echo 1)" > "$dir/cgroup.conf"
  cat > "$SLURM_CONF" <<END
ClusterName=try
SlurmctldHost=$(hostname)(10.77.0.254)
SlurmUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/%n
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=30
KillWait=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeAddr=10.77.0.1 CPUs=8
NodeName=n2 NodeAddr=10.77.0.2 CPUs=8
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
END
}

start_node() {
  local name=n$1
  end_node "$1"
  ip netns add "try-$name"
  ip link add "try-$name" type veth peer name eth0 netns "try-$name"
  ip link set "try-$name" master try0 up
  ip -n "try-$name" link set lo up
  ip -n "try-$name" addr add "10.77.0.$1/24" dev eth0
  ip -n "try-$name" link set eth0 up
  # The shell that waits is the first process of the node, and takes up those whose parents have ended.
  setsid nsenter --net="/run/netns/try-$name" unshare --uts --mount --pid --fork --kill-child --mount-proc bash -c \
    "hostname $name; mount --bind $dir/hosts /etc/hosts; slurmd -D -N $name & wait" > "$dir/$name.log" 2>&1 < /dev/null &
  echo $! > "$dir/$name.node"
}

end_node() {
  ip link del "try-n$1" 2> /dev/null || true
  [[ ! -s $dir/n$1.node ]] || kill -KILL "$(cat "$dir/n$1.node")" 2> /dev/null || true
  rm -f "$dir/n$1.node"
  ip netns del "try-n$1" 2> /dev/null || true
}

end_all() {
  end_node 1
  end_node 2
  [[ ! -s $dir/slurmctld.pid ]] || kill "$(cat "$dir/slurmctld.pid")" 2> /dev/null || true
  ip link del try0 2> /dev/null || true
}

case ${1:-} in
  up)
    end_all
    configure
    install -d -o munge /run/munge
    munge -n > /dev/null 2>&1 || runuser -u munge -- munged
    ip link add try0 type bridge
    ip addr add 10.77.0.254/24 dev try0
    ip link set try0 up
    slurmctld -c
    start_node 1
    start_node 2
    for _ in {1..30}; do
      [[ $(sinfo --noheader --partition low --states idle --format %D) != 2 ]] || break
      sleep 1
    done
    sinfo
    echo "export SLURM_CONF=$SLURM_CONF"
    ;;
  node) start_node "$2" ;;
  kill) end_node "$2" ;;
  down) end_all ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

#!/usr/bin/env bash
# Runs one p2pkv node in the foreground, for a service manager: finds p2pkv, names the host, and
# becomes `p2pkv node "$@"`. Everything else is said by options, by P2PKV_* variables or by a file
# (see docs/configuration.md).
#
#   P2PKV_HOME    a virtual environment that has p2pkv; default: the one that is active, else
#                 .venv beside this checkout, else `p2pkv` on PATH, else `python3 -m p2pkv.cli`
#   P2PKV_CONFIG  a TOML file, passed on as --config
#   P2PKV_HOST    the host's label for placement; default: the host's name, so that copies of a
#                 bucket never share a machine
#   P2PKV_NODE_ID the node's name, kept across restarts; default: the host's name, under Slurm with
#                 several tasks on a host with the task's number on it
#   P2PKV_ADVERTISE "auto" stands for this host's first address
#
# systemd, /etc/systemd/system/p2pkv.service (SIGTERM hands the buckets over first, so the time to
# stop must exceed drain_timeout_s):
#
#   [Unit]
#   Description=p2pkv node
#   After=network-online.target
#   Wants=network-online.target
#
#   [Service]
#   Environment=P2PKV_HOME=/opt/p2pkv P2PKV_CONFIG=/etc/p2pkv.toml
#   ExecStart=/opt/p2pkv/launch_node.sh
#   KillMode=mixed
#   TimeoutStopSec=150
#   Restart=on-failure
#   RestartSec=2
#   LimitNOFILE=65536
#   LimitMEMLOCK=infinity
#   DynamicUser=yes
#
#   [Install]
#   WantedBy=multi-user.target
#
# Slurm, one node on each host of the job, given 150 s to drain before the job's end:
#
#   #SBATCH --signal=TERM@150
#   P2PKV_ADVERTISE=auto srun --ntasks-per-node=1 scripts/launch_node.sh \
#        --etcd-endpoints=http://head:2379 --bind=0.0.0.0 --insecure --memory-limit-bytes=64GiB &
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
host=${SLURMD_NODENAME:-$(uname -n)}

find_p2pkv() {
    local home
    for home in "${P2PKV_HOME:-}" "${VIRTUAL_ENV:-}" "$here/../.venv"; do
        if [ -n "$home" ] && [ -x "$home/bin/p2pkv" ]; then
            p2pkv=("$home/bin/p2pkv")
            return
        fi
        if [ -n "$home" ] && [ "$home" = "${P2PKV_HOME:-}" ]; then
            echo "P2PKV_HOME = $home: there is no bin/p2pkv in it" >&2
            exit 2
        fi
    done
    if command -v p2pkv >/dev/null; then
        p2pkv=(p2pkv)
    elif python3 -c 'import p2pkv' 2>/dev/null; then
        p2pkv=(python3 -m p2pkv.cli)
    else
        echo "p2pkv was not found: set P2PKV_HOME to a virtual environment that has it" >&2
        exit 2
    fi
}

name_host() {
    export P2PKV_HOST=${P2PKV_HOST:-$host}
    if [ -z "${P2PKV_NODE_ID:-}" ]; then
        P2PKV_NODE_ID=${host:0:58}
        if [ "${SLURM_NTASKS_PER_NODE:-1}" != 1 ]; then
            P2PKV_NODE_ID+=.${SLURM_LOCALID:-0}
        fi
    fi
    export P2PKV_NODE_ID
    if [ "${P2PKV_ADVERTISE:-}" = auto ]; then
        P2PKV_ADVERTISE=$(hostname -I | cut -d' ' -f1)
        export P2PKV_ADVERTISE
    fi
}

find_p2pkv
name_host
config=()
if [ -n "${P2PKV_CONFIG:-}" ]; then
    config=(--config "$P2PKV_CONFIG")
fi
exec "${p2pkv[@]}" node ${config[@]+"${config[@]}"} "$@"

#!/usr/bin/env bash
# Does RDMA work here, by p2pkv's own code? Looks at devices, limits and libucp, then moves bytes
# and verifies them, and says what to do about each shortcoming. About five minutes.
#
#   scripts/check_rdma.sh                          this host alone: two processes, over RDMA
#   scripts/check_rdma.sh serve ADDRESS [PORT]     on one host (port 18515); stop it with Ctrl-C
#   scripts/check_rdma.sh ADDRESS [PORT]           on another, while the first one serves
#
#   P2PKV_PYTHON        a Python that has p2pkv with its UCX extension; default: .venv's, else python3
#   P2PKV_UCX_LIBRARY   a libucp to use and no other
#   P2PKV_RDMA_TLS      UCX_TLS for RDMA; default rc (with an adapter that has it, also try dc)
#   P2PKV_RDMA_DEVICE   UCX_NET_DEVICES, such as mlx5_0:1; default: UCX chooses
#   P2PKV_RDMA_GPU=1    this side's memory on a GPU as well (needs cupy; proves GPUDirect)
#
# Exit status: 0 if RDMA moved bytes, 1 if not, 2 if it could not be tried. The serving side answers
# anyone who can connect, so serve on an address of a network that you trust.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tls=${P2PKV_RDMA_TLS:-rc}
failures=0

say() { printf '%s\n' "$*"; }
good() { printf '  ok    %s\n' "$*"; }
note() { printf '  note  %s\n' "$*"; }
bad() {
    printf '  FAIL  %s\n' "$*"
    failures=$((failures + 1))
}

find_python() {
    local candidate
    for candidate in "${P2PKV_PYTHON:-}" "$root/.venv/bin/python" "$root/.venv-test/bin/python" python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import p2pkv' 2>/dev/null; then
            python=$candidate
            return
        fi
    done
    bad "no Python with p2pkv was found: set P2PKV_PYTHON"
    exit 2
}

check_devices() {
    local device port state found=
    say "devices"
    for device in /sys/class/infiniband/*; do
        [ -e "$device" ] || continue
        for port in "$device"/ports/*; do
            found=1
            state=$(cat "$port/state" 2>/dev/null)
            if [[ $state == *ACTIVE* ]]; then
                good "${device##*/} port ${port##*/}: $(cat "$port/link_layer"), $(cat "$port/rate")"
            else
                note "${device##*/} port ${port##*/} is ${state:-in an unknown state}: see the cable, the switch, the subnet manager"
            fi
        done
    done
    if [ -z "$found" ]; then
        bad "the kernel knows no RDMA device (/sys/class/infiniband): adapter and driver (mlx5_ib, irdma, efa, rdma_rxe) needed"
    elif ! compgen -G '/dev/infiniband/uverbs*' >/dev/null; then
        bad "/dev/infiniband/uverbs* is missing: load ib_uverbs; in a container pass --device=/dev/infiniband"
    else
        for device in /dev/infiniband/uverbs*; do
            [ -r "$device" ] && [ -w "$device" ] || bad "$device may not be opened by $(id -un)"
        done
    fi
}

check_limits() {
    local limit
    say "limits"
    limit=$(ulimit -l)
    if [ "$limit" = unlimited ]; then
        good "locked memory is not limited"
    else
        note "locked memory is limited to $limit KiB: LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (containers), /etc/security/limits.conf"
    fi
    if [ -e /sys/module/nvidia_peermem ] || [ -e /sys/module/nv_peer_mem ]; then
        good "GPU memory can be reached by the adapter (nvidia_peermem)"
    elif [ -e /proc/driver/nvidia/version ]; then
        note "a GPU without nvidia_peermem: modprobe nvidia_peermem, unless kernel and driver have dma-buf"
    fi
}

check_library() {
    say "libucp"
    "$python" - <<'END'
import sys

from p2pkv.ucx_library import doctor

facts = doctor()
if not facts.usable:
    print(f"  FAIL  {facts.why_not}")
    sys.exit(2)
print(f"  ok    UCX {facts.version}, {facts.library} ({facts.source})")
print(f"  ok    transports: {', '.join(facts.transports)}")
print(f"  {'ok  ' if facts.rdma else 'FAIL'}  {facts.rdma_reason}")
for advice in facts.advice:
    print(f"  note  {advice}")
sys.exit(0 if facts.rdma else 1)
END
    case $? in
    0) ;;
    1) failures=$((failures + 1)) ;;
    *) exit 2 ;;
    esac
}

# UCX's own test, where it is installed: tells a fault of the machine from one of p2pkv.
check_perftest() {
    local test server port=$((20000 + RANDOM % 10000))
    test=$(command -v ucx_perftest) || {
        note "ucx_perftest is not installed (ucx-utils, ucx): UCX's own figures are left out"
        return
    }
    say "ucx_perftest, writes of 1 MiB (UCX_TLS=$tls)"
    UCX_TLS=$tls timeout 60 "$test" -p "$port" >/dev/null 2>&1 &
    server=$!
    sleep 1
    if UCX_TLS=$tls timeout 60 "$test" 127.0.0.1 -p "$port" -t ucp_put_bw -s 1048576 -n 2000 2>&1 |
        awk '/Final:/ { found = 1; print "  ok    " $6 " MB/s" } END { exit !found }'; then
        :
    else
        bad "ucx_perftest did not get through: the machine's RDMA is at fault, not p2pkv"
    fi
    kill "$server" 2>/dev/null
    wait "$server" 2>/dev/null
}

# measure DEVICE [--peer HOST:PORT]
measure() {
    local memory=$1
    shift
    say "writes and reads by p2pkv, $memory memory here (UCX_TLS=$tls)"
    if timeout 150 "$python" "$root/benchmarks/ucx_micro.py" --tls "$tls" --device "$memory" "$@"; then
        good "all bytes verified"
    else
        bad "p2pkv could not move bytes over UCX_TLS=$tls; see above"
    fi
}

find_python
[ -z "${P2PKV_RDMA_DEVICE:-}" ] || export UCX_NET_DEVICES=$P2PKV_RDMA_DEVICE
[[ $tls == *cuda* || -z "${P2PKV_RDMA_GPU:-}" ]] || tls=$tls,cuda_copy

if [ "${1:-}" = serve ]; then
    [ -n "${2:-}" ] || { say "usage: scripts/check_rdma.sh serve ADDRESS [PORT]"; exit 2; }
    check_devices
    check_limits
    check_library
    exec "$python" "$root/benchmarks/ucx_micro.py" serve --bind "$2" --port "${3:-18515}" --tls "$tls"
fi

peer=()
[ -z "${1:-}" ] || peer=(--peer "$1:${2:-18515}")
check_devices
check_limits
check_library
if [ $failures -eq 0 ] || [ -n "${P2PKV_RDMA_TLS:-}" ]; then
    [ ${#peer[@]} -gt 0 ] || check_perftest
    measure host ${peer[@]+"${peer[@]}"}
    [ -z "${P2PKV_RDMA_GPU:-}" ] || measure cuda ${peer[@]+"${peer[@]}"}
fi
if [ $failures -eq 0 ]; then
    say "RDMA works here."
else
    say "RDMA is not proven here: $failures of the checks failed."
    exit 1
fi

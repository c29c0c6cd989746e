"""A real etcd for tests: servers, certificates, users."""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
from pathlib import Path

from p2pkv.errors import ConfigError
from p2pkv.etcd_server import EtcdCluster, EtcdServer, TlsFiles, find_etcd


def make_certificates(directory: Path, host: str = "127.0.0.1") -> TlsFiles:
    """A certificate authority and one certificate for ``host`` and for clients, valid for a day.

    Made by the ``openssl`` program. Raises ConfigError where that is missing or fails.
    """
    if shutil.which("openssl") is None:
        raise ConfigError("openssl is not on PATH: it is needed to make certificates")
    files = TlsFiles(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    ca_key, request, extensions = (directory / n for n in ("ca.key", "cert.csr", "cert.ext"))
    kind = "IP" if _is_address(host) else "DNS"
    extensions.write_text(f"subjectAltName={kind}:{host}\nextendedKeyUsage=serverAuth,clientAuth\n")
    new_key = ["-newkey", "rsa:2048", "-nodes"]
    _openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", files.ca, "-days", "1",
             "-subj", "/CN=p2pkv test authority")  # fmt: skip
    _openssl("req", *new_key, "-keyout", files.key, "-out", request, "-subj", "/CN=p2pkv")
    _openssl("x509", "-req", "-in", request, "-CA", files.ca, "-CAkey", ca_key,
             "-CAcreateserial", "-out", files.cert, "-days", "1",
             "-extfile", extensions)  # fmt: skip
    return files


def enable_auth(cluster: EtcdCluster, user: str, password: str, prefix: str) -> None:
    """Switch authentication on; ``user`` may read and write below ``prefix`` only.

    The user root, needed by etcd, gets the same password. Needs ``etcdctl`` beside the server.
    """
    cluster.ctl("user", "add", f"root:{password}")
    cluster.ctl("user", "grant-role", "root", "root")
    cluster.ctl("role", "add", user)
    cluster.ctl("role", "grant-permission", user, "readwrite", prefix, "--prefix=true")
    cluster.ctl("user", "add", f"{user}:{password}")
    cluster.ctl("user", "grant-role", user, user)
    cluster.ctl("auth", "enable")


def survives_kills() -> bool:
    """Whether the server that would be used may be killed under load without losing its data.

    etcd 3.5.0 to 3.5.2 may not (etcd issue 13766).
    """
    command = [str(find_etcd()), "--version"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    version = text.split("\n")[0].rpartition(" ")[2]
    return version not in ("3.5.0", "3.5.1", "3.5.2")


def _openssl(*arguments: str | Path) -> None:
    command = ["openssl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


__all__ = [
    "EtcdCluster",
    "EtcdServer",
    "TlsFiles",
    "enable_auth",
    "find_etcd",
    "make_certificates",
    "survives_kills",
]

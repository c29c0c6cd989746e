"""Machines that can be cut off from each other, on one host: network namespaces and a router.

Each machine is a namespace with one address, linked to a namespace that forwards between them; a
cut is a routing rule there that drops packets of one direction. The host itself has two addresses:
one for etcd and one for whatever else runs on it, such as clients. Needs root and the program
``ip``; on the host nothing changes but for one interface and one route, which go at the end.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from types import TracebackType
from typing import Self

from p2pkv.errors import ConfigError

BLOCK = "198.18"
"""Addresses set aside for tests of networks (RFC 2544)."""
MACHINES_MAX = 200
_FIRST_MACHINE = 10
_COMMAND_TIMEOUT_S = 20.0


def why_not() -> str:
    """Why namespaces cannot be had here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program ip (iproute2) is not on PATH"
    try:
        with Namespaces():
            return ""
    except ConfigError as e:
        return str(e)


class Namespaces:
    """A network of machines. A context manager.

    with Namespaces() as network:
        network.add("a"), network.add("b")
        subprocess.Popen([*network.prefix("a"), "program"])
        network.cut(network.address("a"), network.address("b"))
    """

    def __init__(self) -> None:
        self._id = secrets.token_hex(3)
        self._router = f"p2pkv-{self._id}"
        self._host_link = f"p2pkv{self._id}"
        self._net = f"{BLOCK}.{secrets.randbelow(256)}"
        self._names: list[str] = []
        self._cuts: set[tuple[str, str]] = set()
        self.client_address = f"{self._net}.1"
        """Of this host, in general."""
        self.etcd_address = f"{self._net}.2"
        """Of this host, for etcd to listen on."""

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

    def add(self, name: str) -> str:
        """A new machine; its address."""
        if len(self._names) >= MACHINES_MAX:
            raise ConfigError(f"machines = {len(self._names) + 1}: must be at most {MACHINES_MAX}")
        self._names.append(name)
        space, link = self._space(name), f"m{len(self._names)}"
        _ip("netns", "add", space)
        _ip("-n", self._router, "link", "add", link, "type", "veth",
            "peer", "name", "eth0", "netns", space)  # fmt: skip
        for interface in ("lo", "eth0"):
            _ip("-n", space, "link", "set", interface, "up")
        _ip("-n", space, "addr", "add", f"{self.address(name)}/32", "dev", "eth0")
        _ip("-n", space, "route", "add", "default", "dev", "eth0")
        self._attach(link, self.address(name))
        return self.address(name)

    def address(self, name: str) -> str:
        return f"{self._net}.{_FIRST_MACHINE + self._names.index(name)}"

    def prefix(self, name: str) -> tuple[str, ...]:
        """What to put before a command so that it runs on this machine."""
        return ("ip", "netns", "exec", self._space(name))

    def cut(self, sender: str, receiver: str) -> None:
        """Drop all packets from one address to another, silently."""
        if (sender, receiver) not in self._cuts:
            self._cuts.add((sender, receiver))
            self._rule("add", sender, receiver)

    def heal(self) -> None:
        """Drop no packets any more."""
        while self._cuts:
            self._rule("del", *self._cuts.pop())

    def close(self) -> None:
        """Take everything away. What still runs in the namespaces loses its network."""
        for space in (*map(self._space, self._names), self._router):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._host_link], capture_output=True, check=False)

    def _open(self) -> None:
        _ip("netns", "add", self._router)
        _ip("-n", self._router, "link", "set", "lo", "up")
        # The router asks for the machines' hardware addresses with an address of its own.
        _ip("-n", self._router, "addr", "add", f"{self._net}.254/32", "dev", "lo")
        self._set("net.ipv4.ip_forward=1")
        _ip("-n", self._router, "link", "add", "host", "type", "veth",
            "peer", "name", self._host_link, "netns", str(os.getpid()))  # fmt: skip
        _ip("link", "set", self._host_link, "up")
        for address in (self.client_address, self.etcd_address):
            _ip("addr", "add", f"{address}/32", "dev", self._host_link)
        _ip("route", "add", f"{self._net}.0/24", "dev", self._host_link,
            "src", self.client_address)  # fmt: skip
        self._attach("host", self.client_address, self.etcd_address)

    def _attach(self, link: str, *addresses: str) -> None:
        """Forward what goes to these addresses; answer in the place of all others."""
        _ip("-n", self._router, "link", "set", link, "up")
        self._set(f"net.ipv4.conf.{link}.proxy_arp=1", f"net.ipv4.conf.{link}.rp_filter=0",
                  f"net.ipv4.neigh.{link}.proxy_delay=0")  # fmt: skip
        for address in addresses:
            _ip("-n", self._router, "route", "add", f"{address}/32", "dev", link)

    def _rule(self, act: str, sender: str, receiver: str) -> None:
        _ip("-n", self._router, "rule", act, "from", sender, "to", receiver, "blackhole")

    def _set(self, *settings: str) -> None:
        _run("ip", "netns", "exec", self._router, "sysctl", "-qw", *settings)

    def _space(self, name: str) -> str:
        return f"p2pkv-{self._id}-{name}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


__all__ = ["MACHINES_MAX", "Namespaces", "why_not"]

"""The clusters that faults are injected into: one of our own, or one that an operator runs."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from p2pkv.config import ClientConfig, EtcdConfig, NodeConfig, build
from p2pkv.errors import ConfigError
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing import namespaces
from p2pkv.testing.cluster import Cluster, unsettled
from p2pkv.testing.etcd import survives_kills
from p2pkv.testing.faultplan import Cut, Fault, FaultKind
from p2pkv.testing.namespaces import Namespaces

COMMAND_TIMEOUT_S = 60.0


class Target(Protocol):
    """A cluster that can be hurt."""

    def nodes(self) -> list[str]:
        """The names of the nodes that may be hurt."""
        ...

    def etcd_config(self) -> EtcdConfig:
        """How to follow its records."""
        ...

    def client_config(self, **changes: Any) -> ClientConfig:
        """How a client reaches it."""
        ...

    def refuses(self, kind: FaultKind) -> str:
        """Why this kind of fault cannot be had; empty if it can."""
        ...

    def kill(self, node: str) -> None:
        """SIGKILL."""

    def start_node(self, node: str) -> None:
        """Start a killed node again."""

    def pause(self, node: str) -> None:
        """SIGSTOP."""

    def resume(self, node: str) -> None:
        """SIGCONT."""

    def etcd_down(self, kind: FaultKind) -> None:
        """Kill or stop all of etcd."""

    def etcd_up(self, kind: FaultKind) -> None:
        """Start or wake it again."""

    def cut(self, fault: Fault) -> str:
        """Begin a partition; what was cut, in words."""
        ...

    def heal(self) -> None:
        """End all partitions."""

    def ended(self) -> dict[str, str]:
        """The nodes that do not run although they should, and the end of what each printed."""
        ...


class OwnCluster:
    """Nodes and etcd as processes of this host. A context manager.

    ``partitions``: each node in a network namespace of its own. ``config``: fields of NodeConfig.
    ``fast``: the short deadlines of the tests instead of the store's defaults.
    """

    def __init__(
        self,
        nodes: int,
        *,
        replicas: int = 1,
        etcd_members: int = 1,
        partitions: bool = False,
        fast: bool = False,
        **config: Any,
    ) -> None:
        self._names = [f"n{i}" for i in range(nodes)]
        self._etcd_members = etcd_members
        self._partitions = partitions
        self._config = {**({} if fast else _defaults()), "replication_factor": replicas, **config}
        self._fast = fast
        self._stack = ExitStack()
        self._network: Namespaces | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._partitions:
                self._network = stack.enter_context(Namespaces())
            host = self._network.etcd_address if self._network else "127.0.0.1"
            self._etcd = stack.enter_context(EtcdCluster(self._etcd_members, host=host))
            self._cluster = stack.enter_context(Cluster(0, etcd=self._etcd, **self._config))
            for name in self._names:
                self._add(name)
            self._cluster.wait(self._whole, "the nodes have their shares of the buckets")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self._stack.__exit__(kind, error, trace)

    def _add(self, name: str) -> None:
        changes: dict[str, Any] = {"host": f"machine-{name}"}
        if not self._fast:
            changes["etcd"] = {"endpoints": self._etcd.endpoints}
        prefix: Sequence[str] = ()
        if self._network:
            changes |= {"bind": self._network.add(name), "insecure": True}
            prefix = self._network.prefix(name)
        self._cluster.add_node(name, wait=False, prefix=prefix, **changes)

    def _whole(self) -> bool:
        return not unsettled(self._cluster.view(), self._names)

    def nodes(self) -> list[str]:
        return list(self._names)

    def etcd_config(self) -> EtcdConfig:
        return self._etcd.config()

    def client_config(self, **changes: Any) -> ClientConfig:
        return self._cluster.client_config(**changes)

    @property
    def cluster_name(self) -> str:
        return self._cluster.name

    def refuses(self, kind: FaultKind) -> str:
        if kind is FaultKind.PARTITION and self._network is None:
            return namespaces.why_not() or "the cluster was started without namespaces"
        if kind is FaultKind.ETCD_KILL and not survives_kills():
            return "this version of etcd may lose its data when it is killed"
        return ""

    def kill(self, node: str) -> None:
        self._cluster[node].kill()

    def start_node(self, node: str) -> None:
        self._cluster[node].start()

    def pause(self, node: str) -> None:
        self._cluster[node].pause()

    def resume(self, node: str) -> None:
        self._cluster[node].resume()

    def etcd_down(self, kind: FaultKind) -> None:
        for member in self._etcd.members:
            member.kill() if kind is FaultKind.ETCD_KILL else member.pause()

    def etcd_up(self, kind: FaultKind) -> None:
        for member in self._etcd.members:
            if kind is FaultKind.ETCD_KILL:
                self._etcd.respawn(member)
            else:
                member.resume()

    def cut(self, fault: Fault) -> str:
        assert self._network is not None
        node, other = fault.pick(self._names), fault.pick_other(self._names)
        for sender, receiver in _directions(fault.cut, node, other, self._names):
            self._network.cut(self._address(sender), self._address(receiver))
        return f"{fault.cut.value}: {node}" + (
            f", {other}" if fault.cut in (Cut.NODE_FROM_NODE, Cut.NODE_TO_NODE) else ""
        )

    def heal(self) -> None:
        if self._network:
            self._network.heal()

    def ended(self) -> dict[str, str]:
        return {node.name: node.log() for node in self._cluster if not node.running}

    def _address(self, name: str) -> str:
        assert self._network is not None
        own = {"etcd": self._network.etcd_address, "clients": self._network.client_address}
        return own.get(name) or self._network.address(name)


def _directions(cut: Cut, node: str, other: str, nodes: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of sender and receiver whose packets are dropped."""
    if cut is Cut.NODE_TO_NODE:
        return [(node, other)]
    far = {
        Cut.NODE_FROM_ALL: [*nodes, "etcd", "clients"],
        Cut.NODE_FROM_ETCD: ["etcd"],
        Cut.NODE_FROM_NODE: [other],
        Cut.NODE_FROM_NODES: list(nodes),
    }[cut]
    return [pair for name in far if name != node for pair in ((node, name), (name, node))]


def _defaults() -> dict[str, Any]:
    """The timings that NodeConfig has by itself, against those of tests."""
    default = NodeConfig()
    names = ("heartbeat_s", "peer_contact_s", "fence_after_s", "reset_after_s")
    return {name: getattr(default, name) for name in names}


class Commands(msgspec.Struct, frozen=True, kw_only=True):
    """How an operator's nodes are hurt and healed: command lines, without a shell.

    ``{node}`` and ``{host}`` stand for the node's id and its host. Empty: cannot be done.
    """

    kill: str = ""
    start: str = ""
    stop: str = ""
    resume: str = ""
    etcd_kill: str = ""
    etcd_start: str = ""
    etcd_stop: str = ""
    etcd_resume: str = ""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _filled(name, getattr(self, name), node="n0", host="h0")


class OperatedCluster:
    """A running cluster that somebody else started, hurt by the operator's own commands.

    ``hosts``: the nodes that may be hurt, and the host of each.
    """

    def __init__(
        self, etcd: EtcdConfig, cluster: str, hosts: Mapping[str, str], commands: Commands
    ) -> None:
        self._etcd = etcd
        self._name = cluster
        self._hosts = dict(hosts)
        self._commands = commands

    @property
    def cluster_name(self) -> str:
        return self._name

    def nodes(self) -> list[str]:
        return sorted(self._hosts)

    def etcd_config(self) -> EtcdConfig:
        return self._etcd

    def client_config(self, **changes: Any) -> ClientConfig:
        return build(ClientConfig, {"cluster": self._name, "etcd": self._etcd, **changes})

    def refuses(self, kind: FaultKind) -> str:
        commands = self._commands
        needed: tuple[str, ...] | None = {
            FaultKind.KILL: (commands.kill, commands.start),
            FaultKind.STOP: (commands.stop, commands.resume),
            FaultKind.ETCD_KILL: (commands.etcd_kill, commands.etcd_start),
            FaultKind.ETCD_STOP: (commands.etcd_stop, commands.etcd_resume),
            FaultKind.KILL_WITHOUT_ETCD: (
                commands.kill,
                commands.start,
                commands.etcd_stop,
                commands.etcd_resume,
            ),
        }.get(kind)
        if needed is None:
            return "partitions are made only in a cluster of the harness's own"
        return "" if all(needed) else f"no commands were given for {kind.value}"

    def kill(self, node: str) -> None:
        self._run("kill", node)

    def start_node(self, node: str) -> None:
        self._run("start", node)

    def pause(self, node: str) -> None:
        self._run("stop", node)

    def resume(self, node: str) -> None:
        self._run("resume", node)

    def etcd_down(self, kind: FaultKind) -> None:
        self._run("etcd_kill" if kind is FaultKind.ETCD_KILL else "etcd_stop")

    def etcd_up(self, kind: FaultKind) -> None:
        self._run("etcd_start" if kind is FaultKind.ETCD_KILL else "etcd_resume")

    def cut(self, fault: Fault) -> str:
        raise ConfigError(self.refuses(fault.kind))

    def heal(self) -> None:
        """Nothing was cut."""

    def ended(self) -> dict[str, str]:
        """Nothing is known of processes on other hosts; the probes show who does not answer."""
        return {}

    def _run(self, name: str, node: str = "") -> None:
        text = getattr(self._commands, name)
        command = _filled(name, text, node=node, host=self._hosts.get(node, ""))
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise ConfigError(f"{shlex.join(command)}: exit code {done.returncode}: {done.stderr}")


def _filled(name: str, template: str, **names: str) -> list[str]:
    try:
        return [part.format(**names) for part in shlex.split(template)]
    except (KeyError, IndexError, ValueError) as e:
        known = ", ".join(f"{{{n}}}" for n in names)
        raise ConfigError(
            f"{name}_command = {template!r}: only {known} may stand in it ({e})"
        ) from None


__all__ = ["Commands", "OperatedCluster", "OwnCluster", "Target"]

"""The shape of the package: what is pure, and who may know whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "p2pkv"

IMPURE = {"asyncio", "os", "random", "selectors", "socket", "ssl", "subprocess", "threading"}
IMPURE |= {"time", "uvloop", "zmq", "grpc", "multiprocessing", "concurrent", "secrets", "signal"}

LAYERS: list[set[str]] = [
    {"errors", "types", "_version"},
    {"config", "clock", "buffers", "memory", "processes"},
    {"wire", "ring", "planner", "membership", "handover", "records", "routing", "allocator",
     "eviction", "expiry", "objects", "operations", "arguments", "batches", "scanning",
     "keyed", "large", "checksums", "checking", "outcomes", "parts", "layouts", "tensor_header",
     "replication", "following", "leading", "reconfiguring", "instructions", "replicas",
     "replicated", "leases", "digests",
     "ucx_handles", "paths",
     "swim", "swim_messages", "suspicion", "dissemination", "roster", "probing"},
    {"store", "arena", "hostlock", "catalog", "extents", "store_audit", "payload", "sessions",
     "quarantine"},
    {"authority", "etcd", "etcd_buckets", "etcd_channels", "etcd_session", "etcd_view",
     "etcd_watch", "discovery", "transport", "stream", "connection", "data_server",
     "data_path", "shared_memory", "ahead", "published", "views", "read_link", "read_server",
     "async_path", "async_views", "transfer", "ucx_transfer", "ucx_library", "ucx_memory",
     "ucx_peers", "ucx_blocking", "remote_memory", "ucx_client", "async_remote",
     "gossip", "liveness", "neighbours"},
    {"handlers", "rooms", "admission", "answers", "arrivals", "reading", "writing", "allocating",
     "sharing", "receiving", "journal", "learning", "oversized", "ownership", "scrub",
     "fabric"},
    {"dlpack", "cuda", "arrays", "gpu_arena", "staging", "direct", "tensors"},
    {"client", "blocking_driver", "near_cache", "async_client", "async_driver"},
    {"node", "frontend", "listeners", "planning", "draining", "heartbeats", "mover", "replicator",
     "comparing", "figures", "hosted", "load"},
    {"admin", "cli", "commands", "bench", "adapters"},
]  # fmt: skip
"""Each may import from its own layer and from those above it in this list."""

LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}
PURE = LAYERS[2]  # given time and chance, they do as they are told

PURE_PARTS = ["adapters/keys", "adapters/breaker", "adapters/backlog", "adapters/history",
              "adapters/hits", "adapters/vllm/plans", "adapters/vllm/pins",
              "adapters/vllm/scheduling", "adapters/sglang/identity", "adapters/sglang/hits",
              "adapters/lmcache/names", "adapters/lmcache/locks"]  # fmt: skip
"""Pure modules in packages of the last layer."""
TESTING = ["faultplan", "judge", "linearizability", "selfdescribing"]
PURE_PARTS += [f"testing/{module}" for module in TESTING]

modules = sorted(m for m in LEVEL if (PACKAGE / f"{m}.py").exists())


def imports(source: str) -> Iterator[str]:
    """Dotted names of all that is imported, wherever it stands, save for annotations alone."""
    tree = ast.parse(source)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(source: str) -> Iterator[str]:
    """Names of the modules of p2pkv that are imported."""
    for name in imports(source):
        package, _, rest = name.partition(".")
        if package == "p2pkv" and rest:
            yield rest.split(".")[0]


def read(module: str) -> str:
    return (PACKAGE / f"{module}.py").read_text()


@pytest.mark.parametrize("module", [*(m for m in modules if m in PURE), *PURE_PARTS])
def test_a_pure_module_imports_nothing_that_acts(module: str) -> None:
    found = {name for name in imports(read(module)) if name.split(".")[0] in IMPURE}
    allowed = {"random.Random"}  # the type of what is passed in
    assert found <= allowed, f"{module} imports {sorted(found - allowed)}"


def reachable(module: str) -> set[str]:
    """The modules that come with it, also by way of those that stand in no layer."""
    found, waiting = set[str](), [module]
    while waiting:
        for other in own_imports(read(waiting.pop())):
            if other not in found and (PACKAGE / f"{other}.py").exists():
                found.add(other)
                waiting.append(other)
    return found


@pytest.mark.parametrize("module", modules)
def test_a_module_knows_nothing_of_the_layers_built_on_it(module: str) -> None:
    above = {m for m in reachable(module) if LEVEL.get(m, -1) > LEVEL[module]}
    assert not above, f"{module} comes with {sorted(above)}"


@pytest.mark.parametrize("module", modules)
def test_imports_are_absolute(module: str) -> None:
    assert not [name for name in imports(read(module)) if name.startswith(".")]


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph = {m.stem: set(own_imports(m.read_text())) for m in PACKAGE.glob("*.py")}
    while leaves := {m for m, needs in graph.items() if not needs & graph.keys()}:
        graph = {m: needs for m, needs in graph.items() if m not in leaves}
    assert not graph, f"in circles, or built on them: {sorted(graph)}"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import time", ["time"]),
        ("from os import path", ["os.path"]),
        ("def f():\n    import zmq.asyncio", ["zmq.asyncio"]),
        ("if TYPE_CHECKING:\n    import time\nelse:\n    import os", ["os"]),
        ("from . import wire", ["..wire"]),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, names: list[str]) -> None:
    assert list(imports(source)) == names

"""The adapters' classes against the engines' own base classes, read from their sources.

Nothing is imported, so no engine's needs have to be installed, and the newest version of an engine
can be looked at that does not run on a CPU.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ADAPTERS = Path(__file__).parent.parent.parent / "p2pkv" / "adapters"
ENGINES = ("lmcache", "sglang", "vllm")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        any(importlib.util.find_spec(engine) is None for engine in ENGINES),
        reason="not all engines are there: scripts/test-engines interfaces",
    ),
]

Method = ast.FunctionDef | ast.AsyncFunctionDef


class Pair(NamedTuple):
    theirs: str
    base: str
    ours: str
    adapter: str


PAIRS = [
    Pair("vllm/distributed/kv_transfer/kv_connector/v1/base.py", "KVConnectorBase_V1",
         "vllm/connector.py", "P2PKVConnector"),
    Pair("vllm/distributed/kv_transfer/kv_connector/v1/base.py", "SupportsHMA",
         "vllm/connector.py", "P2PKVConnector"),
    Pair("vllm/v1/kv_offload/tiering/base.py", "SecondaryTierManager",
         "vllm/tier.py", "P2PKVTier"),
    Pair("sglang/srt/mem_cache/hicache_storage.py", "HiCacheStorage",
         "sglang/storage.py", "P2PKVStorage"),
    Pair("lmcache/v1/distributed/l2_adapters/base.py", "L2AdapterInterface",
         "lmcache/l2.py", "P2PKVL2Adapter"),
    Pair("lmcache/v1/storage_backend/connector/base_connector.py", "RemoteConnector",
         "lmcache/connector.py", "P2PKVConnector"),
    Pair("lmcache/v1/storage_backend/connector/__init__.py", "ConnectorAdapter",
         "lmcache/connector.py", "P2PKVConnectorAdapter"),
]  # fmt: skip


def methods(file: Path, name: str) -> dict[str, Method]:
    """The methods of a class in a source file, by name."""
    tree = ast.parse(file.read_text())
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    return {m.name: m for m in found.body if isinstance(m, Method)}


def base_and_adapter(pair: Pair) -> tuple[dict[str, Method], dict[str, Method]]:
    spec = importlib.util.find_spec(pair.theirs.split("/")[0])
    assert spec is not None
    assert spec.origin is not None
    theirs = Path(spec.origin).parent.parent / pair.theirs
    return methods(theirs, pair.base), methods(ADAPTERS / pair.ours, pair.adapter)


@pytest.fixture(params=PAIRS, ids=lambda pair: pair.adapter + "-" + pair.base)
def classes(request: pytest.FixtureRequest) -> tuple[dict[str, Method], dict[str, Method]]:
    """Methods of an engine's base class, and of the adapter's class."""
    return base_and_adapter(request.param)


def is_abstract(method: Method) -> bool:
    return any("abstractmethod" in ast.unparse(each) for each in method.decorator_list)


def test_everything_abstract_is_there(
    classes: tuple[dict[str, Method], dict[str, Method]],
) -> None:
    base, adapter = classes
    assert base
    missing = [name for name, m in base.items() if is_abstract(m) and name not in adapter]
    assert missing == []


def test_methods_take_what_the_engine_passes(
    classes: tuple[dict[str, Method], dict[str, Method]],
) -> None:
    base, adapter = classes
    complaints = {
        name: list(differences(base[name], mine))
        for name, mine in adapter.items()
        if name in base and name != "__init__"
    }
    assert {name: c for name, c in complaints.items() if c} == {}


def differences(theirs: Method, mine: Method) -> Iterator[str]:
    """What of their arguments mine does not take, or wants beyond them."""
    if isinstance(theirs, ast.AsyncFunctionDef) != isinstance(mine, ast.AsyncFunctionDef):
        yield "one is async"
    want, have = places(theirs), places(mine)
    if not mine.args.vararg and have[: len(want)] != want:
        yield f"takes {have}, not {want}"
    required = len(have) - len(mine.args.defaults)
    if required > len(want):
        yield f"wants {have[len(want) : required]} too"
    if not mine.args.kwarg:
        named = {a.arg for a in (*mine.args.kwonlyargs, *mine.args.args)}
        for each in theirs.args.kwonlyargs:
            if each.arg not in named:
                yield f"does not take {each.arg}="
        if theirs.args.kwarg:
            yield "takes no further keywords"


def places(method: Method) -> list[str]:
    return [a.arg for a in (*method.args.posonlyargs, *method.args.args)]


@pytest.mark.parametrize(
    ("theirs", "mine", "told"),
    [
        ("def f(self, a, b=1): ...", "def f(self, a, b=2, c=3): ...", []),
        ("def f(self, a): ...", "def f(self, *args, **kwargs): ...", []),
        ("def f(self, a): ...", "def f(self, b): ...", ["takes ['self', 'b'], not ['self', 'a']"]),
        ("def f(self): ...", "def f(self, a): ...", ["wants ['a'] too"]),
        ("def f(self, *, a): ...", "def f(self): ...", ["does not take a="]),
        ("def f(self, **k): ...", "def f(self): ...", ["takes no further keywords"]),
        ("async def f(self): ...", "def f(self): ...", ["one is async"]),
    ],
)
def test_the_comparison_itself(theirs: str, mine: str, told: list[str]) -> None:
    (one,), (other,) = ast.parse(theirs).body, ast.parse(mine).body
    assert isinstance(one, Method)
    assert isinstance(other, Method)
    assert list(differences(one, other)) == told

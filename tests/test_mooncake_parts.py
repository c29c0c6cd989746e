"""The parts of Mooncake's interface that need no node."""

from __future__ import annotations

import logging
import mmap
from typing import Any

import pytest

from p2pkv import clock, errors
from p2pkv.adapters.mooncake import options
from p2pkv.adapters.mooncake.codes import ErrorCode, InvalidKey, NotSetUp, code_of, codes, sizes
from p2pkv.adapters.mooncake.memory import BufferHandle, check_mapped
from p2pkv.adapters.notices import Notices
from p2pkv.buffers import address_of
from p2pkv.commands.mooncake import environment
from p2pkv.config import ClientConfig, build, load
from p2pkv.errors import ConfigError, InvalidArgument

LEAVES = [
    c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.P2PKVError)
]


# -- codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Miss(), -704), (errors.TooLarge(), -600), (NotSetUp(), -600), (InvalidKey(), -400),
        (errors.OutOfMemory(), -200), (errors.QuotaExceeded(), -200),
        (errors.DeadlineExceeded(), -901), (errors.Unreachable(), -900), (errors.Stalled(), -900),
        (errors.Indeterminate(), -900), (errors.CorruptValue(), -801), (errors.Conflict(), -703),
        (errors.NotEnoughReplicas(), -703),
        (errors.DeviceError(), -800), (errors.P2PKVError(), -1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_each_error_has_its_code(error: errors.P2PKVError, code: int) -> None:
    assert code_of(error) == code


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: str(kind.__name__))
def test_every_error_is_negative(kind: type[errors.P2PKVError]) -> None:
    error = kind([]) if kind is errors.BatchError else kind()
    assert code_of(error) < 0
    assert type(code_of(error)) is int


def test_results_become_codes_and_sizes() -> None:
    assert codes([1, 0, None, errors.Miss()]) == [0, 0, 0, -704]
    assert sizes([7, 0, None, errors.TooLarge()]) == [7, 0, -704, -600]
    assert ErrorCode.OK == 0


# -- setup's arguments

GOOD: dict[str, Any] = {"local_hostname": "h", "metadata_server": "m"}


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 0), (16 << 20, 16 << 20), ("16MB", 16 << 20), ("16 MB", 16 << 20), ("1.5g", 3 << 29),
     ("4096", 4096), (1e9, 1_000_000_000)],
)  # fmt: skip
def test_sizes_in_bytes_and_for_people(size: Any, expected: int) -> None:
    assert options.read({**GOOD, "global_segment_size": size}).segment_bytes == expected


@pytest.mark.parametrize("size", ["50%", "", "-1", "16 XB", -1, True, None, float("nan"), 1 << 70])
@pytest.mark.parametrize("field", ["global_segment_size", "local_buffer_size"])
def test_a_bad_size_is_named(field: str, size: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        options.read({**GOOD, field: size})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local_hostname": ""}, "local_hostname = '': must be given"),
        ({"metadata_server": 7}, "metadata_server = 7: must be given"),
        ({"tenant_id": "a/b"}, "tenant_id = 'a/b'"),
        ({"tenant_id": 3}, "tenant_id = 3"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.read({**GOOD, **change})


def test_what_has_no_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    read = options.read({**GOOD, "protocol": "rdma", "engine": None, "new_field": 1})
    assert read == options.Options("h", 0, "default", ("", "m"))
    assert "no effect here: ['protocol']; unknown: ['new_field']" in caplog.text


@pytest.mark.parametrize(
    ("address", "etcd", "seeds"),
    [
        ("etcd://a:1;b:2", ("http://a:1", "http://b:2"), ()),
        ("tcp://a:1,b:2", None, ("tcp://a:1", "tcp://b:2")),
        ("tcp://a:1;tcp://b:2", None, ("tcp://a:1", "tcp://b:2")),
        ("127.0.0.1:50051", ("http://127.0.0.1:2379",), ()),
        ("etcd://", ("http://127.0.0.1:2379",), ()),
        ("http://127.0.0.1:8080/metadata", ("http://127.0.0.1:2379",), ()),
    ],
)
@pytest.mark.parametrize("field", ["master_server_addr", "metadata_server"])
def test_where_the_cluster_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, field: str, address: str, etcd: Any, seeds: Any
) -> None:
    for name in ("P2PKV_ETCD__ENDPOINTS", "P2PKV_SEEDS", "P2PKV_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # nothing runs here
    config = options.find(options.read({**GOOD, field: address}))
    assert (config.etcd.endpoints if config.etcd else None, config.seeds) == (etcd, seeds)


def test_the_environment_is_stronger_than_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PKV_ETCD__ENDPOINTS", "http://e:1")
    monkeypatch.setenv("P2PKV_CLUSTER", "c")
    config = options.find(options.read({**GOOD, "metadata_server": "etcd://other:2"}))
    assert config.etcd is not None
    assert (config.etcd.endpoints, config.cluster) == (("http://e:1",), "c")


@pytest.mark.parametrize(
    "given",
    [
        {"etcd": {"endpoints": ["http://a:1", "http://b:2"], "user": "u", "password": "p"},
         "cluster": "c", "path": "tcp", "timeout_s": 2.5, "limits": {"inflight_max": 7}},
        {"seeds": ["tcp://a:1", "tcp://b:2"]},
    ],
)  # fmt: skip
def test_a_program_behind_the_shim_has_the_whole_configuration(given: dict[str, Any]) -> None:
    config = build(ClientConfig, given)
    assert load(ClientConfig, {}, environ=environment(config)) == config


# -- telling causes


def test_a_cause_is_told_once_and_later_with_how_often_it_came(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10**12]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    notices = Notices(logging.getLogger("notices"), every_ns=100)
    for _ in range(5):
        notices.tell("get", "Unreachable", "no route")
    notices.tell("get", "Stalled", "fenced")
    notices.tell("put", "Unreachable", "no route")
    assert [r.getMessage() for r in caplog.records] == [
        "get: no route", "get: fenced", "put: no route",
    ]  # fmt: skip
    now[0] += 100
    notices.tell("get", "Unreachable", "no route")
    assert (
        caplog.records[-1].getMessage()
        == "get: no route (and 4 times more since this was told last)"
    )


def test_kinds_of_trouble_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices(logging.getLogger("notices"))
    for i in range(1000):
        notices.tell("get", f"kind {i}", "text")
    assert len(notices._told) <= 256


# -- memory


def test_memory_that_can_be_read_may_be_registered() -> None:
    block = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    view = memoryview(block)
    check_mapped(address_of(view), len(view))
    check_mapped(address_of(view) + 100, 1)
    view.release()
    block.close()


MAPS = """\
1000-3000 rw-p 00000000 00:00 0
3000-4000 r--p 00000000 00:00 0    /file
4000-9000 ---p 00000000 00:00 0
a000-b000 rw-s 00000000 00:00 0
"""


@pytest.mark.parametrize("span", [(0x1000, 0x3000), (0x2FFF, 2), (0x3FFF, 1), (0xA000, 0x1000)])
def test_neighbouring_mappings_are_one_memory(span: tuple[int, int]) -> None:
    check_mapped(*span, MAPS)


@pytest.mark.parametrize(
    "span", [(0x0, 1), (0x0, 0x2000), (0x3FFF, 2), (0x5000, 16), (0xAFFF, 2), (0xC000, 1)]
)
def test_memory_that_cannot_be_read_is_refused(span: tuple[int, int]) -> None:
    """As the addresses are that a GPU's driver reserves."""
    with pytest.raises(InvalidArgument, match="memory of a GPU cannot be registered"):
        check_mapped(*span, MAPS)


def test_a_handle_of_nothing_has_no_address() -> None:
    assert (BufferHandle().ptr(), BufferHandle().size()) == (0, 0)

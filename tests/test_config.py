"""Where configuration comes from, and what is refused: always field, value and what is allowed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2pkv.config import (
    ClientConfig,
    EtcdConfig,
    GiB,
    KiB,
    Limits,
    MiB,
    NodeConfig,
    build,
    load,
    local,
    parse_size,
    replace,
)
from p2pkv.errors import ConfigError, InvalidArgument

SEEDS = {"seeds": ["tcp://a:1"]}


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "p2pkv.toml"
    path.write_text(text)
    return path


# --- where a value comes from


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "expected"),
    [
        ({"weight": 4.0}, {"P2PKV_WEIGHT": "3"}, "weight = 2", 4.0),
        ({"weight": None}, {"P2PKV_WEIGHT": "3"}, "weight = 2", 3.0),
        ({}, {"P2PKV_WEIGHT": "3"}, "weight = 2", 3.0),
        ({}, {}, "weight = 2", 2.0),
        ({}, {}, "", 1.0),
    ],
)
def test_flags_beat_the_environment_beats_the_file_beats_the_default(
    tmp_path: Path, flags: Any, environ: Any, toml: str, expected: float
) -> None:
    assert load(NodeConfig, flags, file(tmp_path, toml), environ).weight == expected


def test_precedence_goes_field_by_field_also_in_tables(tmp_path: Path) -> None:
    path = file(tmp_path, '[etcd]\nuser = "file"\npassword = "file"\nsession_ttl_s = 7\n')
    environ = {"P2PKV_ETCD__PASSWORD": "environment", "P2PKV_ETCD__SESSION_TTL_S": "8"}
    etcd = load(NodeConfig, {"etcd.session_ttl_s": 9}, path, environ).etcd
    assert (etcd.user, etcd.password, etcd.session_ttl_s) == ("file", "environment", 9)


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PKV_CLUSTER", "c7")
    assert load(NodeConfig, {}).cluster == "c7"
    assert os.environ["P2PKV_CLUSTER"] == "c7"


def test_names_in_the_environment_that_are_no_fields_are_left_alone() -> None:
    environ = {"P2PKV_ETCD": "/bin/etcd", "P2PKV_NOTHING": "1", "P2PKV_ETCD__NOTHING": "1",
               "P2PKV_WEIGHT__X": "1", "HOME": "/"}  # fmt: skip
    assert load(NodeConfig, {}, None, environ) == NodeConfig()


def test_the_client_reads_the_same_environment() -> None:
    environ = {"P2PKV_ETCD__ENDPOINTS": "http://a:1,http://b:2", "P2PKV_TIMEOUT_S": "1.5",
               "P2PKV_BUCKET_COUNT": "8"}  # fmt: skip
    config = load(ClientConfig, {}, None, environ)
    assert config.etcd is not None
    assert config.etcd.endpoints == ("http://a:1", "http://b:2")
    assert config.timeout_s == 1.5


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match=r"missing\.toml.*No such file"):
        load(NodeConfig, {}, missing, {})
    with pytest.raises(ConfigError, match="is not TOML"):
        load(NodeConfig, {}, file(tmp_path, "weight = = 2"), {})
    (tmp_path / "latin").write_bytes(b'cluster = "\xff"')
    with pytest.raises(ConfigError, match="latin"):
        load(NodeConfig, {}, tmp_path / "latin", {})


# --- texts become values


@pytest.mark.parametrize("field", ["etcd.endpoints"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("http://a:1", ("http://a:1",)),
        ("http://a:1,http://b:2", ("http://a:1", "http://b:2")),
        ("http://a:1,", ("http://a:1",)),
        (["http://a:1", "http://[::1]:2"], ("http://a:1", "http://[::1]:2")),
    ],
)
def test_lists_of_endpoints(field: str, value: Any, expected: tuple[str, ...]) -> None:
    assert load(NodeConfig, {field: value}, None, {}).etcd.endpoints == expected


@pytest.mark.parametrize("text", ["http://a:1,http://b:2", "http://a:1"])
def test_lists_of_seeds(text: str) -> None:
    assert load(ClientConfig, {"seeds": text}, None, {}).seeds == tuple(text.split(","))


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("0", 0), ("64MiB", 64 * MiB), ("64mb", 64 * MiB), ("1g", GiB),
     ("2 KiB", 2 * KiB), ("1.5g", 3 * GiB // 2),
     ("1t", 1024 * GiB), ("7b", 7), (" 7 ", 7), ("0.5k", 512)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    if size >= MiB:
        environ = {"P2PKV_MEMORY_LIMIT_BYTES": text}
        assert load(NodeConfig, {}, None, environ).memory_limit_bytes == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1x", "1 MiBs", "1e3", "0x10", "9" * 400, "1." + "1" * 99]
)
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 4096, 64MiB or 1g"):
        parse_size(text)
    with pytest.raises(ConfigError, match="memory_limit_bytes = "):
        build(NodeConfig, {"memory_limit_bytes": text})


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("0", False), ("false", False)]
)
def test_switches(text: str, value: bool) -> None:
    assert load(NodeConfig, {}, None, {"P2PKV_INSECURE": text}).insecure is value


# --- what is refused


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("cluster", "a b", "matching regex '^[A-Za-z0-9._-]{1,64}$'"),
        ("cluster", "", "matching regex"),
        ("node_id", "n" * 65, "matching regex"),
        ("control_port", -1, "`int` >= 0"),
        ("control_port", 65536, "`int` <= 65535"),
        ("weight", -0.5, "`float` >= 0"),
        ("weight", 1001, "`float` <= 1000"),
        ("weight", "heavy", "expected `float`, got `str`"),
        ("insecure", "maybe", "expected `bool`, got `str`"),
        ("bucket_count", 0, "`int` >= 1"),
        ("bucket_count", 65537, "`int` <= 65536"),
        ("bucket_count", 1000, "must be a power of two"),
        ("memory_limit_bytes", MiB - 1, f"`int` >= {MiB}"),
        ("memory_limit_bytes", 1.5, "expected `int`, got `float`"),
        ("metadata_limit_bytes", -1, "`int` >= 0"),
        ("hard_pin_quota", 1.1, "`float` <= 1"),
        ("session_ttl_s", 0, "`float` > 0"),
        ("session_ttl_s", 1e6, "`float` < 1000000"),
        ("session_ttl_s", float("inf"), "`float` < 1000000"),
        ("session_ttl_s", float("nan"), "`float`"),
        ("sessions_max", 0, "`int` >= 1"),
        ("moves_max", 65, "`int` <= 64"),
        ("move_bytes_per_s", 0, "`int` >= 1"),
        ("etcd_loss", "ignore", "matching regex '^(serve|fence)$'"),
        ("reset_after_s", 10.0, "must be more than 10.0 s"),
        ("etcd.session_ttl_s", 1, "`int` >= 2"),
        ("etcd.session_ttl_s", 3601, "`int` <= 3600"),
        ("etcd.attempt_timeout_s", 0, "`float` > 0"),
        ("etcd.endpoints", [1], "expected `str`, got `int`"),
        ("etcd.endpoints", 5, "expected `array`, got `int`"),
        ("limits.key_bytes_max", 1025, "`int` <= 1024"),
        ("limits.key_bytes_max", 0, "`int` >= 1"),
        ("limits.batch_keys_max", 65537, "`int` <= 65536"),
        ("limits.message_bytes_max", MiB - 1, f"`int` >= {MiB}"),
        ("limits.inflight_max", 4097, "`int` <= 4096"),
        ("limits.scan_keys_max", 0, "`int` >= 1"),
        ("limits.head_bytes_max", 4 * KiB - 1, "`int` >= 4096"),
        ("limits.head_bytes_max", 16 * MiB, "17039360 or more, for 16384 keys of 1024 bytes"),
        ("bind", "localhost", "must be an IPv4 or IPv6 address"),
        ("bind", "", "must be an IPv4 or IPv6 address"),
        ("bind", "10.0.0.1", "must be a loopback address, unless insecure is set"),
        ("advertise", "host.example", "must be an IPv4 or IPv6 address"),
        ("advertise", "::", "must be an address that others can connect to"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed_is_refused_by_name(
    field: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(NodeConfig, {field: value}, None, {})
    message = str(caught.value)
    assert message.startswith(f"{field} = {value!r}: ")
    assert allowed in message


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"wieght": 1}, "unknown field `wieght`"),
        ({"etcd": {"endpoint": "x"}}, "etcd = .*unknown field `endpoint`"),
        ({"etcd": "http://a:1"}, "etcd = 'http://a:1': expected `object`, got `str`"),
        ({"limits": []}, "limits = .*expected `object`, got `array`"),
        ({"host": object()}, "not a configuration"),
        ([], "[Ee]xpected `object`, got `array`"),
    ],
)
def test_a_tree_of_another_shape_is_refused(tree: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build(NodeConfig, tree)


def test_a_table_and_a_value_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="etcd = 'x': must be a table"):
        load(NodeConfig, {"etcd": "x", "etcd.user": "u"}, None, {})


def test_a_configuration_error_is_an_invalid_argument() -> None:
    assert issubclass(ConfigError, InvalidArgument)


def test_the_limits_at_their_bounds_are_taken() -> None:
    low = Limits(key_bytes_max=1, batch_keys_max=1, scan_keys_max=1, head_bytes_max=4 * KiB)
    assert build(NodeConfig, {"limits": low}).limits == low
    tree = {"batch_keys_max": 65536, "scan_keys_max": 1, "head_bytes_max": 65536 * 1040}
    assert build(NodeConfig, {"limits": tree}).limits.head_bytes_max == 65536 * 1040
    for field in ("batch_keys_max", "scan_keys_max"):
        with pytest.raises(ConfigError, match=r"limits\.head_bytes_max"):
            build(NodeConfig, {"limits": {field: 65536}})


# --- addresses


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_needs_no_leave(bind: str) -> None:
    config = build(NodeConfig, {"bind": bind})
    assert config.advertised == bind


@pytest.mark.parametrize("bind", ["10.0.0.1", "fe80::1", "2001:db8::1"])
def test_another_address_is_taken_if_insecure_is_set(bind: str) -> None:
    assert build(NodeConfig, {"bind": bind, "insecure": True}).advertised == bind


@pytest.mark.parametrize("bind", ["0.0.0.0", "::"])
def test_a_wildcard_needs_an_address_to_advertise(bind: str) -> None:
    with pytest.raises(
        ConfigError, match=f"advertise = '': must be an address, since bind is {bind}"
    ):
        build(NodeConfig, {"bind": bind, "insecure": True})
    tree = {"bind": bind, "insecure": True, "advertise": "10.0.0.7"}
    assert build(NodeConfig, tree).advertised == "10.0.0.7"


# --- clients


@pytest.mark.parametrize("tree", [{}, {**SEEDS, "etcd": {"endpoints": ["http://a:1"]}}])
def test_a_client_needs_either_seeds_or_etcd(tree: Any) -> None:
    with pytest.raises(ConfigError, match=r"seeds = .*: must be either seeds or etcd_endpoints"):
        build(ClientConfig, tree)


@pytest.mark.parametrize(
    ("field", "value"), [("timeout_s", 0), ("timeout_s", 1e6), ("connections_max", 0),
                         ("connections_max", 1025), ("cluster", "/")],
)  # fmt: skip
def test_a_client_refuses_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} = {value!r}: "):
        build(ClientConfig, {**SEEDS, field: value})


def test_parts_that_were_made_by_hand_are_validated_too() -> None:
    with pytest.raises(ConfigError, match=r"etcd\.attempt_timeout_s = -1: expected `float` > 0"):
        build(ClientConfig, {"etcd": EtcdConfig(attempt_timeout_s=-1)})


def test_building_leaves_the_given_tree_as_it_is() -> None:
    tree = {"memory_limit_bytes": "64MiB", "etcd": {"endpoints": "http://a:1"}}
    build(NodeConfig, tree)
    assert tree == {"memory_limit_bytes": "64MiB", "etcd": {"endpoints": "http://a:1"}}


# --- copies, presets, figures


def test_a_copy_with_other_values_is_validated() -> None:
    config = local()
    other = replace(config, weight=2.0, **{"etcd.user": "u"})
    assert (other.weight, other.etcd.user, other.memory_limit_bytes) == (2.0, "u", 256 * MiB)
    assert replace(config) == config
    with pytest.raises(ConfigError, match="weight = -1"):
        replace(config, weight=-1)


def test_local_takes_dotted_names() -> None:
    config = local(**{"etcd.endpoints": ("http://a:1",), "limits.inflight_max": 5})
    assert config.etcd.endpoints == ("http://a:1",)
    assert config.limits.inflight_max == 5


@pytest.mark.parametrize(
    ("memory", "given", "metadata"),
    [(MiB, 0, 16 * MiB), (GiB, 0, 128 * MiB), (GiB, 5, 5)],
)
def test_the_bound_of_metadata(memory: int, given: int, metadata: int) -> None:
    tree = {"memory_limit_bytes": memory, "metadata_limit_bytes": given}
    assert build(NodeConfig, tree).metadata_bytes == metadata


@pytest.mark.parametrize("kind", [NodeConfig, EtcdConfig, Limits])
def test_the_defaults_are_allowed(kind: Any) -> None:
    assert msgspec.convert(msgspec.to_builtins(kind()), kind, strict=False) == kind()

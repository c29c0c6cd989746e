"""Which libucp is used, and what it can do on this machine.

UCX cannot be unloaded and two of it in one process get into each other's way, so there is one for
the life of the process. Taken, in this order: the file named by ``P2PKV_UCX_LIBRARY`` and no
other; one that the process has loaded already; the system's, if it has verbs (RDMA); that of the
wheel ``libucx-cu12`` or ``libucx-cu13``, which has CUDA and no verbs; the system's.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from p2pkv.errors import P2PKVError
from p2pkv.paths import Ability

ABI: Final = 2
SONAME: Final = "libucp.so.0"
INFINIBAND: Final = Path("/sys/class/infiniband")
ONE_SIDED: Final = ("rc", "dc", "srd", "ugni_rdma")
"""Transports whose hardware reads and writes the peer's memory without the peer's help."""

_TEXT: Final = 1024
_DIRECTORIES: Final = (
    *(
        "/usr/local/lib",
        "/usr/lib64",
        "/usr/lib",
        "/lib64",
        "/opt/ucx/lib",
        "/opt/mellanox/ucx/lib",
    ),
    *(f"/usr/lib/{machine}-linux-gnu" for machine in ("x86_64", "aarch64", "powerpc64le")),
)
# Read once, when libucs is loaded. Signals are the host program's, and standard output too.
_MANNERS: Final = {"UCX_HANDLE_ERRORS": "none", "UCX_LOG_FILE": "stderr"}


class UcxUnavailable(P2PKVError):
    """UCX cannot be used here; the message says why and what to do."""


class Library(NamedTuple):
    """The libucp of this process."""

    native: Any
    file: str
    source: str
    version: str


class UcxFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What ``doctor`` found. ``why_not`` and ``advice`` are in words for the operator."""

    usable: bool
    why_not: str = ""
    library: str = ""
    source: str = ""
    """environment, process, system or wheel."""
    version: str = ""
    headers: str = ""
    """Version of the headers that the extension was built with."""
    transports: tuple[str, ...] = ()
    """``transport/device``."""
    rdma: bool = False
    rdma_reason: str = ""
    gpu: bool = False
    """UCX has a CUDA or ROCm transport that found a device."""
    memlock_bytes: int | None = None
    """Limit of locked memory, which RDMA registration needs; None: unlimited."""
    advice: tuple[str, ...] = ()


# -- finding and loading --------------------------------------------------------------------------

_loading = threading.Lock()
_loaded: Library | None = None


def extension() -> tuple[Any, Any]:
    """``(ffi, lib)`` of the native extension. Raises UcxUnavailable."""
    try:
        from p2pkv._native._ucx import ffi, lib
    except ImportError as e:
        raise UcxUnavailable(
            f"the extension p2pkv._native._ucx is not there ({e}): install the headers of UCX "
            "(libucx-dev, ucx-devel or the wheel libucx-cu12) and run "
            "`python -m p2pkv._native.build_ucx`"
        ) from None
    if lib.P2PKV_UCX_ABI != ABI:
        raise UcxUnavailable(
            f"the extension p2pkv._native._ucx has ABI {lib.P2PKV_UCX_ABI}, this package {ABI}: "
            "run `python -m p2pkv._native.build_ucx`"
        )
    return ffi, lib


def load() -> Library:
    """The libucp of this process, loaded at the first call. Raises UcxUnavailable."""
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def _load() -> Library:
    ffi, lib = extension()
    why = ffi.new("char[]", _TEXT)
    tried = []
    for source, path in _candidates(os.environ):
        with _Manners():
            native = lib.p2pkv_ucx_library_open(
                ffi.NULL if path is None else os.fsencode(path), why, _TEXT
            )
        if native != ffi.NULL:
            return Library(native, _file(native), source, _version(native))
        if path is not None:
            tried.append(f"{path}: {_text(why)}")
    raise UcxUnavailable(
        "no usable libucp: "
        + ("; ".join(tried) or f"no {SONAME} was found")
        + ". Install libucx0 (Debian), ucx (Red Hat) or the wheel libucx-cu12, or set "
        "P2PKV_UCX_LIBRARY"
    )


class _Manners:
    """Has UCX leave signals and standard output alone, unless the user said otherwise."""

    def __enter__(self) -> None:
        self._ours = [name for name in _MANNERS if name not in os.environ]
        os.environ.update({name: _MANNERS[name] for name in self._ours})

    def __exit__(self, *exc: object) -> None:
        for name in self._ours:
            os.environ.pop(name, None)


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    if named := environ.get("P2PKV_UCX_LIBRARY"):
        yield "environment", named
        return
    yield "process", None
    system, wheel = _in_system(environ), _in_wheel()
    order = [("system", system), ("wheel", wheel)]
    if system is None or not has_verbs(system):
        order.reverse()
    for source, path in order:
        if path is not None:
            yield source, str(path)


def _in_system(environ: Mapping[str, str]) -> Path | None:
    named = environ.get("LD_LIBRARY_PATH", "").split(":")
    places = [Path(d) / SONAME for d in named if d]
    places += _in_linker_cache()
    places += [Path(d) / SONAME for d in _DIRECTORIES]
    found = [place for place in places if place.exists()]
    # Of several the one with verbs: a vendor's package may lie beside the distribution's.
    return next(filter(has_verbs, found), found[0] if found else None)


def _in_linker_cache() -> list[Path]:
    tool = shutil.which("ldconfig") or shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if tool is None:
        return []
    try:
        run = subprocess.run([tool, "-p"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [Path(m) for m in re.findall(rf"^\s*{re.escape(SONAME)} .*=> (.+)$", run.stdout, re.M)]


def _in_wheel() -> Path | None:
    found = importlib.util.find_spec("libucx")
    places = found.submodule_search_locations if found is not None else None
    files = [Path(place) / "lib" / SONAME for place in places or ()]
    return next((file for file in files if file.exists()), None)


def has_verbs(library: str | Path) -> bool:
    """Whether UCX's modules for InfiniBand and RoCE lie beside this libucp."""
    modules = Path(os.path.realpath(library)).parent / "ucx"
    return any(modules.glob("libuct_ib*.so*"))


def _file(native: Any) -> str:
    ffi, lib = extension()
    out = ffi.new("char[]", 4096)
    return _text(out) if lib.p2pkv_ucx_library_file(native, out, 4096) == 0 else ""


def _version(native: Any) -> str:
    ffi, lib = extension()
    out = ffi.new("unsigned[3]")
    lib.p2pkv_ucx_library_version(native, out)
    return ".".join(map(str, out))


def _text(buffer: Any) -> str:
    raw: bytes = extension()[0].string(buffer)
    return raw.decode(errors="replace")


def available() -> bool:
    """Whether UCX can be used in this process: the extension was built and a libucp loads."""
    try:
        load()
    except UcxUnavailable:
        return False
    return True


# -- what it can do -------------------------------------------------------------------------------


def transports_of(description: str) -> tuple[str, ...]:
    """``transport/device`` of each resource in UCX's description of a context."""
    return tuple(re.findall(r"^#\s+resource \d+\s*:.* -- (\S+)\s*$", description, re.M))


def one_sided(transports: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``transports`` that are RDMA."""
    return tuple(t for t in transports if re.match(rf"({'|'.join(ONE_SIDED)})(_|/)", t))


def rdma_devices() -> list[str]:
    """Those that the kernel knows; whether UCX can use them is another question."""
    return sorted(d.name for d in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def options_for(wanted: str) -> dict[str, str]:
    """UCX's options for an engine of a client whose path, or a node whose ``ucx``, is ``wanted``.

    "auto" is without TCP, over which UCX emulates one-sided access: there the side that answers
    may be aborted when the other dies. So where two hosts have RDMA, but not with each other, the
    endpoint fails, and sockets are used. ``UCX_TLS`` in the environment wins.
    """
    return {"TLS": "^tcp"} if wanted == "auto" and "UCX_TLS" not in os.environ else {}


@functools.cache
def ability(wanted: str) -> Ability:
    """What a client whose path is ``wanted`` can do by UCX; looked up once for each.

    libucp is loaded only where it is of use: for "ucx", and for "auto" with an RDMA device.
    """
    if wanted not in ("auto", "ucx") or (wanted == "auto" and not rdma_devices()):
        return Ability.NONE
    facts = doctor(options_for(wanted))
    if not facts.usable:
        return Ability.NONE
    return Ability.RDMA if facts.rdma else Ability.TCP


def doctor(options: Mapping[str, str] | None = None) -> UcxFacts:
    """Loads libucp, opens a context for a moment and tells what is there. Raises nothing.

    ``options`` are UCX's, as in UcxConfig.
    """
    memlock = _memlock_bytes()
    try:
        library = load()
        transports = transports_of(describe(options or {}))
    except UcxUnavailable as e:
        return UcxFacts(usable=False, why_not=str(e), memlock_bytes=memlock)
    ffi, lib = extension()
    headers = ffi.new("unsigned[2]")
    lib.p2pkv_ucx_headers_version(headers)
    rdma, reason, advice = _judge_rdma(library.file, transports, memlock)
    return UcxFacts(
        usable=True,
        library=library.file,
        source=library.source,
        version=library.version,
        headers=".".join(map(str, headers)),
        transports=transports,
        rdma=rdma,
        rdma_reason=reason,
        gpu=any(t.startswith(("cuda", "gdr", "rocm")) for t in transports),
        memlock_bytes=memlock,
        advice=advice,
    )


def describe(options: Mapping[str, str]) -> str:
    """UCX's description of a context with these options. Raises UcxUnavailable."""
    engine = open_native(options)
    try:
        return described(engine)
    finally:
        extension()[1].p2pkv_ucx_engine_close(engine, 0)


def open_native(options: Mapping[str, str]) -> Any:
    """A native engine, to be closed by the caller. Raises UcxUnavailable."""
    library = load()
    ffi, lib = extension()
    texts = [ffi.new("char[]", text.encode()) for pair in options.items() for text in pair]
    why = ffi.new("char[]", _TEXT)
    engine = lib.p2pkv_ucx_engine_open(
        library.native, ffi.new("char *[]", texts), len(options), why, _TEXT
    )
    if engine == ffi.NULL:
        raise UcxUnavailable(f"{library.file} ({library.version}): {_text(why)}")
    return engine


def described(engine: Any) -> str:
    """UCX's description of the context of a native engine."""
    ffi, lib = extension()
    out = ffi.new("char[]", 1 << 16)
    lib.p2pkv_ucx_engine_describe(engine, out, 1 << 16)
    return _text(out)


def status_text(status: int) -> str:
    """UCX's words for a status."""
    raw: bytes = extension()[0].string(extension()[1].p2pkv_ucx_status_text(load().native, status))
    return raw.decode(errors="replace")


def say(code: int) -> str:
    """In words what a native function returned: a status of UCX or a code of ours."""
    return status_text(code) if code < 0 else f"out of memory or limits (code {code})"


def _memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _judge_rdma(
    library: str, transports: tuple[str, ...], memlock: int | None
) -> tuple[bool, str, tuple[str, ...]]:
    """Whether RDMA is possible, why, and what to do."""
    devices = rdma_devices()
    found = one_sided(transports)
    if found:
        return True, "RDMA by " + ", ".join(found), _memlock_advice(memlock)
    if not devices:
        reason = "the kernel knows no RDMA device"
        return False, reason, (f"{INFINIBAND} is empty: an RDMA adapter and its driver are needed",)
    names = ", ".join(devices)
    if not has_verbs(library):
        return (
            False,
            f"there is {names}, but {library} was built without verbs",
            ("install UCX with verbs (libucx0, ucx-ib or the vendor's); it is preferred then",),
        )
    return (
        False,
        f"there is {names}, but UCX has no RDMA transport on it",
        (
            "see whether UCX_TLS or UCX_NET_DEVICES leave it out, whether a port is ACTIVE "
            "(`ibv_devinfo`), and whether /dev/infiniband may be opened (pass it to containers)",
            *_memlock_advice(memlock),
        ),
    )


def _memlock_advice(memlock: int | None) -> tuple[str, ...]:
    if memlock is None:
        return ()
    return (
        f"locked memory is limited to {memlock} bytes, registration of more fails: "
        "LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (containers) or limits.conf",
    )


__all__ = [
    "Library",
    "UcxFacts",
    "UcxUnavailable",
    "ability",
    "available",
    "describe",
    "doctor",
    "has_verbs",
    "load",
    "options_for",
    "rdma_devices",
]

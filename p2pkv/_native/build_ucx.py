"""Builds ``p2pkv._native._ucx``, where the headers of UCX 1.12 or later are found.

They are looked for in ``P2PKV_UCX_PREFIX`` (the directory that has ``include/ucp``), by
``pkg-config ucx``, and in the wheel ``libucx-cu12`` or ``libucx-cu13`` of this environment. Only
headers are needed: libucp itself is found at run time, by ``p2pkv.ucx_library``.

The package's build makes the extension if it finds headers. A build in isolation does not see the
wheels of the environment; where the headers are a wheel's, or came later, run
``python -m p2pkv._native.build_ucx``, which builds it in place.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = ["ucx.c", "ucx_engine.c", "ucx_library.c", "ucx_memory.c"]
HEADERS = ["ucx.h", "ucx_api.h"]
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-fvisibility=hidden", "-pthread"]
# cffi's own code is generated: what it leaves unused is not ours to mend.
STRICT = [
    *("-g", "-Wall", "-Wextra", "-Werror"),
    *("-Wno-unused-parameter", "-Wno-missing-field-initializers"),
]
DEBUG = os.environ.get("P2PKV_NATIVE_DEBUG", "") not in ("", "0")
PROBE = """
#include <ucp/api/ucp.h>
#if UCP_API_VERSION < UCP_VERSION(1, 12)
#error "UCX 1.12 or later is needed"
#endif
"""


def include_directory() -> str | None:
    """Where usable headers are: a directory, "" if the compiler finds them itself, else None."""
    prefix = os.environ.get("P2PKV_UCX_PREFIX")
    if prefix:
        directory = str(Path(prefix) / "include")
        if not _compiles(directory):
            raise SystemExit(f"P2PKV_UCX_PREFIX = {prefix!r}: no headers of UCX 1.12 or later")
        return directory
    candidates = [_from_pkg_config(), "", *_from_wheels()]
    return next((d for d in candidates if d is not None and _compiles(d)), None)


def _compiles(directory: str) -> bool:
    compiler = os.environ.get("CC", "cc").split()
    flags = [f"-I{directory}"] if directory else []
    try:
        run = subprocess.run(
            [*compiler, *flags, "-fsyntax-only", "-xc", "-"],
            input=PROBE.encode(),
            capture_output=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return run.returncode == 0


def _from_pkg_config() -> str | None:
    tool = shutil.which("pkg-config")
    if tool is None:
        return None
    command = [tool, "--variable=includedir", "ucx"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return run.stdout.strip() or None if run.returncode == 0 else None


def _from_wheels() -> list[str]:
    found = importlib.util.find_spec("libucx")
    if found is None:
        return []
    return [str(Path(place) / "include") for place in found.submodule_search_locations or ()]


def builder(include: str, place: Callable[[Path], str] = os.path.relpath) -> FFI:
    """The extension, to be compiled with the headers in ``include`` (see include_directory)."""
    ffi = FFI()
    ffi.cdef((HERE / "ucx_api.h").read_text(encoding="utf-8"))
    ffi.set_source(
        "p2pkv._native._ucx",
        '#include "ucx.h"',
        sources=[place(HERE / name) for name in SOURCES],
        depends=[place(HERE / name) for name in HEADERS],
        include_dirs=[place(HERE)],
        extra_compile_args=[
            *FLAGS,
            *(STRICT if DEBUG else []),
            *(["-isystem", include] if include else []),
        ],
        extra_link_args=["-pthread"],
        libraries=["dl"],
        optional=not DEBUG,
    )
    return ffi


def found() -> str:
    """As include_directory; ends the build where there are none."""
    include = include_directory()
    if include is None:
        raise SystemExit(
            "no headers of UCX 1.12 or later: install libucx-dev (Debian), ucx-devel (Red Hat) or "
            "the wheel libucx-cu12, or set P2PKV_UCX_PREFIX"
        )
    return include


def ffibuilder() -> FFI:
    """For the package's build, which asks for include_directory first."""
    return builder(found())


def main() -> None:
    """Builds the extension in place."""
    include = found()
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(builder(include, str).compile(tmpdir=scratch, verbose="-v" in sys.argv))
        # Under another suffix an older one could come before it.
        for old in HERE.glob("_ucx.*.so"):
            old.unlink()
        print(shutil.copy(built, HERE / built.name))


if __name__ == "__main__":
    main()

"""Builds ``p2pkv._native._core``; called by the package's build through ``cffi_modules``.

``P2PKV_NATIVE_DEBUG=1`` makes warnings and a failed build errors. Without it a machine that has no
compiler gets the package without the extension.
"""

from __future__ import annotations

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = [
    "copy.c",
    "checksum.c",
    "socket.c",
    "index.c",
    "python_pieces.c",
    "python_index.c",
    "python_commit.c",
    "read_protocol.c",
    "read_answer.c",
    "read_server.c",
    "read_client.c",
]
CDEFS = ["api.h", "read_api.h"]
HEADERS = [*CDEFS, "native.h", "index.h", "read_protocol.h", "read_server.h"]
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-fvisibility=hidden", "-pthread"]
# cffi's own code is generated: what it leaves unused is not ours to mend.
STRICT = [
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-parameter",
    "-Wno-missing-field-initializers",
]
DEBUG = os.environ.get("P2PKV_NATIVE_DEBUG", "") not in ("", "0")


def _relative(name: str) -> str:
    return os.path.relpath(HERE / name)


ffibuilder = FFI()
for name in CDEFS:
    ffibuilder.cdef((HERE / name).read_text(encoding="utf-8"))
ffibuilder.set_source(
    "p2pkv._native._core",
    '#include "native.h"',
    sources=[_relative(name) for name in SOURCES],
    depends=[_relative(name) for name in HEADERS],
    include_dirs=[_relative(".")],
    extra_compile_args=FLAGS + (STRICT if DEBUG else []),
    extra_link_args=["-pthread"],
    optional=not DEBUG,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)

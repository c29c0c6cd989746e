"""p2pkv beside Mooncake Store, redis and memcached on one machine, in one run, on the same work.

    python benchmarks/peers.py --json out.json --mooncake-python venv/bin/python

Starts etcd, p2pkv nodes, and each peer whose server and client library are found, all on loopback:
redis-server (or ``$REDIS_SERVER``) with redis-py and hiredis, memcached (or ``$MEMCACHED``) with
pylibmc and pymemcache, Mooncake Store's wheel in an environment of its own. Each store has one
client process with one call at a time (part ``clients``: several); they take turns with each
workload, and the figure is the median call of the best turn. Puts go to keys that are not there.
After each workload a batch is compared byte by byte.

``memcpy`` and ``socket`` are what the machine itself can do with the same bytes: a copy by one
thread, and a plain socket pair.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import targets
from compare import report, suite
from compare.processes import Servers
from compare.servers import NAMES, Wanted, start_all
from compare.suite import QUICK, Row, Scale

from p2pkv import __version__
from p2pkv.etcd_server import EtcdCluster

PARTS = ("calls", "sequences", "clients", "spin", "copies")
IN_A_CROWD = ("p2pkv-auto", "p2pkv-tcp", "mooncake-tcp", "mooncake-shm", "redis",
              "memcached-pylibmc")  # fmt: skip


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace, scale: Scale) -> list[Row]:
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        EtcdCluster(1) as etcd,
        Servers(Path(directory)) as servers,
    ):
        wanted = Wanted(options.stores, scale.server_bytes, options.mooncake_python)
        specs = start_all(wanted, servers, etcd, say)
        say("stores: " + ", ".join(s.name for s in specs))
        crowd = [s for s in specs if s.name in IN_A_CROWD]
        parts: dict[str, Callable[[], list[Row]]] = {
            "calls": lambda: suite.calls(specs, scale, say),
            "sequences": lambda: suite.sequences(specs, scale, say),
            "clients": lambda: suite.crowds(crowd, scale, say),
            "spin": lambda: suite.spinning(specs, scale, say),
            "copies": lambda: suite.copies("auto", etcd, scale, say),
        }
        for part in options.parts:
            rows += [row | {"part": part} for row in parts[part]()]
    return rows


def machine() -> dict[str, Any]:
    """Where this ran, for people who compare."""
    return {
        "p2pkv": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def chosen(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    def convert(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: must be of {', '.join(allowed)}")
        return names

    return convert


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write machine and rows there")
    parser.add_argument("--parts", type=chosen(PARTS), default=list(PARTS), metavar="A,B",
                        help=f"of {', '.join(PARTS)} (default: all)")  # fmt: skip
    parser.add_argument("--stores", type=chosen(NAMES), default=list(NAMES), metavar="A,B",
                        help=f"of {', '.join(NAMES)} (default: all that are there)")  # fmt: skip
    parser.add_argument("--mooncake-python", default=os.environ.get("MOONCAKE_PYTHON", ""),
                        metavar="PATH", help="of the environment that has its wheel")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=Scale().seconds, help="of calls per turn")
    parser.add_argument("--rounds", type=int, default=Scale().rounds, help="turns of each store")
    parser.add_argument("--quick", action="store_true", help="to see that it works; no figures")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    scale = QUICK if options.quick else Scale(options.seconds, options.rounds)
    about = machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with this process
    rows = run(options, scale)
    print(report.sections(rows))
    print(f"\n### targets\n\n{targets.table(rows)}")
    if options.json:
        Path(options.json).write_text(json.dumps({"about": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

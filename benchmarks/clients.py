"""Many client processes on one node at once: what they get together, and the slowest.

    python benchmarks/clients.py --clients 32

The part ``clients`` of ``peers.py`` for p2pkv alone, by one path, and for longer. Starts etcd and
one node. ``slowest`` is the calls of the slowest client over the mean of all: 1 is perfectly fair.
``server_us_per_call`` is the processor time that the node took for a call, ``values`` how many of
the values its read threads sent (the rest its event loop did).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from compare import suite
from compare.processes import Servers
from compare.servers import PATHS, Wanted, p2pkv_nodes

from p2pkv import Client
from p2pkv.etcd_server import EtcdCluster


def values_read(kv: Client) -> float:
    return sum(s.figures.get("read_values_total", 0) for s in kv.stats().values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--path", choices=PATHS, default="tcp")
    parser.add_argument("--work", default=",".join(suite.CROWD.workloads))
    options = parser.parse_args()
    scale = suite.Scale(crowds=(options.clients,), crowd_seconds=options.seconds)
    wanted = Wanted([f"p2pkv-{options.path}"], scale.server_bytes // 3, "")
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        EtcdCluster(1) as etcd,
        Servers(Path(directory)) as servers,
    ):
        (spec,) = p2pkv_nodes(servers, etcd, wanted)
        with Client(etcd.endpoints, cluster=spec.options["cluster"]) as kv:
            for work in options.work.split(","):
                before = values_read(kv)
                for row in suite.crowd(spec, scale, [work]):
                    print(json.dumps(row | {"values": round(values_read(kv) - before)}), flush=True)


if __name__ == "__main__":
    main()

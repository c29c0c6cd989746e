#!/usr/bin/env python3
"""Kills, stops and cuts off nodes and etcd under load, and says what was lost by it.

    scripts/failover.py --faults kill=10,stop=3             a cluster of its own on this machine
    scripts/failover.py --replicas 2 --seconds 120 --json   the report as JSON
    scripts/failover.py --etcd http://etcd:2379 --nodes a,b,c \\
        --kill-command "ssh {host} systemctl kill -s KILL p2pkv" \\
        --start-command "ssh {host} systemctl start p2pkv"  a running cluster of yours

Exits with 1 if anything was lost, stale, torn or unexplained, or if there was too little load to
tell. docs/testing.md says how to read the report.
"""

from __future__ import annotations

from p2pkv.testing.failover_command import main

if __name__ == "__main__":
    main()

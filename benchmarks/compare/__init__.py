"""The parts of ``benchmarks/peers.py``: one work, done by p2pkv and by other stores.

Every store is driven by a process of its own (``worker``), which may run on another Python than the
benchmark: only ``p2pkv_store``, ``servers`` and ``scenarios`` import p2pkv.
"""

"""The store as inference engines want it: a cache that never makes them wait.

``cache`` is what every adapter is built on; ``keys`` names blocks so that prefixes lie together;
``mooncake`` offers the interface of another store to programs that were written for it.
"""

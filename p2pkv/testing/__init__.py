"""Helpers for tests of p2pkv and of programs that use it."""

"""The native extension; everything else is in setup.cfg."""

from setuptools import setup

setup(cffi_modules=["p2pkv/_native/_build.py:ffibuilder"])

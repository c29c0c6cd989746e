"""The native extensions; everything else is in setup.cfg."""

import runpy

from setuptools import setup

modules = ["p2pkv/_native/_build.py:ffibuilder"]
if runpy.run_path("p2pkv/_native/build_ucx.py")["include_directory"]() is not None:
    modules.append("p2pkv/_native/build_ucx.py:ffibuilder")

setup(cffi_modules=modules)

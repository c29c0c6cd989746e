"""Stands before the package ``mooncake`` on PYTHONPATH, and replaces its module ``store`` alone.

Whatever else is installed as ``mooncake`` is found behind it.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

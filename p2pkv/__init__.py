"""p2pkv: a peer-to-peer store for the KV cache of LLM inference."""

from p2pkv._version import __version__

__all__ = ["__version__"]

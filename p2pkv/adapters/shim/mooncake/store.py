"""``mooncake.store``, over a p2pkv cluster."""

from p2pkv.adapters.mooncake import *  # noqa: F403

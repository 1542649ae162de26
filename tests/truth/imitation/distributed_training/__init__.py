"""An imitation of subnet 38's miner, shaped like a checkout of it, with which the tests run
`tests.truth.real_miner`."""

__version__ = "imitation"
__run__ = "5"

"""A stand-in for subnet 38's miner, laid out like a checkout of it. The tests run
`tests.truth.real_miner` against it."""

__version__ = "imitation"
__run__ = "5"

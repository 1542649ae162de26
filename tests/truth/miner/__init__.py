"""The world around subnet 38's real miner: its network and GPU are fake; its code is the original.

`world` is set up in the miner's processes by `site/sitecustomize.py`; `tests.truth.real_miner` is
the command that starts them.
"""

"""Sets up the fakes in the miner's own processes: its ranks and its upload worker."""

import os
import sys

_SCRIPTS = ("neurons/miner.py", "distributed_training/utils/upload_worker.py")

_script = next((word for word in sys.orig_argv[1:] if not word.startswith("-")), "")
if "MINER_WORLD" in os.environ and _script.endswith(_SCRIPTS):
    from tests.truth.miner import world

    world.install()

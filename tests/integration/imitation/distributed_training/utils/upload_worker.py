"""Imitates the upload worker: only its exit code tells whether an upload succeeded."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

if __name__ == "__main__":
    bucket, _account, _key, _secret, tag, archive = sys.argv[1:7]
    if Path("fail-uploads").exists():
        sys.exit(3)
    target = Path(bucket) / f"epoch-{tag.split('.')[1]}"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy("gradients.pt", target / f"gradients-{tag}-{archive}.pt")
    sys.exit(0 if "miner_guard" not in sys.modules else 9)

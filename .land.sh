set -e
cd /work/wt/diag
git fetch -q . ; git rebase -q main
.venv/bin/ruff format --check -q . && .venv/bin/ruff check -q . && .venv/bin/mypy | tail -1 && .venv/bin/lint-imports 2>&1 | tail -3
cd /work/main && git merge --ff-only diag 2>&1 | tail -1

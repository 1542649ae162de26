#!/usr/bin/env bash
# Keeps a guarded subnet 38 miner at upstream's version. It replaces the loop in run_miner.sh, which kills every Python
# process on the host, including the guard and other miners. Start it in the miner's clone:
#     pm2 start /path/to/ops/sn38/auto_update.sh --name sn38-update --interpreter bash
# EVERY_S: seconds between checks (1200, as upstream). NAME: the guard's --name. ONCE=1: check once and exit.
set -uo pipefail

every=${EVERY_S:-1200}
name=${NAME:-miner}
file=distributed_training/__init__.py

version_of() { # version_of REVISION: the version in that revision's file
    git show "$1:$file" 2>/dev/null | sed -n 's/^__version__ *= *["'\'']\([^"'\'']*\)["'\''].*/\1/p'
}

newer() { # newer A B: A is a later version than B
    [ "$1" != "$2" ] && [ "$(printf '%s\n' "$1" "$2" | sort -V | tail -n 1)" = "$1" ]
}

look() {
    branch=$(git branch --show-current)
    if ! git fetch --quiet origin "$branch"; then
        echo "update: origin could not be reached, trying again in ${every}s"
        return
    fi
    ours=$(version_of HEAD) theirs=$(version_of FETCH_HEAD)
    if [ -z "$theirs" ] || ! newer "$theirs" "$ours"; then
        echo "update: ${ours:-no version} is current"
        return
    fi
    before=$(git rev-parse HEAD)
    if ! git merge --quiet --ff-only FETCH_HEAD; then
        echo "update: $theirs is there, but the clone has local changes; not updated"
        return
    fi
    if ! pip install --quiet -e .; then
        # Go back to the running version: a restart would load code whose dependencies are missing, and the next check would
        # find the clone at the new version and never retry.
        git reset --quiet --keep "$before"
        echo "update: pip install of $theirs failed; the clone is back at $ours, the miner was not restarted, trying again in ${every}s"
        return
    fi
    echo "update: $ours -> $theirs, restarting the miner"
    miner-guard ctl restart --name "$name"
}

while true; do
    look
    [ -n "${ONCE:-}" ] && exit 0
    sleep "$every"
done

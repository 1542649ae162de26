"""The examples at the end of each command's `--help`."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": (
        "miner-guard run -- torchrun --nproc_per_node=4 neurons/miner.py --netuid 38",
        "miner-guard run --attach auto --finite -- python train.py",
    ),
    "doctor": ("miner-guard doctor", "miner-guard doctor --deep --expect-gpus 4"),
    "status": ("miner-guard status", "miner-guard status --json | jq .verdict"),
    "top": ("miner-guard top", "miner-guard top --once | head -n 2"),
    "logs": (
        "miner-guard logs --level warning -n 20",
        "miner-guard logs --event verdict_changed --since 1d",
        "miner-guard logs --event inner_step --rank 0 --follow",
    ),
    "runbook": ("miner-guard runbook hang_detected", "miner-guard runbook | grep -i upload"),
    "gate": (
        "miner-guard gate --outer-step 56 --inner-step 84 --loss 3.4",
        "miner-guard gate --outer-step 56 --inner-step 84 --gradients gradients.pt --json",
    ),
    "audit": ("miner-guard audit", "miner-guard audit --json | jq .outcome"),
    "explain": (
        "miner-guard explain miner.log",
        "zcat old.log.gz | miner-guard explain -",
        "miner-guard explain --trace steps.jsonl",
    ),
    "attach-check": ("miner-guard attach-check miner.log",),
    "plan": ("miner-guard plan --gpus 4 --params 4B --batch 2 --effective 512",),
    "costs": (
        "miner-guard costs",
        "miner-guard costs estimate validation --every 200 --seconds 3 --step-time 3.5",
    ),
    "report": ("miner-guard report -o page.html", "miner-guard report -o day.html --since 1d"),
    "bundle": ("miner-guard bundle -o help.tar.gz", "miner-guard bundle -o help.tar.gz --since 6h"),
    "export": ("miner-guard export tensorboard -o runs/miner",),
    "alerts": ("miner-guard alerts test",),
    "ctl": ("miner-guard ctl checkpoint", "miner-guard ctl restart --name miner"),
    "config": ("miner-guard config --changed", "miner-guard config --validate guard.toml"),
    "init": ("miner-guard init --name miner -- torchrun --nproc_per_node=4 neurons/miner.py",),
    "ops": ("miner-guard ops ./ops",),
    "demo": ("miner-guard demo", "miner-guard demo --fault slow@40 --fault hang@60:1"),
}

// pm2 start ecosystem.config.js      runs the demo miner under the guard (once `make demo` has built .venv).
// For your own miner, edit the line RUN, for example:
//   const RUN = ["run", "--", "torchrun", "--nproc_per_node=4", "neurons/miner.py", "--netuid", "38"];
// Everything else must stay as it is:
//   /usr/bin/env, because pm2 runs a script with a space in its path through bash, without its arguments;
//   treekill false, so that pm2 signals only the guard, which lets the ranks save and shuts them down cleanly;
//   kill_timeout longer than the guard's stop_timeout_s (45 s), which is longer than torchrun's timeout (30 s);
//   no restart after exit codes that a restart can't fix: 63 finished, 64 usage, 69 preflight, 75 crash loop, 78 configuration.
// Never add 0 to stop_exit_codes: pm2 records a death by signal as exit code 0. The guard, not pm2, delays restarts.
const os = require("os");
const path = require("path");
const bin = path.join(__dirname, ".venv", "bin");

const RUN = ["demo"];

const log = path.join(process.env.PM2_HOME || path.join(os.homedir(), ".pm2"), "logs", "miner.log");

module.exports = {
  apps: [
    {
      name: "miner",
      cwd: __dirname,
      script: "/usr/bin/env",
      interpreter: "none",
      args: [
        path.join(bin, "python"), "-u", path.join(bin, "miner-guard"),
        RUN[0], "--name", "miner", "--finished-code", "63", ...RUN.slice(1),
      ],
      exec_mode: "fork",
      instances: 1,
      treekill: false,
      kill_timeout: 60000,
      autorestart: true,
      stop_exit_codes: [63, 64, 69, 75, 78],
      min_uptime: "30s",
      max_restarts: 10,
      merge_logs: true,
      out_file: log,
      error_file: log,
      filter_env: [
        "SECRET", "TOKEN", "_KEY", "APIKEY", "PASSWORD", "PASSWD", "PASSPHRASE", "MNEMONIC", "WEBHOOK", "ALERTS__URLS",
        "HEARTBEAT_URL",
      ],
      watch: false,
      vizion: false,
      automation: false,
      pmx: false,
    },
  ],
};

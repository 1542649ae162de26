// pm2 start ecosystem.config.js      runs the miner under the guard. Written by `miner-guard init`.
// To change the miner's command, edit the line RUN. Everything else must stay as it is:
//   /usr/bin/env, because pm2 passes a script with a space in its path to bash, without its arguments;
//   treekill false, so that pm2 signals only the guard, which lets the ranks save and shuts them down cleanly;
//   kill_timeout above the guard's own stop_timeout_s (45 s), which is above torchrun's (30 s);
//   no restart after an exit that a restart can't fix: 63 finished, 64 usage, 69 preflight, 75 crash loop, 78 configuration.
// Never add 0 to stop_exit_codes: pm2 records a death by signal as exit code 0. The guard, not pm2, delays restarts.
// filter_env keeps secrets out of pm2's dump, so neither the miner nor the guard gets them from the shell: put them in .env.
const os = require("os");
const path = require("path");

const RUN = @RUN@;

const log = path.join(process.env.PM2_HOME || path.join(os.homedir(), ".pm2"), "logs", "@NAME@.log");

module.exports = {
  apps: [
    {
      name: "@NAME@",
      cwd: __dirname,
      script: "/usr/bin/env",
      interpreter: "none",
      args: [@PYTHON@, "-u", @GUARD@, RUN[0], "--name", "@NAME@", "--finished-code", "63", ...RUN.slice(1)],
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

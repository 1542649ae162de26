"""The output of the other ranks and a launcher after one rank has failed."""

from __future__ import annotations

CONSEQUENCES = (
    """[E1104 11:22:33.100 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=2211, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.
[E1104 11:22:33.101 ProcessGroupNCCL.cpp:695] [Rank {rank}] To avoid data inconsistency, we are taking the entire \
process down.
terminate called after throwing an instance of 'c10::DistBackendError'
Fatal Python error: Aborted""",
    """Traceback (most recent call last):
  File "/srv/miner/neurons/miner.py", line 170, in inner_step
    dist.all_reduce(self.flag, group=self.gloo_group)
  File "/opt/venv/lib/python3.10/site-packages/torch/distributed/distributed_c10d.py", line 2806, in all_reduce
    work.wait()
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:21822""",
    """Traceback (most recent call last):
  File "/srv/miner/neurons/miner.py", line 171, in inner_step
    dist.barrier()
torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process \
exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.""",
    (
        "Training Loop Failed with error: "
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
    ),
)
SUMMARY = """\
W1211 08:26:06.780000 1395 torch/distributed/elastic/api.py:858] Sending process 6832 closing signal SIGTERM
E1211 08:26:06.844000 1395 torch/distributed/elastic/api.py:833] failed (exitcode: 1) local_rank: 3 (pid: 6)
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
neurons/miner.py FAILED
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -6 (pid: 2767)
"""

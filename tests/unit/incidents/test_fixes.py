"""The matched line determines the first fix, and that fix mentions whatever the line names."""

from __future__ import annotations

import io

import pytest

from miner_guard.incidents import knowledge
from miner_guard.incidents.explain import Explained, explain
from miner_guard.incidents.oom import Training

LIBRARY = 'File "/e/lib/python3.11/site-packages/trl/trainer.py", line 7, in f\n'


def found(log: str) -> Explained:
    root = explain(io.BytesIO(log.encode()), knowledge.load(), Training()).root
    assert root is not None
    return root


@pytest.mark.parametrize(
    ("line", "label", "expected"),
    [
        (
            (
                "OSError: /e/site-packages/flash_attn_2_cuda.so: undefined symbol: "
                "_ZN3c104cuda9SetDevE"
            ),
            "version_mismatch",
            "flash-attn",
        ),
        (
            "ImportError: /e/site-packages/vllm/_C.so: undefined symbol: cuPointerGetAttribute",
            "version_mismatch",
            "Update the NVIDIA driver",
        ),
        (
            "ImportError: /e/libtorch_cuda.so: undefined symbol: ncclCommResume",
            "version_mismatch",
            "Reinstall the NCCL",
        ),
        (
            "RuntimeError: Error(s) in loading state_dict for GPT:\n"
            '\tUnexpected key(s) in state_dict: "_orig_mod.wte.weight", "_orig_mod.h.0.weight".',
            "state_dict_mismatch",
            "k.replace('_orig_mod.', '')",
        ),
        (
            "RuntimeError: Expected to have finished reduction in the prior iteration. You can enable "
            "it by passing `find_unused_parameters=True` to DistributedDataParallel, and by more.",
            "code_bug",
            "passing `find_unused_parameters=True`",
        ),
        (
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
            "multiprocessing, you must use the 'spawn' start method",
            "code_bug",
            "you must use the 'spawn' start method",
        ),
        (
            "slurmstepd: error: *** JOB 7 ON n3 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION "
            "***",
            "user_interrupt",
            "#SBATCH --requeue",
        ),
        (
            "TypeError: SFTTrainer.__init__() got an unexpected keyword argument 'max_seq_length'",
            "version_mismatch",
            "the version of trl that",
        ),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has "
            "a total capacity of 21.99 GiB of which 759.38 MiB is free. Including non-PyTorch memory, "
            "this process has 0 bytes memory in use. Of the allocated memory 20.52 GiB is allocated "
            "by PyTorch, and 102.08 MiB is reserved by PyTorch but unallocated.",
            "cuda_oom",
            "Halve the micro-batch",
        ),
        (
            "ModuleNotFoundError: No module named 'megatron.training'",
            "version_mismatch",
            "the version of megatron that",
        ),
        (
            "AttributeError: module 'torch._dynamo' has no attribute 'mark_static_address'",
            "version_mismatch",
            "upgrade it if the attribute is new",
        ),
        (
            "ImportError: libcublas.so.9.0: cannot open shared object file: No such file or directory",
            "version_mismatch",
            "find / -name 'libcublas.so.9.0*'",
        ),
        (
            "HTTPError: 403 Client Error: Forbidden for url: https://huggingface.co/api/repos/create",
            "hf_auth",
            "push to a repo of that account",
        ),
        (
            "RuntimeError: No CUDA GPUs are available",
            "cuda_unavailable",
            "Compare CUDA_VISIBLE_DEVICES",
        ),
        (
            "FileNotFoundError: Couldn't find any data file at /data/mix.",
            "dataset_fetch_failed",
            "Set the dataset path",
        ),
        (
            "error:{'type': 'Module', 'name': 'TooManyRegistrationsThisInterval', 'docs': []}",
            "chain_transaction_failed",
            "next registration interval",
        ),
        (
            "RuntimeError: Data processing error: CAS service error : Request failed",
            "hub_or_storage_unavailable",
            "HF_HUB_DISABLE_XET=1",
        ),
        (
            "An error occurred (403) when calling the HeadObject operation: Forbidden",
            "storage_access_denied",
            "--no-sign-request",
        ),
        (
            "RuntimeError: size mismatch for fc.weight: copying a param with shape (10, 4)",
            "state_dict_mismatch",
            "Build the model with the checkpoint's number of classes",
        ),
        (
            "wandb: ERROR failed to upsert bucket: 403 Forbidden: permission denied [upsertBucket]",
            "tracker_unavailable",
            "Set `entity=`",
        ),
        (
            "run.sh: line 3: 4242 Killed                  python train.py",
            "host_oom_kill",
            "use less host memory",
        ),
        (
            "OSError: libtorch_cuda.so: cannot open shared object file: No such file or directory",
            "version_mismatch",
            "Install a CUDA build of torch",
        ),
        ("ModuleNotFoundError: No module named 'bitsandbytes'", "version_mismatch", "bitsandbytes"),
        (
            "OSError: [Errno 28] No space left on device: '/data/ckpt/model.pt'",
            "disk_full",
            "holds /data/ckpt/model.pt:",
        ),
        (
            "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8091): "
            "address already in use",
            "port_in_use",
            "grep 8091",
        ),
        (
            "huggingface_hub.utils._errors.RepositoryNotFoundError: 401 Client Error. Repository "
            "Not Found for url: https://huggingface.co/api/models/me/miner-5.",
            "hf_auth",
            "me/miner-5",
        ),
        (
            "botocore.exceptions.ClientError: An error occurred (RequestTimeTooSkewed) when "
            "calling the UploadPart operation: The difference between the request time and the "
            "current time is too large.",
            "clock_skew",
            "multipart_chunksize",
        ),
        (
            "misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned "
            "113(No route to host) errno 115(Operation now in progress)",
            "nccl_network_error",
            "nc -vz 10.0.0.4",
        ),
        (
            "transport/nvls.cc:254 NCCL WARN Cuda failure 401 'the operation cannot be performed "
            "in the present state'",
            "fabric_manager",
            "NCCL_NVLS_ENABLE=0",
        ),
        (
            "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 "
            "'out of memory'.",
            "fabric_manager",
            "NCCL_NVLS_ENABLE=0",
        ),
        (
            "huggingface_hub.errors.HfHubHTTPError: 500 Server Error: Internal Server Error for "
            "url: https://huggingface.co/api/models/x",
            "hub_or_storage_unavailable",
            "Wait and retry",
        ),
        (
            "huggingface_hub.errors.HfHubHTTPError: 403 Forbidden: You don't have the rights to "
            'create a model under the namespace "someone".',
            "hf_auth",
            "under your own name",
        ),
        (
            "ImportError: /e/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by "
            "/e/site-packages/x.so)",
            "version_mismatch",
            "libstdcxx-ng",
        ),
        (
            "ImportError: /lib64/libc.so.6: version `GLIBC_2.32' not found (required by "
            "/e/site-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so)",
            "version_mismatch",
            "older release of flash-attn",
        ),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch.",
            "host_oom_kill",
            "--mem",
        ),
        (
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "code_bug",
            "log of the process that failed",
        ),
        ("MemoryError", "host_oom_kill", "Add memory or swap"),
        (
            "google.api_core.exceptions.Forbidden: 403 GET me@example.com does not have "
            "storage.objects.get access to the Google Cloud Storage object.",
            "storage_access_denied",
            "gcloud auth",
        ),
        (
            'docker: Error response from daemon: could not select device driver "" with '
            "capabilities: [[gpu]].",
            "cuda_unavailable",
            "nvidia-container-toolkit on the host",
        ),
        (
            (
                "botocore.exceptions.ConnectionClosedError: Connection was closed before we"
                " received a valid response from endpoint URL: "
                '"http://minio:9000/bucket/model?partNumber=16"'
            ),
            "hub_or_storage_unavailable",
            "AWS_RETRY_MODE=adaptive",
        ),
        (
            (
                "huggingface_hub.utils._errors.LocalEntryNotFoundError: An error happened "
                "while trying to locate the file on the Hub and we cannot find the "
                "requested files in the local cache."
            ),
            "hub_or_storage_unavailable",
            "--local-dir",
        ),
        (
            (
                "ConnectionError: Network error: Request error: HTTP status client error "
                "(403 Forbidden), domain: "
                "https://huggingface.co/api/models/example/agent/xet-write-token/main"
            ),
            "hf_auth",
            "owned by the token's account",
        ),
        (
            "2026-01-06 14:23:35 ERROR 429: Too Many Requests.",
            "hf_rate_limit",
            "--retry-on-http-error=429",
        ),
        (
            "Error: I/O error No space left on device (os error 28)",
            "disk_full",
            "TMPDIR and HF_HOME",
        ),
        (
            (
                'tarfile.ReadError: ("unexpected end of data @ <_io.BufferedReader '
                "name='train/00000022.tar'>\","
            ),
            "dataset_fetch_failed",
            "tar tf",
        ),
        (
            (
                "Error in extrinsic: {'code': 1014, 'message': 'Priority is too low: (7 vs "
                "7)', 'data': 'The transaction has too low priority to replace another "
                "transaction already in the pool.'}"
            ),
            "chain_transaction_failed",
            "until the earlier transaction is included",
        ),
        (
            (
                "WARN dht/RtRefreshManager failed when refreshing routing table: failed to "
                "find any peer in table"
            ),
            "dht_unreachable",
            "a bootstrap peer responds",
        ),
        ("RuntimeError: Address already in use", "port_in_use", "torchrun's --master-port"),
        (
            (
                "slurmstepd: error: *** JOB 4191701 ON c5-1 CANCELLED AT "
                "2026-08-17T15:09:00 DUE TO TIME LIMIT ***"
            ),
            "user_interrupt",
            "#SBATCH --time",
        ),
        (
            (
                "Exception: Current loss scale already at minimum - cannot decrease scale "
                "anymore. Exiting run."
            ),
            "loss_nan",
            "bf16 instead of fp16",
        ),
        (
            (
                "ImportError: cannot import name 'EncoderDecoderCache' from 'transformers' "
                "(/e/lib/python3.10/site-packages/transformers/__init__.py)"
            ),
            "version_mismatch",
            "older release of the caller",
        ),
    ],
)
def test_the_first_fix_is_that_of_the_line(line: str, label: str, expected: str) -> None:
    root = found(line)
    assert root.label == label
    assert expected in root.fixes[0]


def test_rebuilding_another_package_does_not_fix_a_cpu_only_torch() -> None:
    """`explain` once suggested `--force-reinstall PACKAGE` without naming a package."""
    root = found("OSError: libc10_cuda.so: cannot open shared object file: No such file")
    assert "CPU-only build" in root.cause
    assert "PACKAGE" not in " ".join(root.fixes)


def test_the_lowest_frame_of_the_miners_own_code_is_named_and_never_taken_for_a_damaged_file() -> (
    None
):
    """`explain` must not advise to delete the source file that a traceback passes through."""
    frames = 'Traceback (most recent call last):\n  File "/srv/neurons/miner.py", line 7, in f\n'
    assert "/srv/neurons/miner.py, line 7" in found(frames + LIBRARY + "KeyError: 'x'\n").fixes[0]
    torn = found(frames + "RuntimeError: PytorchStreamReader failed reading zip archive\n")
    assert torn.label == "checkpoint_corrupt"
    assert "miner.py" not in " ".join(torn.fixes)


def test_a_full_dev_shm_is_not_a_full_disk() -> None:
    frame = (
        'Traceback (most recent call last):\n  File "/l/multiprocessing/synchronize.py", line 57\n'
    )
    full = "OSError: [Errno 28] No space left on device\n"
    assert found(frame + full).label == "shm_exhausted"
    assert found(full).label == "disk_full"


def test_a_library_that_refuses_an_argument_is_not_the_miners_fault() -> None:
    refused = "TypeError: f() got an unexpected keyword argument 'of_ours'\n"
    start = "Traceback (most recent call last):\n  "
    assert found(start + LIBRARY + refused).label == "version_mismatch"
    assert found(start + 'File "neurons/miner.py", line 7\n' + refused).label == "code_bug"


def test_a_new_miner_that_has_no_state_yet_lost_nothing() -> None:
    """`explain` once reported lost work at the first start of every new miner."""
    root = found("WARNING Failed to load local state, loading global model instead\n")
    assert root.label == "state_load_failed"
    assert "normal for a new miner" in root.cause
    steps = "".join(f"Outer Step: 3 | Inner Step: {n} | Loss: 3.40\n" for n in range(12))
    log = f"Failed to load local state, loading global model instead\n{steps}".encode()
    assert explain(io.BytesIO(log), knowledge.load(), Training()).root is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8"])
def test_a_log_in_any_encoding_is_read(encoding: str) -> None:
    """A UTF-16 log was once "nothing wrong"."""
    log = "step 1 loss 3.4 – fine\nOSError: [Errno 28] No space left on device\n" * 9000
    result = explain(io.BytesIO(log.encode(encoding)), knowledge.load(), Training())
    assert result.root is not None
    assert (result.root.label, result.root.line, result.lines) == ("disk_full", 2, 18000)

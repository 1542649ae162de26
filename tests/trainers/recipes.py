"""How to run each trainer on a CPU in seconds: its arguments, a little data, and how to read its
output.

The published scripts are not part of this repository: `published.py` takes the folders where they
were checked out. The data is made up here, so that no script downloads anything.
"""

from __future__ import annotations

import gzip
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_TIMES = r"\d+(?:\.\d+)? ?(?:ms|s\b)|\d+(?:\.\d+)? ?(?:it|steps)/s"


@dataclass(frozen=True)
class Recipe:
    """One trainer."""

    name: str
    script: str
    """Path below its checkout."""

    arguments: str = ""
    prepare: Callable[[Path], None] = lambda _work: None
    """Puts data into a copy of the checkout."""

    folder: str = "."
    """Where to start it, below the checkout."""

    seeded: bool = True
    """Whether two runs print the same."""

    steps: int = 0
    """Number of optimizer steps."""

    loss: str = r"loss ([\d.]+)"
    """Finds the losses in the output; several groups in one match are added up."""

    scale: float = 1.0
    """Factor that turns a printed loss into the one passed to `backward`."""

    first: int = 0
    """Index of the first step whose loss it prints."""

    skipped: int = 0
    """Steps at the start that the table omits: until the second step, the hook cannot tell which of
    a GAN's optimizers ends a step."""

    every: int = 1
    """Number of steps from one printed loss to the next; 0 if it prints no step losses."""

    clocks: str = _TIMES
    """Parts of its output that differ from run to run: times."""

    spawns: bool = False
    """The program starts its ranks itself; a fault in the first process does not reach them."""

    modules: tuple[str, ...] = ()
    """Modules other than torch that it imports."""

    path: tuple[str, ...] = ()
    """Folders in the checkout for PYTHONPATH."""

    note: str = ""

    def losses(self, printed: str) -> list[float]:
        found = re.finditer(self.loss, printed)
        return [self.scale * sum(map(float, match.groups())) for match in found]

    def without_times(self, printed: str) -> str:
        return re.sub(self.clocks, "TIME", printed)


def _text(work: Path, name: str, words: int = 4000) -> None:
    source = random.Random(1)
    known = ("the", "cat", "sat", "on", "a", "mat", "and", "ran")
    lines = [" ".join(source.choice(known) for _ in range(9)) for _ in range(words // 9)]
    path = work / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _words(work: Path) -> None:
    for part in ("train", "valid", "test"):
        _text(work / "word_language_model" / "words", f"{part}.txt", 1200)


def _tokens(work: Path) -> None:
    """Token files in nanoGPT's format: unsigned 16-bit numbers."""
    source = random.Random(2)
    folder = work / "data" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "val.bin"):
        numbers = [source.randrange(64) for _ in range(8192)]
        (folder / name).write_bytes(struct.pack(f"<{len(numbers)}H", *numbers))


def _mnist(*folders: str) -> Callable[[Path], None]:
    """MNIST's four files with a few hundred random digits: torchvision finds them and downloads
    nothing."""

    def write(work: Path) -> None:
        source = random.Random(3)
        for folder in folders:
            raw = work / folder / "MNIST" / "raw"
            raw.mkdir(parents=True, exist_ok=True)
            for part, count in (("train", 160), ("t10k", 32)):
                pixels = struct.pack(">IIII", 2051, count, 28, 28) + source.randbytes(784 * count)
                digits = bytes(source.randrange(10) for _ in range(count))
                labels = struct.pack(">II", 2049, count) + digits
                for name, data in (("images-idx3", pixels), ("labels-idx1", labels)):
                    (raw / f"{part}-{name}-ubyte").write_bytes(data)
                    (raw / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(data))

    return write


def _images(work: Path) -> None:
    """A folder of images for ImageNet's script: two classes of eight."""
    from PIL import Image

    source = random.Random(4)
    for part in ("train", "val"):
        for kind in ("a", "b"):
            folder = work / "images" / part / kind
            folder.mkdir(parents=True)
            for number in range(8):
                image = Image.frombytes("RGB", (256, 256), source.randbytes(256 * 256 * 3))
                image.save(folder / f"{number}.png")


_DIGITS = r"Loss: ([\d.]+)"

PUBLISHED = {
    "karpathy/nanoGPT": (
        Recipe(
            "nanoGPT",
            "train.py",
            "--device=cpu --compile=False --eval_iters=1 --log_interval=1 --batch_size=2 "
            "--max_iters=29 --gradient_accumulation_steps=4 --warmup_iters=2 --dataset=tiny "
            "--block_size=16 --n_layer=1 --n_head=2 --n_embd=16 --dtype=float32",
            _tokens,
            steps=30,
            loss=r"iter \d+: loss ([\d.]+)",
            clocks=r"time [\d.]+ms|mfu -?[\d.]+%",
        ),
    ),
    "karpathy/minGPT": (
        Recipe(
            "minGPT",
            "projects/adder/adder.py",
            "--trainer.max_iters=41 --trainer.num_workers=0 --data.ndigit=1",
            steps=41,
            loss=r"iter \d+: train loss ([\d.]+)",
            every=10,
            clocks=r"iter_dt [\d.]+ms",
            path=(".",),
        ),
    ),
    "karpathy/makemore": (
        Recipe(
            "makemore",
            "makemore.py",
            "-i names.txt --device cpu --type mlp --max-steps 41 --num-workers 0 --n-embd "
            "16 --n-embd2 16",
            steps=41,
            loss=r"step \d+ \| loss ([\d.]+)",
            every=10,
            clocks=r"step time [\d.]+ms",
            modules=("tensorboard",),
        ),
    ),
    "karpathy/ng-video-lecture": (
        Recipe("bigram", "bigram.py", steps=3000, every=0, note="prints averages over 200 batches"),
    ),
    "pytorch/examples": (
        Recipe(
            "MNIST",
            "mnist/main.py",
            "--epochs 2 --batch-size 16 --log-interval 1 --no-accel",
            _mnist("data"),
            "mnist",
            steps=20,
            loss=_DIGITS,
            modules=("torchvision",),
        ),
        Recipe(
            "MNIST RNN",
            "mnist_rnn/main.py",
            "--epochs 2 --batch-size 16 --log-interval 1",
            _mnist("data"),
            "mnist_rnn",
            steps=20,
            loss=_DIGITS,
            modules=("torchvision",),
        ),
        Recipe(
            "MNIST Hogwild",
            "mnist_hogwild/main.py",
            "--epochs 1 --batch-size 16 --log-interval 1 --num-processes 1",
            _mnist("data"),
            "mnist_hogwild",
            steps=10,
            loss=_DIGITS,
            clocks=r"^\d+\t|\n\d+\t",
            spawns=True,
            modules=("torchvision",),
        ),
        Recipe(
            "VAE",
            "vae/main.py",
            "--epochs 1 --batch-size 16 --log-interval 1 --no-accel",
            _mnist("data"),
            "vae",
            steps=10,
            loss=_DIGITS,
            scale=16,
            modules=("torchvision",),
            note="prints the loss divided by the batch size of 16",
        ),
        Recipe(
            "DCGAN",
            "dcgan/main.py",
            "--dataset fake --niter 1 --ngf 4 --ndf 4 --batchSize 64 --workers 0 --manualSeed 1",
            folder="dcgan",
            steps=16,
            loss=r"Loss_D: ([\d.]+) Loss_G: ([\d.]+)",
            skipped=1,
            modules=("torchvision",),
        ),
        Recipe(
            "ImageNet",
            "imagenet/main.py",
            "images -a squeezenet1_1 -b 2 --epochs 1 -p 1 -j 0 --lr 1e-5 --no-accel --seed 1",
            lambda work: _images(work / "imagenet"),
            "imagenet",
            steps=8,
            loss=r"Epoch: \[\d+\].*?Loss ([\d.e+-]+)",
            clocks=r"(?:Time|Data) +[\d.]+ \( *[\d.]+\)",
            modules=("torchvision",),
        ),
        Recipe(
            "word language model",
            "word_language_model/main.py",
            "--data words --model LSTM --emsize 8 --nhid 8 --nlayers 1 --epochs 1 "
            "--batch_size 4 --bptt 10 --log-interval 1 --use-optimizer",
            _words,
            "word_language_model",
            steps=34,
            loss=r"batches .*?\| loss +([\d.]+)",
            first=1,
            skipped=2,
            clocks=r"ms/batch +[\d.]+|time: +[\d.]+s",
        ),
    ),
    "Lightning-AI/pytorch-lightning": (
        Recipe(
            "Lightning's bug report model",
            "examples/pytorch/bug_report/bug_report_model.py",
            steps=1,
            every=0,
            seeded=False,
            clocks=r"[\d.]+ ?it/s|\d+:\d\d:\d\d|[\u2501\u2578\u257a ]{3,}",
            modules=("lightning",),
        ),
        Recipe(
            "Fabric's image classifier",
            "examples/fabric/image_classifier/train_fabric.py",
            "--epochs 2 --batch-size 16 --log-interval 1",
            _mnist("Datasets"),
            steps=20,
            loss=_DIGITS,
            modules=("lightning", "torchvision"),
        ),
        Recipe(
            "Fabric's plain image classifier",
            "examples/fabric/image_classifier/train_torch.py",
            "--epochs 2 --batch-size 16 --log-interval 1",
            _mnist("Datasets"),
            steps=20,
            loss=_DIGITS,
            modules=("torchvision",),
        ),
    ),
}
"""By repository: the scripts that run on a CPU, without a download, in seconds."""

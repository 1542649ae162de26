"""Generated training loops under `--attach auto`, against a reference that reads the parameters
after each operation: every step is counted, and its loss is exact or unknown, never wrong.

The reference is the loop itself: it knows which losses' gradients lie in which parameters, and it
compares the parameters' bytes to see an update.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.support import requires
from tests.support.hooked import hooked

requires.module("torch")
import torch  # noqa: E402

ITERATIONS = 7
KINDS = ("torch", "own subclass", "own class", "data", "grad", "assigned", "closure", "lbfgs")
KINDS = (
    *KINDS,
    "in backward",
    "gan",
    "critic",
    "two optimizers",
    "sam",
    "scaler",
    "ddp",
    "fsdp",
    "masters",
)


class Recording:
    """Stands in for the guard."""

    rank = 0

    def __init__(self) -> None:
        self.losses: list[float | None] = []

    def step(self, *, loss: Any, **values: Any) -> None:
        self.losses.append(None if loss is None else loss.value)

    def diagnose(self, *arguments: Any, **values: Any) -> None:
        return None


class Adapter:
    """Stands in for the attach adapter; what fails in the hook fails the test."""

    def __init__(self) -> None:
        self.guard: Any = None
        self.complaints: list[str] = []

    def begin(self, *, agree: bool) -> None:
        self.guard = self.guard or Recording()

    def phase(self, name: str) -> Any:
        return contextlib.nullcontext()

    def quiet(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    def degraded(self, what: str) -> None:
        self.complaints.append(what)


class OwnSubclass(torch.optim.Optimizer):
    """An optimizer of torch's kind that somebody wrote."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


def descend(parameters: Sequence[Any], gradients: Sequence[Any], through_data: bool) -> None:
    """What an optimizer does that is no class of torch's."""
    with torch.no_grad():
        for p, g in zip(parameters, gradients, strict=True):
            if g is not None:
                target = p.data if through_data else p
                target.sub_(0.01 * g)


class Loop:
    """One generated program, and its ledger."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.kind = self.draw.choice(KINDS)
        self.nets = [self._net() for _ in range(2 if self.kind in ("gan", "critic") else 1)]
        self.parameters = [p for net in self.nets for p in net.parameters() if p.requires_grad]
        self.ledger: dict[int, list[int]] = {id(p): [] for p in self.parameters}
        """The losses whose gradients lie in each parameter since its last update."""

        self.values: list[float] = []
        self.updates: list[set[int]] = []
        """The losses that each update consumed."""

        self.bytes = self._bytes()
        self.micro = self.draw.choice((1, 1, 2, 4))
        self.divide = self.draw.random() < 0.5
        self.first_zero = self.draw.random() < 0.5
        self.to_none = self.draw.random() < 0.7
        self.clips = self.draw.random() < 0.4
        self.probes = self.draw.choice((0.0, 0.0, 0.4))
        self.style = self.draw.choice(("method", "function", "pair"))
        self.penalty = self.draw.random() < 0.2
        self.saliency = self.draw.random() < 0.15
        self.frozen = torch.nn.Linear(4, 1).requires_grad_(False)

    def _net(self) -> Any:
        width, layers = self.draw.choice((3, 8)), self.draw.choice((1, 2, 6))
        net = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(4 if not n else width, width), torch.nn.Tanh())
              for n in range(layers)),
            torch.nn.Linear(width, 1),
        )  # fmt: skip
        if layers > 1 and self.draw.random() < 0.3:
            net[0].requires_grad_(False)
        return net

    def _bytes(self) -> list[bytes]:
        local = [getattr(p, "_local_tensor", p).detach() for p in self.parameters]
        return [each.numpy().tobytes() for each in local]

    def look(self) -> None:
        """Read the parameters: whatever changed has consumed the losses in its ledger."""
        now = self._bytes()
        changed = [
            p for p, old, new in zip(self.parameters, self.bytes, now, strict=True) if old != new
        ]
        self.bytes = now
        if changed:
            self.updates.append({n for p in changed for n in self.ledger[id(p)]})
            for p in changed:
                self.ledger[id(p)] = []

    def loss(self, *nets: Any) -> Any:
        x = torch.randn(5, 4, requires_grad=self.penalty or self.saliency)
        if self.saliency:
            self.frozen(x).sum().backward()
        out = x
        for net in nets or self.nets:
            out = net(out) if out is x else net(out.expand(-1, 4))
        loss = (out - 1).square().mean()
        if self.penalty:
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + slope.square().mean()
        if self.draw.random() < 0.3:
            with torch.no_grad():
                self.nets[0](torch.randn(2, 4))
        return loss

    def backward(self, loss: Any, raw: Any = None, reaching: Sequence[Any] = ()) -> None:
        reached = list(reaching or self.parameters)
        self.values.append(float((loss if raw is None else raw).detach()))
        if self.style == "method" or raw is not None:
            loss.backward()
        elif self.style == "function":
            torch.autograd.backward(loss)
        else:
            half = loss / 2
            self.values[-1] = 2 * float(half.detach())
            torch.autograd.backward([half, half * 1.0])
        for p in reached:
            self.ledger[id(p)].append(len(self.values) - 1)

    def zero(self, parameters: Sequence[Any], how: Any = None) -> None:
        for p in parameters:
            self.ledger[id(p)] = []
        if how is not None and self.draw.random() < 0.7:
            how.zero_grad(set_to_none=self.to_none)
            return
        for p in parameters:
            if p.grad is not None and not self.to_none:
                p.grad.zero_()
            elif self.to_none:
                p.grad = None

    def micro_batches(
        self, how: Any, scale: Callable[[Any], Any] | None = None, net: Any = None
    ) -> None:
        if self.draw.random() < self.probes:
            self.zero(self.parameters, how)
            self.backward(self.loss() * 3)
            self.zero(self.parameters, how)
        if self.first_zero:
            self.zero(self.parameters, how)
        for number in range(self.micro):
            held = net.no_sync() if net and number + 1 < self.micro else contextlib.nullcontext()
            with held:
                raw = self.loss(*([net] if net else []))
                raw = raw / self.micro if self.divide else raw
                self.backward(scale(raw) if scale else raw, raw if scale else None)
        if self.clips and not scale:
            torch.nn.utils.clip_grad_norm_(self.parameters, 0.5)

    def run(self) -> None:
        getattr(self, "_" + self.kind.replace(" ", "_"))()

    # One method for each kind of program.

    def _torch(self, net: Any = None) -> None:
        kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
        self._stepped_by(self.draw.choice(kinds)(self.parameters, lr=0.01), net)

    def _stepped_by(self, optimizer: Any, net: Any = None) -> None:
        for _ in range(ITERATIONS):
            self.micro_batches(optimizer, net=net)
            optimizer.step()
            self.look()
            if not self.first_zero:
                self.zero(self.parameters, optimizer)

    def _own_subclass(self) -> None:
        self._stepped_by(OwnSubclass(self.parameters))

    def _ddp(self) -> None:
        self._torch(torch.nn.parallel.DistributedDataParallel(self.nets[0]))

    def _fsdp(self) -> None:
        """FSDP2 hands the gradients of all micro-batches over with those of the last one."""
        for p in self.nets[0].parameters():
            p.requires_grad_(True)
        net = torch.distributed.fsdp.fully_shard(self.nets[0])
        self.parameters = list(net.parameters())
        self.ledger, self.probes = {id(p): [] for p in self.parameters}, 0.0
        self.bytes, self.clips, self.penalty = self._bytes(), False, False
        optimizer = torch.optim.AdamW(self.parameters, lr=0.01)
        for _ in range(ITERATIONS):
            for number in range(self.micro):
                net.set_requires_gradient_sync(number + 1 == self.micro)
                self.backward(self.loss())
            optimizer.step()
            self.look()
            self.zero(self.parameters, optimizer)

    def _masters(self) -> None:
        """Mixed precision by hand: the optimizer holds a copy of the parameters."""
        copies = [torch.nn.Parameter(p.detach().clone()) for p in self.parameters]
        optimizer = torch.optim.Adam(copies, lr=0.01)
        self.probes = 0.0
        for _ in range(ITERATIONS):
            self.micro_batches(self.nets[0])
            for copy, p in zip(copies, self.parameters, strict=True):
                copy.grad = p.grad.clone()
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, copies)
            self.look()
            if not self.first_zero:
                self.zero(self.parameters, self.nets[0])

    def _own_class(self, through_data: bool = False) -> None:
        for _ in range(ITERATIONS):
            self.micro_batches(self.nets[0])
            descend(self.parameters, [p.grad for p in self.parameters], through_data)
            self.look()
            if not self.first_zero:
                self.zero(self.parameters, self.nets[0])

    def _data(self) -> None:
        self._own_class(through_data=True)

    def _differentiate(self) -> Sequence[Any]:
        loss = self.loss()
        self.values.append(float(loss.detach()))
        for p in self.parameters:
            self.ledger[id(p)] = [len(self.values) - 1]
        return torch.autograd.grad(loss, self.parameters)

    def _grad(self) -> None:
        for _ in range(ITERATIONS):
            descend(self.parameters, self._differentiate(), self.draw.random() < 0.5)
            self.look()

    def _assigned(self) -> None:
        optimizer = torch.optim.SGD(self.parameters, lr=0.01)
        for _ in range(ITERATIONS):
            for p, gradient in zip(self.parameters, self._differentiate(), strict=True):
                p.grad = gradient
            optimizer.step()
            self.look()

    def _closure(self, optimizer: Any = None) -> None:
        optimizer = optimizer or torch.optim.SGD(self.parameters, lr=0.01)
        for _ in range(ITERATIONS):
            evaluated: list[int] = []

            def closure(evaluated: list[int] = evaluated) -> Any:
                optimizer.zero_grad()
                loss = self.loss()
                loss.backward()
                evaluated.append(len(self.values))
                self.values.append(float(loss.detach()))
                return loss

            optimizer.step(closure)
            for p in self.parameters:
                self.ledger[id(p)] = evaluated[:1]
            self.look()

    def _lbfgs(self) -> None:
        self.penalty = False
        self._closure(torch.optim.LBFGS(self.parameters, lr=0.1, max_iter=3))

    def _in_backward(self) -> None:
        each = {p: torch.optim.SGD([p], lr=0.01) for p in self.parameters}

        def update(p: Any) -> None:
            each[p].step()
            each[p].zero_grad()

        for p in self.parameters:
            p.register_post_accumulate_grad_hook(update)
        for _ in range(ITERATIONS):
            self.backward(self.loss())
            self.look()

    def _gan(self, critics: int = 1) -> None:
        second, first = self.nets
        owned = [[p for p in net.parameters() if p.requires_grad] for net in (first, second)]
        optimizers = [torch.optim.Adam(group, lr=0.01) for group in owned]
        for _ in range(ITERATIONS):
            for _ in range(critics):
                self.zero(owned[0], optimizers[0])
                with torch.no_grad():
                    made = second(torch.randn(5, 4))
                for sample in (torch.randn(5, 4), made.expand(-1, 4)):
                    self.backward(first(sample).square().mean(), reaching=owned[0])
                optimizers[0].step()
                self.look()
            self.zero(owned[1], optimizers[1])
            self.backward(self.loss(second, first))
            optimizers[1].step()
            self.look()

    def _critic(self) -> None:
        self._gan(critics=3)

    def _two_optimizers(self) -> None:
        halves = self.parameters[::2], self.parameters[1::2]
        optimizers = [torch.optim.SGD(half, lr=0.01) for half in halves]
        for _ in range(ITERATIONS):
            self.micro_batches(None)
            for optimizer in optimizers:
                optimizer.step()
                self.look()
            if not self.first_zero:
                self.zero(self.parameters)

    def _sam(self) -> None:
        base = torch.optim.SGD(self.parameters, lr=0.01, momentum=0.9)
        for _ in range(ITERATIONS):
            self.zero(self.parameters, base)
            self.backward(self.loss())
            moved = [0.01 * p.grad for p in self.parameters]
            with torch.no_grad():
                torch._foreach_add_(self.parameters, moved)
            self.zero(self.parameters, base)
            self.backward(self.loss())
            with torch.no_grad():
                torch._foreach_sub_(self.parameters, moved)
            self.bytes = self._bytes()
            base.step()
            self.look()

    def _scaler(self) -> None:
        optimizer = torch.optim.AdamW(self.parameters, lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for _ in range(ITERATIONS):
            bad = self.draw.random() < 0.3
            self.micro_batches(
                optimizer, lambda raw, bad=bad: scaler.scale(raw * torch.inf if bad else raw)
            )  # type: ignore[misc]
            if self.clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.parameters, 0.5)
            scaler.step(optimizer)
            scaler.update()
            self.look()
            if not self.first_zero:
                self.zero(self.parameters, optimizer)

    def expected(self) -> list[float]:
        """The loss of each training step."""
        updates, kind = self.updates, self.kind
        if kind == "critic":
            updates = [update for number, update in enumerate(updates) if number % 4 != 3]
        elif kind in ("gan", "two optimizers"):
            updates = [a | b for a, b in zip(updates[::2], updates[1::2], strict=True)]
        return [sum(self.values[number] for number in update) for update in updates]


def tried(seed: int) -> int:
    """Run one generated loop; return how many of its losses were unknown."""
    loop = Loop(seed)
    with hooked(Adapter()) as one:
        if loop.draw.random() < 0.2:
            thread = threading.Thread(target=loop.run)
            thread.start()
            thread.join()
        else:
            loop.run()
        one._observe()
        told = [] if one.guard is None else one.guard.losses  # type: ignore[attr-defined]
    expected = loop.expected()
    shown = (
        "kind",
        "micro",
        "divide",
        "first_zero",
        "to_none",
        "clips",
        "probes",
        "style",
        "penalty",
    )
    what = f"seed {seed}: { {name: vars(loop)[name] for name in shown} }"
    assert loop.updates, what
    assert len(told) == len(expected), f"{what}\ntold {told}\nreference {expected}"
    for said, true in zip(told, expected, strict=True):
        assert said is None or said == pytest.approx(true, rel=1e-4, abs=1e-6), (
            f"{what}\ntold {told}\nreference {expected}"
        )
    assert not one.adapter.complaints  # type: ignore[attr-defined]
    return sum(said is None for said in told)


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 1060), marks=pytest.mark.long)]
)
def test_steps_and_losses_are_those_of_the_parameters(seeds: Sequence[int]) -> None:
    unknown = sum(map(tried, seeds))
    assert unknown <= 0.1 * len(seeds) * ITERATIONS, "unknown is the exception"

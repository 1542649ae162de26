"""The loss as `backward` sees it, without ever waiting for the GPU."""

from __future__ import annotations

from typing import Any

_MOST_DIVISIONS = 4


class Losses:
    """Losses of the micro-batches of one step. O(1) memory."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._known = 0
        self._count = 0

    def note(self, tensor: Any) -> None:
        """`backward` begins at `tensor`; one with several values, or on the GPU, is counted and not read."""
        if tensor.dim() != 0:
            return
        self._count += 1
        if tensor.device.type == "cpu" and not hasattr(tensor, "to_local"):
            self._sum += float(tensor.detach()) * _divisor(tensor)
            self._known += 1

    def take(self) -> tuple[float | None, int]:
        """Mean loss of the micro-batches since the last call, None where none was readable; and how many there were."""
        loss = self._sum / self._known if self._known else None
        count = self._count
        self._sum, self._known, self._count = 0.0, 0, 0
        return loss, count


def _divisor(tensor: Any) -> float:
    """What a loss was divided by for gradient accumulation (`loss / 4`), 1 where it was not."""
    product, node = 1.0, tensor.grad_fn
    # Frameworks divide more than once: accelerate does it again, by one, after the Trainer.
    for _ in range(_MOST_DIVISIONS):
        if node is None or node.name() != "DivBackward0":
            break
        value = _constant(getattr(node, "_saved_other", None))
        # Accumulation divides by a whole number of micro-batches; other quotients are part of the loss.
        if value is None or value < 1 or value != int(value):
            break
        product *= value
        node = node.next_functions[0][0]
    return product


def _constant(other: Any) -> float | None:
    if other is None or other.dim() != 0 or other.device.type != "cpu" or other.requires_grad:
        return None
    return float(other)

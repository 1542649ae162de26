from __future__ import annotations

from typing import Any

from distributed_training.base.neuron import BaseNeuron


class BaseMinerNeuron(BaseNeuron):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config=config)
        self.should_exit = False

    def run(self) -> None:
        while not self.should_exit:
            self.set_current_block_across_ranks()
            block = self.current_block
            dataset = self.training_loop.run_until_complete(self.fetch_training_data(block))
            if self.master:
                self.model.config.block_list.append(block)
            self._process_training_batch(dataset)

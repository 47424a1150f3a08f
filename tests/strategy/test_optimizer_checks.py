"""The optimizer's strategy divides only what it treats element by element; layers inside wrappers are refused."""

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.paced_layers import paced_cost_model
from helpers.strategies import layers_of
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lm_examples.llama import LlamaConfig, llama_layers, token_loss
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.strategy_balancer import StrategyBalancer
from zeroresize.strategy.trainer import StrategyTrainer

CONFIG = LlamaConfig(num_blocks=1, hidden_size=8, num_heads=2, mlp_size=4, vocabulary=16)
WHOLE, DIVIDED, STAGES, ONE = Strategy(2), Strategy(1, 2), Strategy(1, 1, 2), Strategy(1, ranks=(1,))
NOT_BY_ELEMENT = "is not element-wise"


class ByNorm(torch.optim.SGD):
    """As LAMB and Adafactor do it, which older releases of torch lack."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(1.0 + parameter.grad.norm())
        super().step()


def trainer_of(group, optimizer_strategy, kind=ByNorm):
    torch.manual_seed(0)
    strategies = [optimizer_strategy, *(one for one in (WHOLE, DIVIDED) if one != optimizer_strategy)]
    model = SwitchableModel(llama_layers(CONFIG), strategies=strategies, process_group=group, nodes=[0, 0])
    optimizer = kind([{"params": list(model.parameters())}], lr=0.1)
    return StrategyTrainer(model, optimizer, [LengthRange(8, optimizer_strategy)], loss=token_loss)


@on_ranks(2, timeout_s=30)
def test_an_optimizer_strategy_that_divides_what_the_optimizer_sees_whole_is_refused_on_every_rank(rank, group):
    of_elements = rf"the optimizer's strategy \(1, 2, 1\) divides .*ByNorm {NOT_BY_ELEMENT}"
    with pytest.raises(ValueError, match=of_elements):
        trainer_of(group, DIVIDED)
    trainer_of(group, DIVIDED, torch.optim.SGD)
    trainer = trainer_of(group, WHOLE)
    with pytest.raises(ValueError, match=of_elements):
        trainer.model.move_optimizer(DIVIDED, trainer.optimizer)
    with pytest.raises(ValueError, match=f"another strategy of the optimizer may divide .*ByNorm {NOT_BY_ELEMENT}"):
        StrategyBalancer(trainer, paced_cost_model(trainer.model.tensors, 1, 1.0, 2))
    trainer.step([torch.arange(9)])
    trainer = trainer_of(group, ONE)  # which leaves rank 0 out
    error, text = (ValueError, NOT_BY_ELEMENT) if rank else (RuntimeError, r"ranks \[1\] of the group failed")
    with pytest.raises(error, match=text):
        trainer.model.move_optimizer(DIVIDED, trainer.optimizer)
    trainer_of(group, STAGES)
    of_stages = r"the optimizer's strategy \(1, 1, 2\) divides .*LBFGS .* parameter by parameter"
    with pytest.raises(ValueError, match=of_stages):
        trainer_of(group, STAGES, torch.optim.LBFGS)


@on_ranks(2, timeout_s=30)
def test_layers_inside_data_parallel_wrappers_are_refused(rank, group):
    for wrap, message in (
        (DistributedDataParallel, r"layers\.1 is inside Distributed"),
        (fully_shard, r"layers\.1 is"),
    ):
        layers = layers_of()
        layers[1] = wrap(layers[1])
        with pytest.raises(ValueError, match=message):
            SwitchableModel(layers, strategies=[WHOLE], process_group=group)

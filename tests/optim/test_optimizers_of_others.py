"""Every call that moves or saves what an optimizer keeps refuses one that does not step what moves, on all ranks."""

import pytest
import torch
from helpers.pipelines import pipeline_of
from helpers.strategies import layers_of
from helpers.virtual_training import Pair

import zeroresize as zr
from zeroresize.microbatch.trainer import MicroBatchTrainer
from zeroresize.pipeline import PipelineBalancer, move_layers, repack
from zeroresize.pipeline.moving_layers import moving_during_backward
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.trainer import StrategyTrainer

pytestmark = pytest.mark.same_ranks

REFUSED = (ValueError, RuntimeError)


def optimizers_of(model, other):
    """That of another model, one without the first parameter that trains, and one of all but a frozen one."""
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    most = [one for name, one in model.named_parameters() if name != names[0]]
    yield torch.optim.AdamW(other.parameters()), names[0]
    yield torch.optim.AdamW(most), names[0]


def assert_refused(call, model, other, rank):
    for optimizer, name in optimizers_of(model, other):
        with pytest.raises(ValueError) as error:
            call(optimizer)
        assert "not step" in str(error.value) and name in str(error.value), error.value
        optimizer = optimizer if rank else torch.optim.AdamW(model.parameters())  # nobody waits for rank 1
        with pytest.raises(REFUSED) as error:
            call(optimizer)


def test_layers_of_a_pipeline_move_with_the_optimizer_that_steps_them_only(run_ranks):
    def check(rank, group):
        pipeline, other = pipeline_of(group), pipeline_of(group)
        before = pipeline.boundaries
        after = (0, 1, before[-1])

        def during_backward(optimizer):
            with moving_during_backward(pipeline, after, optimizer=optimizer):
                pass

        for call in (
            lambda optimizer: move_layers(pipeline, after, optimizer=optimizer),
            lambda optimizer: repack(pipeline, optimizer, num_stages=1),
            lambda optimizer: PipelineBalancer(pipeline, optimizer),
            during_backward,
        ):
            assert_refused(call, pipeline, other, rank)
        for optimizer, name in optimizers_of(pipeline, other):
            with pytest.raises(ValueError, match=f"not step .*{name}"):
                zr.sharded_state_dict(pipeline, optimizer)
        assert pipeline.boundaries == before
        trained = [one for one in pipeline.parameters() if one.requires_grad]
        assert len(trained) < len(list(pipeline.parameters()))
        move_layers(pipeline, after, optimizer=torch.optim.AdamW(trained))  # frozen ones need none
        assert pipeline.boundaries == after

    run_ranks(check, 2, timeout_s=60)


def test_units_move_and_are_divided_and_saved_with_the_optimizer_that_steps_them_only(run_ranks):
    def check(rank, group):
        model, other = Pair(group), Pair(group)

        def refuse_move(optimizer):
            balancer = zr.Balancer(model, optimizer, process_group=group, config=zr.BalanceConfig(mode="off"))
            try:
                balancer.move([3, 1])
            finally:
                balancer.close()

        assert_refused(
            lambda optimizer: zr.convert(model, group, shares=(3, 1), optimizer=optimizer), model, other, rank
        )
        zr.convert(model, group)
        for optimizer, name in optimizers_of(model, other):
            with pytest.raises(ValueError, match=f"not step .*{name.partition('.')[0]}"):
                refuse_move(optimizer)
            with pytest.raises(ValueError, match=f"not step .*{name}"):
                zr.sharded_state_dict(model, optimizer)
        model.up.bias.requires_grad_(False)
        learning = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
        zr.sharded_state_dict(model, learning)
        refuse_move(learning)
        assert model.up.weight.shape[0] == (3 if not rank else 1) * model.up.weight.shape[1]

    run_ranks(check, 2, timeout_s=60)


def test_strategies_and_micro_batches_take_the_optimizer_of_their_model_only(run_ranks):
    def check(rank, group):
        whole, stages = Strategy(dp=2), Strategy(pp=2)
        models = [SwitchableModel(layers_of(), strategies=[whole, stages], process_group=group) for _ in range(2)]
        model, other = models
        for call in (
            lambda one: StrategyTrainer(model, one, [LengthRange(8, whole)], loss=lambda y, packed: y.sum()),
            lambda optimizer: MicroBatchTrainer(
                model, optimizer, object(), batch_from=print, hollow=print, sizes=("size",), loss=print
            ),
            lambda one: model.move_optimizer(stages, one),
        ):
            assert_refused(call, model, other, rank)
        for optimizer, name in optimizers_of(model, other):
            with pytest.raises(ValueError, match=f"not step .*{name}"):
                zr.sharded_state_dict(model, optimizer)
        model.move_optimizer(stages, torch.optim.AdamW(model.parameters()))

    run_ranks(check, 2, timeout_s=60)

"""What a balancer is made of is there as a whole, or not at all."""

import pytest
import torch
from helpers.processes import for_each
from helpers.virtual_training import Pair

import zeroresize as zr
from zeroresize.control import assembly, mover, observer
from zeroresize.control import group as group_module
from zeroresize.measure.step_timer import StepTimer

CONFIG = zr.BalanceConfig(mode="semi", priority="path_length", pruned_update="freeze")


class Unlucky(Exception):
    pass


def fail(*args, **keywords):
    raise Unlucky


def attached_to(model, optimizer):
    """All that a balancer leaves on what it is given, in numbers."""
    counts = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    for layer in (model.up, model.down):
        for name in ("plan", "loans", "last", "watch_input", "watch_forward"):
            counts.append(getattr(layer, name) is not None)
        counts += [len(layer._forward_pre_hooks), layer.needs_eager_autograd, layer.probes.holds(StepTimer)]
    return counts


def made(group):
    model = zr.convert(Pair(group), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, lambda: zr.Balancer(model, optimizer, process_group=group, config=CONFIG)


PARTS = ["StartCheck", "ColumnFreezer", "Lender", "RankMonitor", "ForwardWatch", "PlanExecution"]


def test_where_a_part_cannot_be_made_nothing_is_left_of_the_others(run_ranks, monkeypatch):
    @for_each([(part,) for part in (*PARTS, "PlanExecution.install")])
    def build(rank, group, part):
        closed = []
        model, optimizer, balancer = made(group)
        before = attached_to(model, optimizer)
        with monkeypatch.context() as patched:
            patched.setattr(group_module.Exchange, "close", lambda exchange: closed.append(exchange))
            where = next(one for one in (assembly, observer, mover) if hasattr(one, part.partition(".")[0]))
            patched.setattr(f"{where.__name__}.{part}", fail)
            with pytest.raises(Unlucky):
                balancer()
        assert attached_to(model, optimizer) == before and len(set(closed)) == 1
        running = balancer()  # and another can be made
        while_it_runs = attached_to(model, optimizer)
        running.close()
        assert while_it_runs != before and attached_to(model, optimizer) == before

    run_ranks(build, 2)

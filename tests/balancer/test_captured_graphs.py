"""A CUDA graph that captured a layer's forward would go on to read its weight where it lay, so that units stay then."""

import pytest
import torch
from helpers.compiled import compiled, feed_forwards
from helpers.processes import caught_log_lines, for_each

import zeroresize as zr
from zeroresize.layers import balanced_linear

X = torch.ones(2, 3, 6, dtype=torch.float64)


@pytest.mark.slow
def test_units_of_what_was_captured_stay(run_ranks, monkeypatch):
    cases = [
        (lambda model: model(X), (0, 1)),
        (lambda model: model[1].eval().up(X), (1,)),
        (lambda model: compiled(model)[0](X), (0, 1)),
    ]

    @for_each(cases)
    def check(rank, group, capture, ranks):
        model = feed_forwards(group)
        optimizer = torch.optim.AdamW(model.parameters())
        balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(update_every=2), process_group=group)
        balancer.move((3, 1))
        model(X)
        with balancer.at_home():
            pass  # nothing was captured
        with monkeypatch.context() as patched:
            patched.setattr(balanced_linear, "is_being_captured", lambda x: rank in ranks)
            capture(model)
        weights = [one.clone() for one in model.parameters()]
        for call in (lambda: balancer.move((1, 1)), balancer.at_home().__enter__):
            with pytest.raises(RuntimeError, match=r"forward of [01]\.\w+ was captured in a CUDA graph.*moves=False"):
                call()
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))
        with caught_log_lines() as lines:
            for _ in range(4):
                model(X).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                balancer.step()
        lines = [line for line in lines if "from now on no units change hands, and training goes on" in line]
        assert len(lines) == (rank == 0 in ranks) and all("was captured" in line for line in lines)
        balancer.close()

    run_ranks(check, 2)

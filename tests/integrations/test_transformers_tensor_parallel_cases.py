"""The cases of transformers' own tests of tensor-parallel plans, for converted models whose units have moved."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.transformers_models import batch, split_by_plan, train, whole_decoder
from torch.nn.utils import clip_grad_norm_

import zeroresize as zr
from zeroresize.convert import balanced_layers
from zeroresize.layers.local_parts import local_of

pytestmark = pytest.mark.slow

EXACT = zr.BalanceConfig(mode="exact")
KINDS = ("llama", "qwen2", "mistral")


def saved_decoder(kind, folder, *, is_tied=False):
    """A whole decoder and the folder that it was saved in."""
    whole = whole_decoder(kind)
    if is_tied:
        whole.config.tie_word_embeddings = True
        whole.tie_weights()
    whole.save_pretrained(folder)
    return whole.eval()


def words(seed=3, num_words=10):
    return torch.randint(64, (1, num_words), generator=torch.Generator().manual_seed(seed))


def moved(model, shares):
    """The model's balancer, with units divided so."""
    balancer = zr.Balancer(model, torch.optim.SGD(model.parameters(), lr=0.0), EXACT)
    balancer.move(shares)
    return balancer


def gradients_of(model):
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def part_of(whole, like, rank):
    """This rank's even part of a whole gradient."""
    for dim, size in enumerate(like.shape):
        if whole.shape[dim] != size:
            return whole.chunk(2, dim)[rank]
    return whole


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "is_tied"), [("llama", False), ("llama", True), *((kind, False) for kind in KINDS[1:])]
)
def test_logits_are_those_of_one_process_at_home_and_away(run_ranks, tmp_path, kind, is_tied):
    whole = saved_decoder(kind, tmp_path / "whole", is_tied=is_tied)
    with torch.no_grad():
        expected = whole(words()).logits

    def check(rank, group):
        host, model = (split_by_plan(tmp_path / "whole", rank).eval() for _ in range(2))
        zr.convert(model)
        assert "lm_head" not in balanced_layers(model)
        with torch.no_grad():
            assert torch.equal(model(words()).logits, host(words()).logits)
            balancer = moved(model, (3, 1))
            torch.testing.assert_close(model(words()).logits, expected, atol=1e-6, rtol=0)
            balancer.close(at_home=True)
            assert torch.equal(model(words()).logits, host(words()).logits)

    run_ranks(check, 2)


def test_gradients_are_the_hosts_bit_for_bit_and_come_home_with_their_units(run_ranks, tmp_path):
    whole = saved_decoder("llama", tmp_path / "whole").train()
    whole(**batch(1)).loss.backward()
    expected = gradients_of(whole)

    def check(rank, group):
        host, model = (split_by_plan(tmp_path / "whole", rank).train() for _ in range(2))
        zr.convert(model)
        balancer = moved(model, (1, 1))
        for each in (host, model):
            each(**batch(1)).loss.backward()
        theirs = gradients_of(host)
        for name, gradient in gradients_of(model).items():
            assert torch.equal(local_of(gradient), local_of(theirs[name])), name
        model.zero_grad()
        balancer.move((1, 3))
        model(**batch(1)).loss.backward()
        balancer.move((1, 1))
        for name, gradient in gradients_of(model).items():
            part = part_of(expected[name], local_of(gradient), rank)
            torch.testing.assert_close(local_of(gradient), part, atol=1e-6, rtol=0, msg=name)

    run_ranks(check, 2)


def test_greedy_words_are_those_of_one_process_while_units_are_away(run_ranks, tmp_path):
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    whole = saved_decoder("llama", tmp_path / "whole")
    expected = whole.generate(words(), **options)

    def check(rank, group):
        model = split_by_plan(tmp_path / "whole", rank).eval()
        balancer = moved(model, (3, 1))
        for _ in range(2):
            result = model.generate(words(), **options)
            assert torch.equal(result.sequences, expected.sequences)
            torch.testing.assert_close(torch.stack(result.scores), torch.stack(expected.scores), atol=1e-6, rtol=0)
            balancer.move((1, 1))

    run_ranks(check, 2)


@pytest.mark.parametrize("mode", ["mig", "zero-rd"])
def test_columns_of_a_plans_layers_are_lent_and_dropped(run_ranks, tmp_path, mode):
    whole = saved_decoder("llama", tmp_path / "whole").train()
    expected = train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), 3, clip_grad_norm_)

    def check(rank, group):
        model = split_by_plan(tmp_path / "whole", rank).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = zr.BalanceConfig(mode=mode, ratio=0.5, ranks=[1], update_every=1)
        balancer = zr.Balancer(model, optimizer, config)
        values = train(model, optimizer, 3, zr.clip_grad_norm_, after=lambda step: balancer.step())
        plan = balancer.plan.ranks[1]
        assert (plan.lent > 0.4) if mode == "mig" else (plan.pruned > 0.4)
        assert (values == pytest.approx(expected, abs=1e-6)) == (mode == "mig")
        balancer.close()

    run_ranks(check, 2)


@pytest.mark.slow
def test_training_is_resumed_from_a_checkpoint_of_units_that_were_away(run_ranks, tmp_path):
    saved_decoder("llama", tmp_path / "whole")

    def check(rank, group):
        results = []
        for shares in ((3, 1), (1, 3)):
            model = split_by_plan(tmp_path / "whole", rank).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            balancer = zr.Balancer(model, optimizer, EXACT)
            balancer.move(shares)
            if not results:
                train(model, optimizer, 2, zr.clip_grad_norm_)
                dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path / "away")
            else:
                dcp.load(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path / "away")
            results.append(train(model, optimizer, 2, zr.clip_grad_norm_))
            balancer.close(at_home=True)
        assert results[1] == pytest.approx(results[0], abs=1e-6)

    run_ranks(check, 2)

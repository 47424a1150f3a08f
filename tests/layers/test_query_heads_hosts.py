"""Groups that are apart in training programs: compiled, lending, in replicas, of few bits, with unusual steps."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from helpers import hosts
from helpers import query_heads as heads
from helpers.compiled import compiled
from helpers.on_ranks import gathered, on_ranks
from helpers.query_heads import X, counts_of, require_alike, segment, split, train
from helpers.segments import convert_and_find
from torch.nn.parallel import DistributedDataParallel

import zeroresize as zr
from zeroresize.config.keys import MIGRATION_TRANSPORTS

pytestmark = [pytest.mark.same_ranks, pytest.mark.usefixtures("copies_are_cheap", "any_gain_is_enough")]

FORCED = {"ratio": 0.5, "ranks": [1]}
#: Shares by which groups are apart, and by which the ranks divide a head, too; and whether they may.
BOTH = [((3, 5), False), ((3.4, 4.6), True)]


@pytest.mark.slow
@on_ranks(2, timeout_s=110)  # compiles, on a loaded machine
def test_a_compiled_model_may_be_apart(rank, group):
    def run(model, optimizer, balancer, clip):
        call, values = compiled(model)[0], []
        for shares in ((1, 1), (3, 5), (5, 3), (8, 0), (1, 1)):
            balancer.move(shares)
            values += train(call, optimizer, 2, clip, balancer.step)
        return values

    require_alike(group, run)


LENDING = [(transport, *how, False) for transport in MIGRATION_TRANSPORTS for how in (*BOTH, ((6, 2), False))]


def lend_while_groups_are_apart(rank, group, transport, shares, divisible, compiles):
    def run(model, optimizer, balancer, clip):
        call = compiled(model, fullgraph=False)[0] if compiles else model
        return train(call, optimizer, 3, clip, balancer.step)

    options = {"migration_transport": transport, "shares": shares, "divisible": divisible}
    model = require_alike(group, run, mode="mig", **options, **FORCED)
    assert model[0].k.loans.has_loans and counts_of(model)[0] == pytest.approx(shares, abs=0.2)


test_ranks_lend_while_groups_are_apart = on_ranks(2, LENDING[:2])(lend_while_groups_are_apart)
test_ranks_lend_further_while_groups_are_apart = pytest.mark.slow(
    on_ranks(2, [*LENDING[2:], (MIGRATION_TRANSPORTS[0], (5, 3), False, True)])(lend_while_groups_are_apart)
)


@pytest.mark.slow
@on_ranks(2, [("given", *BOTH[0]), ("named", *BOTH[0]), ("given", *BOTH[1])])
def test_a_closure_computes_and_clips_within_the_step(rank, group, how, shares, divisible):
    def run(model, optimizer, balancer, clip):
        values = []

        def closure():
            optimizer.zero_grad()
            loss = model(X).square().mean()
            loss.backward()
            values.append(clip(model.parameters(), 0.02).item())
            return loss

        balancer.move(shares)
        for _ in range(3):
            loss = optimizer.step(closure) if how == "given" else optimizer.step(closure=closure)
            values.append(loss.item())
            balancer.step()
        return values

    require_alike(group, run, divisible=divisible)


@pytest.mark.slow
@on_ranks(2, [(zeroes, *how) for zeroes in (True, False) for how in BOTH])
def test_steps_are_skipped_gradients_stay_and_units_move_between_backward_and_step(
    rank, group, zeroes, shares, divisible
):
    def run(model, optimizer, balancer, clip):
        values = []
        balancer.move(shares)
        for step in range(8):
            if zeroes:
                optimizer.zero_grad()
            for part in X.chunk(2):
                loss = model(part).square().mean()
                loss.backward()
                values.append(loss.item())
            if step in (1, 4):
                with balancer.at_home():
                    values.append(clip(model.parameters(), 0.05).item())
            balancer.move({3: (5, 3), 4: (2, 6), 5: (1, 1)}.get(step, shares))
            values.append(clip(model.parameters(), 0.02).item())
            if step != 2:
                optimizer.step()
            balancer.step()
            values.append(clip(model.parameters(), 0.01).item())
        return values

    require_alike(group, run, divisible=divisible)


@on_ranks(4, BOTH)
def test_replicas_accumulate_under_no_sync(rank, _, shares, divisible):
    group = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    wrappers = []

    def wrap(model):
        wrappers.append(DistributedDataParallel(model, process_group=replicas, bucket_cap_mb=0.001))
        return wrappers[0]

    def run(model, optimizer, balancer, clip):
        is_whole, values = isinstance(balancer, heads.Alone), []
        call, parts = (model, X.chunk(2)) if is_whole else (wrappers[0], [X.chunk(2)[rank // 2]])
        for target in ((1, 1), shares, shares, (5, 3)):
            balancer.move(target)
            for scale in (1.0, 2.0):
                with nullcontext() if is_whole or scale == 2.0 else call.no_sync():
                    for part in parts:
                        (call(scale * part).square().mean() / len(parts)).backward()
            values.append(clip(model.parameters(), 0.02).item())
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
        return values

    counts = counts_of(require_alike(group, run, wrap=wrap, divisible=divisible))[0]
    assert counts == pytest.approx((5, 3), abs=0.2)


@on_ranks(2, BOTH)
def test_a_copy_of_the_model_that_is_made_at_home_is_trained(rank, group, shares, divisible):
    def run(model, optimizer, balancer, clip):
        balancer.move(shares)
        with balancer.at_home():
            other = copy.deepcopy(model)
        return train(other, torch.optim.AdamW(other.parameters(), lr=1e-2), 3, clip)

    require_alike(group, run, divisible=divisible)


@on_ranks(2, BOTH)
def test_a_copy_of_the_model_while_groups_are_apart_is_trained_by_an_optimizer_that_nobody_knows(
    rank, group, shares, divisible
):
    def run(model, optimizer, balancer, clip):
        balancer.move(shares)
        copies.append(copy.deepcopy(model))
        return train(copies[-1], torch.optim.AdamW(copies[-1].parameters(), lr=1e-2), 3, clip)

    copies = []
    require_alike(group, run, divisible=divisible)
    rows, keys = copies[0][0].k.shared_rows, copies[0][0].k.weight.detach().unflatten(0, (-1, heads.HEAD))
    of_rank = gathered(group, [keys[here] for here, _ in rows.places])
    assert torch.equal(of_rank[0][0], of_rank[1][0])


@on_ranks(2, BOTH)
def test_an_optimizer_that_is_made_after_the_balancer_has_ended_is_as_good(rank, group, shares, divisible):
    def run(model, optimizer, balancer, clip):
        balancer.move(shares)
        values = train(model, optimizer, 2, clip, balancer.step)
        getattr(balancer, "close", lambda: None)()
        return values + train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, clip)

    counts = counts_of(require_alike(group, run, divisible=divisible))[0]
    assert counts == pytest.approx(shares, abs=0.2)


class Computing:
    """A model that computes in other numbers than those of its input."""

    def __init__(self, model, dtype, autocasts=False):
        self.model, self.dtype, self.parameters = model.to(dtype), dtype, model.parameters
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=autocasts)

    def __call__(self, x):
        with self.autocast:
            return self.model(x.to(self.dtype))


@pytest.mark.slow
@on_ranks(2, [(*bits, *how) for bits in ((torch.float32, True), (torch.bfloat16, False)) for how in BOTH])
def test_few_bits(rank, group, dtype, autocasts, shares, divisible):
    def run(model, optimizer, balancer, clip):
        balancer.move(shares)
        return train(Computing(model, dtype, autocasts), optimizer, 4, clip, balancer.step)

    require_alike(group, run, tolerance=2**-6, divisible=divisible)


@zr.mark_elementwise
class WithMasters:
    """As Colossal-AI's wrappers: working weights of few bits, and master copies that an optimizer is given instead."""

    def __init__(self, optimizer):
        self.optim, self.working = optimizer, optimizer.param_groups[0]["params"]
        self.masters = optimizer.param_groups[0]["params"] = [weight.detach().double() for weight in self.working]

    def get_working_to_master_map(self):
        return {id(weight): master for weight, master in zip(self.working, self.masters, strict=True)}

    def step(self):
        for weight, master in zip(self.working, self.masters, strict=True):
            master.grad = weight.grad.double()
        self.optim.step()
        for weight, master in zip(self.working, self.masters, strict=True):
            weight.data.copy_(master)

    def zero_grad(self):
        for weight in self.working:
            weight.grad = None


@pytest.mark.slow
@on_ranks(2, BOTH)
def test_a_wrapper_puts_master_copies_into_the_optimizer_after_groups_are_apart(rank, group, shares, divisible):
    model = split(group).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    segments = [segment(number, divisible=divisible) for number in range(2)]
    zr.convert(model, process_group=group, segments=segments, shares=shares, optimizer=optimizer)
    host = WithMasters(optimizer)

    def run(model, optimizer, balancer, clip):
        model, values = Computing(model, torch.float32), []
        steps = optimizer if optimizer is host else WithMasters(optimizer)
        for target in (shares, (6, 2), (5, 3)):
            balancer.move(target)
            values += train(model, steps, 3, clip, balancer.step)
        return values

    balancer = zr.Balancer(model, host, zr.BalanceConfig(mode="off"), process_group=group)
    require_alike(group, run, made=(model, host, balancer), tolerance=1e-4)


@on_ranks(2)
def test_whole_groups_move_where_copies_might_not_stay_alike(rank, group):
    def run(model, optimizer, balancer, clip):
        values = []
        for shares in ((3, 5), (1, 1), (5, 3)):
            balancer.move(shares)
            values += train(model, optimizer, 2, clip, balancer.step)
        return values

    assert counts_of(require_alike(group, run, of_group=2, of_optimizer={"fused": True}))[0] == (6, 2)
    assert counts_of(heads.divided(group, 2, shares=(3, 5)))[0] == (2, 6)  # without an optimizer
    model = split(group, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    zr.convert(model, process_group=group, segments=[segment(0, 2)], shares=(3, 5), optimizer=optimizer)
    assert model[0].out.segment.owned.counts == (3, 5)
    with pytest.raises(ValueError, match=r"units of 0\.out that share rows are on several ranks, .* use fused=False"):
        zr.Balancer(model, torch.optim.AdamW(model.parameters(), fused=True), process_group=group)


PRUNING = [{"pruned_update": "freeze"}, *({"paper": {"imputation": each}} for each in ("zero", "same", "average"))]


@on_ranks(2, [(options,) for options in PRUNING])
def test_copies_stay_alike_where_a_rank_prunes(rank, group, options):
    model, optimizer, balancer = heads.balanced(group, mode="zero-pri", shares=(3, 5), **FORCED, **options)
    train(model, optimizer, 3, zr.clip_grad_norm_, balancer.step)
    assert (model[0].k.plan is not None) == (rank == 1)
    heads.require_copies_alike(model, group)


REFUSED = [
    ({"column": ["0.q", "0.k"]}, r"layer 0\.k is in it twice"),
    ({"group_size": 3}, "8 units are no whole groups of group_size=3"),
    ({"group_size": 8}, r"different numbers of features of a unit \(4 of 0\.q, 8 of 0\.k"),
    ({"group_size": 2}, r"different numbers of features of a unit \(4 of 0\.q, 2 of 0\.k"),
    ({"shared": []}, "group_size=4 needs the layers whose rows units share"),
    ({"column": [], "shared": ["0.q", "0.k", "0.v"]}, "it names no column-parallel layer"),
    ({"shared": ["0.out"]}, r"layer 0\.out is row-parallel"),
    ({"shared": ["packed"]}, "packed holds several parts, whose rows no units can share"),
]


@on_ranks(2, REFUSED)
def test_what_is_named_wrongly_is_refused(rank, group, options, message):
    model, packed = split(group), torch.nn.Linear(heads.WIDTH, 4 * heads.HEAD)
    model.packed = zr.ColumnParallelLinear.from_linear(packed, process_group=group, parts=2)
    with pytest.raises(ValueError, match=message):
        zr.convert(model, process_group=group, segments=[segment(0, **options)])


@on_ranks(2)
def test_a_trial_tells_whether_keys_are_named(rank, group):
    for each in zr.check_segments(heads.divided(group), X):
        assert each.problem is None and each.output_difference < 1e-13 and each.gradient_difference < 1e-13
    named = [segment(number, shared=[], group_size=1) for number in range(2)]
    model = zr.convert(split(group), process_group=group, segments=named)
    with pytest.raises(ValueError, match="2 of 2 segments"):
        zr.check_segments(model, X)


@pytest.mark.transformers
@on_ranks(2)
def test_heads_stay_where_keys_are_tiled(rank, group):
    from transformers.models.llama import modeling_llama

    real = modeling_llama.repeat_kv
    by_size = lambda keys, times: times * real(keys, times)  # noqa: E731
    tiled = lambda keys, times: keys.repeat(1, times, 1, 1)  # noqa: E731
    for repeats, kinds in ((real, {"heads", "neurons"}), (tiled, {"neurons"}), (by_size, {"neurons"})):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(modeling_llama, "repeat_kv", repeats)
            segments, reasons = convert_and_find(hosts.split(hosts.build("Llama", "eager"), group), group)
        assert {each.kind for each in segments} == kinds
        assert all("MixesUnitsError: a unit has other numbers" in reason for reason in reasons.values())


@pytest.mark.transformers
@on_ranks(2, [("q_proj",), ("k_proj",)])
def test_heads_stay_where_a_layer_is_wrapped(rank, group, name):
    model = hosts.split(hosts.build("Llama", "eager"), group)
    for layer in model.layers:
        setattr(layer.self_attn, name, torch.nn.Sequential(getattr(layer.self_attn, name)))
    segments, reasons = convert_and_find(model, group)
    assert {each.kind for each in segments} == {"neurons"} and reasons

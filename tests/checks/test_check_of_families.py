"""check_parallel() finds nothing in transformers' models that are rightly divided, whoever has divided them."""

import pytest
import transformers_cases
from helpers import hosts
from helpers.on_ranks import on_ranks
from helpers.transformers_models import DECODERS, batch, split_by_styles, whole_encoder
from torch.distributed.device_mesh import DeviceMesh

import zeroresize as zr

pytestmark = pytest.mark.slow


def causes(model, inputs, loss, reference=None):
    return [
        (each.cause, each.parameter or each.layer)
        for each in zr.check_parallel(model, inputs, loss, reference=reference)
    ]


def whole(kind):
    model = hosts.build(kind)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # of which no loss here reads anything
    return model


@on_ranks(2, timeout_s=120)
def test_models_that_this_packages_layers_divide(rank, group):
    seen = {}
    for kind in hosts.KINDS:
        model = whole(kind)
        hosts.split(model, group)
        seen[kind] = causes(
            model,
            kind,
            lambda model, kind: hosts.last_hidden_state(kind, model).square().mean(),
            lambda kind=kind: whole(kind),
        )
    assert seen == {kind: [] for kind in hosts.KINDS}


@pytest.mark.transformers
@on_ranks(2, timeout_s=120)
def test_decoders_that_their_plans_divide(rank, group):
    kinds = [kind for kind in DECODERS if kind != "qwen3"]  # whose norms of heads transformers itself gets wrong

    made = {kind: transformers_cases.setting(kind, rank) for kind in kinds}
    assert {kind: causes(one.model, one.batch, one.loss) for kind, one in made.items()} == {kind: [] for kind in kinds}


@pytest.mark.transformers
@on_ranks(2, timeout_s=120)
def test_encoders_that_torchs_styles_divide(rank, group):
    kinds = ("bert", "vit")

    mesh = DeviceMesh.from_group(group, "cpu")
    models = {kind: split_by_styles(whole_encoder(kind).train(), mesh) for kind in kinds}
    assert {
        kind: causes(model, batch(1, kind), transformers_cases.loss, lambda kind=kind: whole_encoder(kind).train())
        for kind, model in models.items()
    } == {kind: [] for kind in kinds}

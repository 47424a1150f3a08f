"""Heads that the ranks do not divide are an error that names heads and ranks, before the first forward, or right."""

import pytest
from helpers import dtensor_models
from helpers.on_ranks import on_ranks
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr

pytestmark = pytest.mark.transformers


@on_ranks(2)
def test_plain_styles(rank, group):
    for styles in ((ColwiseParallel, RowwiseParallel), (zr.ColwiseParallel, zr.RowwiseParallel)):
        attention = dtensor_models.Attention(bias=True)
        attention.head_dim = dtensor_models.WIDTH  # one head
        plan = {name: styles[name == "out"]() for name in ("q", "k", "v", "out")}
        parallelize_module(attention, dtensor_models.mesh_of(), plan)
        with pytest.raises(ValueError, match=r"q has 1 heads of 16 rows and is split over 2 ranks"):
            zr.convert(attention)

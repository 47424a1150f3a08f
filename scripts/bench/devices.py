"""The ranks' devices: a GPU for each, or for several where there are fewer, joined by NCCL; else CPUs, by gloo."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def join_ranks(*, rank: int, world_size: int, **options: Any) -> torch.device:
    """Take a device and join the other ranks by ``dist.init_process_group``, which is given the options, too.

    NCCL refuses two ranks of one host on one GPU. Ranks that share one name different hosts, so that they talk by
    sockets: slowly, but with all that NCCL does otherwise. What they compute takes turns on the GPU.

    Returns:
        This rank's device.
    """
    options |= {"rank": rank, "world_size": world_size}
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **options)
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if world_size > num_devices:
        loopback = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {**loopback, "NCCL_HOSTID": f"rank {rank}", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(rank % num_devices)
    torch.cuda.init()  # else a mesh would choose another device
    dist.init_process_group("nccl", **options)
    return torch.device("cuda", torch.cuda.current_device())

"""A process that keeps a core or a GPU busy until its parent dies: started by contention.py, not imported.

Only the standard library is imported (and torch, to compete on a GPU), so that it is at work within milliseconds. It
writes one byte when it begins to compete.
"""

import argparse
import ctypes
import os
import signal
import sys
from collections import deque

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id to die with")
    parser.add_argument("--core", type=int, help="the CPU core to compete for")
    parser.add_argument("--gpu", type=int, help="the CUDA device to compete for")
    arguments = parser.parse_args()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # as soon as the parent dies; below if it has before
    if arguments.gpu is None:
        os.sched_setaffinity(0, {arguments.core})
        _say_ready()
        _compete_for_core(arguments.parent)
    else:
        _compete_for_gpu(arguments.parent, arguments.gpu)


def _say_ready() -> None:
    sys.stdout.write(".")
    sys.stdout.flush()


def _compete_for_core(parent: int) -> None:
    value = 0.5
    while os.getppid() == parent:
        for _ in range(20_000):  # about a millisecond
            value = 3.7 * value * (1.0 - value)


def _compete_for_gpu(parent: int, gpu: int) -> None:
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # its names could hide those that torch imports
    import torch

    torch.cuda.set_device(gpu)
    matrix = torch.rand(2048, 2048, device="cuda", dtype=torch.float16)
    out = torch.empty_like(matrix)
    torch.mm(matrix, matrix, out=out)
    torch.cuda.synchronize()
    _say_ready()
    batches: deque[torch.cuda.Event] = deque()
    while os.getppid() == parent:
        for _ in range(100):  # some milliseconds
            torch.mm(matrix, matrix, out=out)
        batches.append(torch.cuda.Event())
        batches[-1].record()
        if len(batches) > 2:  # always with work in the queue: a GPU without any is the other process's
            batches.popleft().synchronize()


if __name__ == "__main__":
    main()

"""Ranks of which some end in the middle of a test."""

import multiprocessing
import os
import time
import traceback

import torch.distributed as dist


def told_by_survivors(fn, num_ranks, folder):
    """What ``fn(rank, group)`` returns, by rank, on those ranks whose process it does not end."""
    fork = multiprocessing.get_context("fork")

    def main(rank):
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
        try:
            told = fn(rank, dist.group.WORLD)
        except BaseException:
            told = traceback.format_exc()
        (folder / f"{rank}.writing").write_text(told)
        (folder / f"{rank}.writing").rename(folder / f"{rank}.told")
        time.sleep(60.0)  # until it is killed: ending would break connections

    ranks = [fork.Process(target=main, args=(rank,)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 40.0
    try:
        while time.monotonic() < deadline:
            told = {int(path.stem): path.read_text() for path in folder.glob("*.told")}
            if all(not process.is_alive() or rank in told for rank, process in enumerate(ranks)):
                return told
            time.sleep(0.05)
        raise TimeoutError(f"only ranks {sorted(told)} have ended: {told}")
    finally:
        for process in ranks:
            process.kill()
            process.join()


def dying(before=lambda *_: None):
    """Instead of sending messages: the process ends."""

    def start_messages(sends, receives, group, over=None, tag=0):
        before(sends, receives, group)
        os._exit(0)

    return start_messages


def send_half(sends, receives, group):
    """One of the messages goes out, whole."""
    for peer in sorted(sends)[:1]:
        group.send([sends[peer]], peer, 0).wait()

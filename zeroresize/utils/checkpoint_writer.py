"""Checkpoints by torch.distributed.checkpoint (DCP) whose index is no pickle."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zeroresize.utils.checkpoint_index import INDEX, index_to_json


class CheckpointWriter(FileSystemWriter):
    """Writes a folder as DCP does, but with ``index.json`` in place of the pickle ``.metadata``::

        dcp.save(zr.sharded_state_dict(model, optimizer), storage_writer=CheckpointWriter(folder))

    Only :class:`~zeroresize.utils.checkpoint_reader.CheckpointReader` reads it.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a plan has of this rank.

        Raises:
            OSError: with the reason and the folder, as on a full disk, which torch tells as an unexpected position.
        """
        try:
            written = super().write_data(plan, planner)
            written.wait()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, os.fspath(self.path)) from error
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, whole or not at all, once all ranks have written.

        Raises:
            OSError: if it cannot be written.
        """
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}
        path = Path(self.path) / INDEX
        unfinished = path.with_name(f"{INDEX}.tmp")
        with unfinished.open("w", encoding="utf-8") as stream:
            stream.write(index_to_json(metadata))
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)

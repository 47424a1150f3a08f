"""torch.distributed.checkpoint (DCP) reads and writes what is divided unevenly over ranks."""

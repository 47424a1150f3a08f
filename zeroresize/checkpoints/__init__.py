"""Models and optimizers that are divided over ranks, for torch.distributed.checkpoint (DCP)."""

"""What travels between ranks when a job changes its strategy (HotSPa, Algorithm 1)."""

"""Training of vision transformers with balanced tensor parallelism: configurations, hosts, data and the loop."""

"""The parts of a balancer: its checks and start, the group's decision, and the executions that put a plan in force."""

"""The parts of a balancer, between measuring and the layers' plans."""

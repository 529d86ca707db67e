"""Finding kernel options: what Inductor's autotuning logs, and sweeps scored by whole rollouts."""

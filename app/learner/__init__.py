"""Learning plane: GRPO on bounded-staleness rollouts, replay buffer, publisher, checkpoints."""

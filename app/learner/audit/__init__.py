"""What nodes say of their rollouts, computed again."""

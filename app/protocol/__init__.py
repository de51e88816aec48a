"""The messages that control service, learner and agent exchange. Imports nothing of ours."""

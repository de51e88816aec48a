"""The learner on several processes, one a GPU: who says what to whom, and where the weights lie."""

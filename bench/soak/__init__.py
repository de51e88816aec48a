"""The parts of `bench.soak_providers`: a clock that processes share, the market, and the control side that dies."""

"""The same behaviour of every provider adapter, held against an emulator of each provider."""

"""As environments were written for the package before 0.4."""


def load_environment() -> None:
    """The entry that the package had then."""
    raise AssertionError("nobody calls this any more")
